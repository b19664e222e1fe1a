"""Conditioning: the transformer's inputs besides latents and timestep, encoded once per unique prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FirstFrames:
    """P images that videos start from, encoded once.

    Attributes:
        states: `[P, S_v, D_v]` states of the vision encoder (HunyuanVideo-1.5: 729 x 1152).
        latents: `[P, C, H', W']` scaled latents of the images at the size of the videos.
    """

    states: Tensor
    latents: Tensor

    def rows(self, index: Sequence[int]) -> "FirstFrames":
        """Return the rows `index` (repeats allowed)."""
        picked = torch.tensor(index, device=self.states.device)
        return FirstFrames(self.states[picked], self.latents[picked])


@dataclass(frozen=True)
class Conditioning:
    """Encoded prompts, one row each, without padding: how many tokens a row has is known on the host.

    Attributes:
        text: P states `[S_p, D]` of the language model (HunyuanVideo-1.5: D = 3584).
        glyph: P ByT5 states `[S_gp, D_g]` of the quoted texts (D_g = 1472); S_gp is 0 when the prompt quotes no text.
        images: what the videos start from; None for text-to-video.
    """

    text: tuple[Tensor, ...]
    glyph: tuple[Tensor, ...]
    images: FirstFrames | None = None

    def rows(self, index: Sequence[int]) -> "Conditioning":
        """Return the rows `index` (repeats allowed)."""
        images = None if self.images is None else self.images.rows(index)
        return Conditioning(tuple(self.text[i] for i in index), tuple(self.glyph[i] for i in index), images)

    def with_negative(self, negative: "Conditioning") -> "Conditioning":
        """Return the rows of `self`, then for each the one row of `negative` with that row's own image."""
        count = len(self)
        images = None if self.images is None else self.images.rows([*range(count), *range(count)])
        return Conditioning(self.text + negative.text * count, self.glyph + negative.glyph * count, images)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.text)
