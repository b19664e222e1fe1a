"""Sizes are those of the authors' pipeline; an image is scaled to cover one and cut to it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hyvideo.pipelines.hunyuan_video_grpo_pipeline import crop_to_size
from hyvideo.pipelines.sampling_defaults import bucket_size

PUBLISHED = {
    (640, 16, 9): (480, 848),
    (640, 9, 16): (848, 480),
    (640, 1, 1): (640, 640),
    (640, 4, 3): (544, 720),
    (640, 21, 9): (416, 976),
    (640, 1000, 777): (560, 720),
    (960, 16, 9): (720, 1280),
    (960, 3, 4): (1104, 832),
    (960, 848, 480): (720, 1280),
}


def test_ratios_have_the_published_sizes():
    assert {key: bucket_size(key[0], 16, width=key[1], height=key[2]) for key in PUBLISHED} == PUBLISHED


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_every_ratio_has_a_size_of_about_the_models_number_of_pixels(width, height):
    size = bucket_size(640, 16, width=width, height=height)
    assert all(side % 16 == 0 for side in size)
    assert 0.85 * 640**2 <= size[0] * size[1] <= 640**2


def test_the_centre_is_kept_and_an_image_of_the_size_is_untouched():
    pixels = np.zeros((40, 90, 3), dtype=np.uint8)
    pixels[:, 30:60] = 255
    cropped = crop_to_size(Image.fromarray(pixels), (40, 30))
    assert np.array_equal(np.array(cropped), pixels[:, 30:60])
    whole = Image.fromarray(pixels)
    assert np.array_equal(np.array(crop_to_size(whole, (40, 90))), pixels)


@given(st.integers(1, 80), st.integers(1, 80), st.sampled_from([(16, 16), (32, 48), (48, 16)]))
def test_every_image_becomes_the_size(width, height, size):
    cropped = crop_to_size(Image.new("RGB", (width, height), (10, 20, 30)), size)
    assert (cropped.height, cropped.width) == size
    assert np.array(cropped).reshape(-1, 3).tolist() == [[10, 20, 30]] * (size[0] * size[1])
