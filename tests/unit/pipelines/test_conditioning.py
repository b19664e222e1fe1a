"""Conditioning rows can be picked and paired with a negative without touching a valid token."""

import torch

from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Conditioning, FirstFrames

TEXT = tuple(torch.full((length, 3), float(length)) for length in (4, 2, 5))
GLYPH = tuple(torch.full((length, 2), -1.0 - length) for length in (0, 3, 1))


def assert_same_tokens(received: Conditioning, rows: list[int]) -> None:
    assert len(received) == len(rows)
    for text, glyph, row in zip(received.text, received.glyph, rows, strict=True):
        assert torch.equal(text, TEXT[row])
        assert torch.equal(glyph, GLYPH[row])


def test_rows_are_picked_in_any_order_with_repeats_and_a_negative_row_follows_for_every_row():
    assert_same_tokens(Conditioning(TEXT, GLYPH).rows([1, 0, 1]), [1, 0, 1])
    positive = Conditioning(TEXT[:2], GLYPH[:2])
    negative = Conditioning(TEXT[2:], GLYPH[2:])
    assert_same_tokens(positive.with_negative(negative), [0, 1, 2, 2])
    assert_same_tokens(negative.with_negative(positive.rows([1])), [2, 1])


def test_rows_and_negatives_keep_the_image_of_their_sample():
    images = FirstFrames(torch.arange(3.0)[:, None, None], -torch.arange(3.0)[:, None, None, None])
    conditioning = Conditioning(TEXT, GLYPH, images).rows([2, 0])
    guided = conditioning.with_negative(Conditioning(TEXT[:1], GLYPH[:1]))
    for received, expected in ((conditioning, [2, 0]), (guided, [2, 0, 2, 0])):
        assert received.images.states.flatten().tolist() == expected
        assert (-received.images.latents).flatten().tolist() == expected
