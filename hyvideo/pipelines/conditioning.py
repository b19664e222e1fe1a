"""Conditioning: what the transformer is told, encoded once per unique prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class Conditioning:
    """Encoded prompts, one row each; token dims are as long as the longest row (padding on the right).

    Attributes:
        text: `[P, S, D]` states of the language model (HunyuanVideo-1.5: D = 3584).
        text_mask: `[P, S]` bool, True where a token is valid.
        glyph: `[P, S_g, D_g]` ByT5 states of the quoted texts (D_g = 1472); S_g is 0 when no prompt quotes a text.
        glyph_mask: `[P, S_g]` bool.
    """

    text: Tensor
    text_mask: Tensor
    glyph: Tensor
    glyph_mask: Tensor

    @classmethod
    def from_rows(cls, text: Sequence[Tensor], glyph: Sequence[Tensor]) -> "Conditioning":
        """Join unpadded rows: `text[p]` is `[S_p, D]`, `glyph[p]` is `[S_gp, D_g]` (S_gp may be 0)."""
        return cls(*_pad(text), *_pad(glyph))

    def rows(self, index: Sequence[int]) -> "Conditioning":
        """Return the rows `index` (repeats allowed), padded to the longest among them."""
        picked = [int(i) for i in index]
        return self.from_rows([self._text_of(i) for i in picked], [self._glyph_of(i) for i in picked])

    def joined(self, other: "Conditioning") -> "Conditioning":
        """Return the rows of `self` followed by those of `other`."""
        text = [*map(self._text_of, range(len(self))), *map(other._text_of, range(len(other)))]
        glyph = [*map(self._glyph_of, range(len(self))), *map(other._glyph_of, range(len(other)))]
        return self.from_rows(text, glyph)

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
