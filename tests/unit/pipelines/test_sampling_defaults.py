"""A model says how it is meant to be sampled, or its version does."""

import json
from pathlib import Path

import pytest

from hyvideo.pipelines.sampling_defaults import FILE, HUNYUAN_480P_T2V, sampling_defaults

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


def test_a_resolution_without_published_settings_is_refused(tmp_path):
    root = write_version(tmp_path, "x", ideal_resolution="1080p", ideal_task="t2v")
    with pytest.raises(ValueError, match="received '1080p' 't2v'"):
        sampling_defaults(root)


def test_a_diffusers_model_carries_them_in_scheduler_and_guider(tiny_root):
    own = {"shift": 3.0, "guidance_scale": 1.0, "fixed_size": "16x32"}
    assert sampling_defaults(tiny_root) == HUNYUAN_480P_T2V | own


def test_the_models_own_file_wins_and_one_that_is_not_those_settings_is_named(tmp_path):
    own = HUNYUAN_480P_T2V | {"guidance_scale": 1.0, "fixed_size": "64x64"}
    (tmp_path / FILE).write_text(json.dumps(own))
    assert sampling_defaults(tmp_path) == own
    for content in ('{"shift": 3.0}', "[1, 2]", "not json", ""):
        (tmp_path / FILE).write_text(content)
        with pytest.raises(ValueError, match=FILE):
            sampling_defaults(tmp_path)
