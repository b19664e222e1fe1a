"""Conditioning rows can be picked and paired with a negative without touching a valid token."""

import torch
from torch import Tensor

from hyvideo.pipelines.conditioning import Conditioning, FirstFrames

TEXT = [torch.full((length, 3), float(length)) for length in (4, 2, 5)]
GLYPH = [torch.full((length, 2), -1.0 - length) for length in (0, 3, 1)]


def valid_tokens(conditioning: Conditioning) -> list[tuple[Tensor, Tensor]]:
    return [
        (conditioning.text[row][conditioning.text_mask[row]], conditioning.glyph[row][conditioning.glyph_mask[row]])
        for row in range(len(conditioning))
    ]


def assert_same_tokens(received: list[tuple[Tensor, Tensor]], rows: list[int]) -> None:
    assert len(received) == len(rows)
    for (text, glyph), row in zip(received, rows, strict=True):
        assert torch.equal(text, TEXT[row])
        assert torch.equal(glyph, GLYPH[row])


def test_rows_are_padded_with_zeros_on_the_right_to_the_longest():
    conditioning = Conditioning.from_rows(TEXT, GLYPH)
    assert conditioning.text.shape == (3, 5, 3)
    assert conditioning.glyph.shape == (3, 3, 2)
    assert conditioning.text_mask.sum(1).tolist() == [4, 2, 5]
    assert not conditioning.text[~conditioning.text_mask].any()
    assert not conditioning.glyph[~conditioning.glyph_mask].any()
    assert_same_tokens(valid_tokens(conditioning), [0, 1, 2])


def test_rows_picks_in_any_order_with_repeats_and_drops_needless_padding():
    picked = Conditioning.from_rows(TEXT, GLYPH).rows([1, 0, 1])
    assert_same_tokens(valid_tokens(picked), [1, 0, 1])
    assert picked.text.shape[1] == 4
    assert Conditioning.from_rows(TEXT, GLYPH).rows([0, 0]).glyph.shape == (2, 0, 2)


def test_a_negative_row_follows_for_every_row():
    positive = Conditioning.from_rows(TEXT[:2], GLYPH[:2])
    negative = Conditioning.from_rows(TEXT[2:], GLYPH[2:])
    assert_same_tokens(valid_tokens(positive.with_negative(negative)), [0, 1, 2, 2])
    assert_same_tokens(valid_tokens(negative.with_negative(positive.rows([1]))), [2, 1])


def test_rows_and_negatives_keep_the_image_of_their_sample():
    images = FirstFrames(torch.arange(3.0)[:, None, None], -torch.arange(3.0)[:, None, None, None])
    conditioning = Conditioning.from_rows(TEXT, GLYPH, images).rows([2, 0])
    guided = conditioning.with_negative(Conditioning.from_rows(TEXT[:1], GLYPH[:1]))
    for received, expected in ((conditioning, [2, 0]), (guided, [2, 0, 2, 0])):
        assert received.images.states.flatten().tolist() == expected
        assert (-received.images.latents).flatten().tolist() == expected
