"""Conditioning: the transformer's inputs besides latents and timestep, encoded once per unique prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


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
    """Encoded prompts, one row each; token dims are as long as the longest row (padding on the right).

    Attributes:
        text: `[P, S, D]` states of the language model (HunyuanVideo-1.5: D = 3584).
        text_mask: `[P, S]` bool, True where a token is valid.
        glyph: `[P, S_g, D_g]` ByT5 states of the quoted texts (D_g = 1472); S_g is 0 when no prompt quotes a text.
        glyph_mask: `[P, S_g]` bool.
        images: what the videos start from; None for text-to-video.
    """

    text: Tensor
    text_mask: Tensor
    glyph: Tensor
    glyph_mask: Tensor
    images: FirstFrames | None = None

    @classmethod
    def from_rows(
        cls, text: Sequence[Tensor], glyph: Sequence[Tensor], images: FirstFrames | None = None
    ) -> "Conditioning":
        """Join unpadded rows: `text[p]` is `[S_p, D]`, `glyph[p]` is `[S_gp, D_g]` (S_gp may be 0)."""
        return cls(*_pad(text), *_pad(glyph), images)

    def rows(self, index: Sequence[int]) -> "Conditioning":
        """Return the rows `index` (repeats allowed), padded to the longest among them."""
        images = None if self.images is None else self.images.rows(index)
        return self.from_rows([self._text_of(i) for i in index], [self._glyph_of(i) for i in index], images)

    def with_negative(self, negative: "Conditioning") -> "Conditioning":
        """Return the rows of `self`, then for each the one row of `negative` with that row's own image."""
        every = range(len(self))
        text = [*map(self._text_of, every), *[negative._text_of(0)] * len(self)]
        glyph = [*map(self._glyph_of, every), *[negative._glyph_of(0)] * len(self)]
        images = None if self.images is None else self.images.rows([*every, *every])
        return self.from_rows(text, glyph, images)

    def __len__(self) -> int:
        """Number of rows."""
        return self.text.shape[0]

    def _text_of(self, row: int) -> Tensor:
        return self.text[row][self.text_mask[row]]

    def _glyph_of(self, row: int) -> Tensor:
        return self.glyph[row][self.glyph_mask[row]]


def _pad(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Stack rows `[S_p, D]` into `[P, S, D]` with zeros on the right, and the mask `[P, S]` of what is real."""
    lengths = torch.tensor([row.shape[0] for row in rows], device=rows[0].device)
    padded = pad_sequence(list(rows), batch_first=True)
    return padded, torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
