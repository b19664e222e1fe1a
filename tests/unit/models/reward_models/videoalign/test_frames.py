"""Which frames VideoAlign sees, read at any width, and that they are cut as the library cuts images."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.nn.functional import interpolate
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hyvideo.data.videos import read_chosen, read_video, write_video
from hyvideo.models.reward_models.videoalign.scorer import MIN_PIXELS, frame_indices, patches
from tests.support.limits import bounded_memory
from tests.support.videos import moving_square


@pytest.mark.parametrize(
    ("total", "video_fps", "choice", "expected"),
    [
        (81, 24, {"fps": 2.0}, [0, 16, 32, 48, 64, 80]),  # 6.75 frames, rounded to even
        (25, 24, {"fps": 2.0}, [0, 8, 16, 24]),  # at least 4
        (5, 24, {"fps": 2.0}, [0, 1, 3, 4]),
        (3, 24, {"fps": 2.0}, [0, 2]),  # an odd count of frames gives an even choice
        (1, 24, {"fps": 2.0}, [0, 0]),
        (33, 24, {"fps": 2.0, "num_frames": 5}, [0, 11, 21, 32]),
        (33, 24, {"fps": 2.0, "num_frames": 8}, [0, 5, 9, 14, 18, 23, 27, 32]),
        (4, 24, {"fps": 2.0, "num_frames": 6}, [0, 1, 2, 3]),  # all there are
        (5, 24, {"fps": 2.0, "num_frames": 6}, [0, 1, 2, 3, 4, 4]),
    ],
)
def test_frames_are_spread_over_the_whole_video(total, video_fps, choice, expected):
    assert frame_indices(total, video_fps, **choice) == expected


@given(st.integers(1, 2000), st.floats(1, 120), st.floats(0.1, 60))
def test_any_video_gives_an_even_number_of_its_own_frames_in_order(total, video_fps, fps):
    indices = frame_indices(total, video_fps, fps=fps)
    assert len(indices) % 2 == 0 and 2 <= len(indices) <= 768
    assert indices == sorted(indices) and indices[0] == 0 and indices[-1] == total - 1


def test_the_shown_frames_of_a_file_are_read_and_of_a_short_one_all(tmp_path):
    write_video(path := tmp_path / "a.mp4", moving_square(10), 5)
    choose = partial(frame_indices, fps=2.0)
    assert torch.equal(read_chosen(path, choose), read_video(path)[[0, 3, 6, 9]])
    assert torch.equal(read_chosen(path, partial(choose, num_frames=12)), read_video(path))
    with pytest.raises(ValueError, match="num_frames is 0, but must be even and at least 2"):
        read_chosen(path, partial(choose, num_frames=0))


def test_patches_of_a_still_are_those_of_the_librarys_image_processor():
    frame = torch.randint(0, 256, (336, 448, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    cut, grid = patches(frame.expand(4, -1, -1, -1), 336 * 448)
    expected = Qwen2VLImageProcessorPil(do_resize=False)([np.asarray(frame)], return_tensors="pt")
    assert grid == (2, 24, 32)
    torch.testing.assert_close(cut, expected.pixel_values.repeat(2, 1), atol=1e-5, rtol=0)


def test_large_frames_are_shrunk_as_pillow_shrinks_them():
    noise = torch.randint(40, 216, (1, 3, 88, 156), generator=torch.Generator().manual_seed(0)).float()
    frame = interpolate(noise, (704, 1248), mode="bilinear")[0].permute(1, 2, 0).byte()
    cut, grid = patches(frame.expand(2, -1, -1, -1), 200704)
    size = (grid[2] * 14, grid[1] * 14)
    small = torch.from_numpy(np.array(Image.fromarray(frame.numpy()).resize(size, Image.Resampling.BICUBIC)))
    expected, _ = patches(small.expand(2, -1, -1, -1), 200704)
    assert (cut - expected).abs().max() * 0.26862954 * 255 < 1.5  # grey levels


def test_a_patch_holds_two_frames_one_after_the_other():
    frames = torch.zeros(4, 336, 448, 3, dtype=torch.uint8)
    frames[1], frames[2] = 255, 128
    cut, grid = patches(frames, 336 * 448)
    pairs = cut.view(grid[0], -1, 3, 2, 196)[:, :, 0].mean((1, 3))
    black, grey, white = ((value / 255 - 0.48145466) / 0.26862954 for value in (0, 128, 255))
    torch.testing.assert_close(pairs, torch.tensor([[black, white], [grey, black]]), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("size", "max_pixels", "grid"),
    [
        ((352, 624), 200704, (1, 24, 42)),  # 352x624 is too large
        ((64, 64), 200704, (1, 24, 24)),  # too small: enlarged to 336x336, at least 100352 pixels
    ],
)
def test_frames_are_resized_into_the_bounds(size, max_pixels, grid):
    assert patches(torch.zeros(2, *size, 3, dtype=torch.uint8), max_pixels)[1] == grid


def test_many_large_frames_are_resized_without_a_copy_of_all_as_float():
    frames = torch.zeros(96, 720, 1280, 3, dtype=torch.uint8)  # 253 MiB, as float 1 GiB
    with bounded_memory(800 * 2**20):
        pixels, grid = patches(frames, MIN_PIXELS)
    assert len(pixels) == math.prod(grid) and grid[0] == 48
