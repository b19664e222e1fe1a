"""Sizes and settings are those of the authors' pipeline, or those that the model says."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hyvideo.pipelines.resolution import bucket_size, crop_to_size
from hyvideo.pipelines.sampling_defaults import FILE, HUNYUAN_480P_T2V, sampling_defaults

SIZES = """640 16:9 480x848; 640 9:16 848x480; 640 1:1 640x640; 640 4:3 544x720; 640 21:9 416x976; 640 1000:777 560x720;
960 16:9 720x1280; 960 3:4 1104x832; 960 848:480 720x1280"""


def test_ratios_have_the_published_sizes_and_one_without_area_is_refused():
    for line in SIZES.split(";"):
        base, width, height, *size = map(int, re.findall(r"\d+", line))
        assert bucket_size(base, 16, width=width, height=height) == tuple(size)
    for width, height in ((0, 9), (16, -1)):
        with pytest.raises(ValueError, match=f"received {width}:{height}"):
            bucket_size(640, 16, width=width, height=height)


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


# version folder, ideal_resolution, ideal_task, use_meanflow -> guidance, shift, steps, size (the authors' table)
PUBLISHED = {
    ("480p_t2v", "480p", "t2v", False): (6.0, 5.0, 50, "480x848"),
    ("480p_i2v", "480p", "i2v", False): (6.0, 5.0, 50, "480x848"),
    ("720p_t2v", "720p", "t2v", False): (6.0, 9.0, 50, "720x1280"),
    ("720p_i2v", "720p", "i2v", False): (6.0, 7.0, 50, "720x1280"),
    ("480p_t2v_distilled", "480p", "t2v", False): (1.0, 5.0, 50, "480x848"),
    ("720p_i2v_distilled_sparse", "720p", "i2v", False): (1.0, 7.0, 50, "720x1280"),
    ("480p_i2v_step_distilled", "480p", "i2v", True): (1.0, 7.0, 12, "480x848"),
    ("my_export", "720p", "t2v", False): (6.0, 9.0, 50, "720x1280"),
}


def write_version(root: Path, version: str, **config: object) -> Path:
    folder = root / "transformer" / version
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return root


@pytest.mark.parametrize(("key", "expected"), PUBLISHED.items(), ids=str)
def test_published_versions_are_sampled_as_their_authors_do(tmp_path, key, expected):
    version, resolution, task, meanflow = key
    root = write_version(tmp_path, version, ideal_resolution=resolution, ideal_task=task, use_meanflow=meanflow)
    defaults = sampling_defaults(root, version)
    names = ("guidance_scale", "shift", "num_inference_steps", "fixed_size")
    assert tuple(defaults[name] for name in names) == expected
    assert defaults["video_length"] == 121
    assert sampling_defaults(root) == defaults  # the only version there


def test_a_diffusers_model_carries_them_and_a_resolution_without_published_ones_is_refused(tiny_root, tmp_path):
    own = {"shift": 3.0, "guidance_scale": 1.0, "fixed_size": "16x32"}
    assert sampling_defaults(tiny_root) == HUNYUAN_480P_T2V | own
    with pytest.raises(ValueError, match="received '1080p' 't2v'"):
        sampling_defaults(write_version(tmp_path, "x", ideal_resolution="1080p", ideal_task="t2v"))


def test_the_models_own_file_wins_and_one_that_is_not_those_settings_is_named(tmp_path):
    own = HUNYUAN_480P_T2V | {"guidance_scale": 1.0, "fixed_size": "64x64"}
    (tmp_path / FILE).write_text(json.dumps(own))
    assert sampling_defaults(tmp_path) == own
    for content in ('{"shift": 3.0}', "[1, 2]", "not json", ""):
        (tmp_path / FILE).write_text(content)
        with pytest.raises(ValueError, match=FILE):
            sampling_defaults(tmp_path)
