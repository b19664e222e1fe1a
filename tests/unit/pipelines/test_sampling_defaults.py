"""A model says how it is meant to be sampled, or is sampled as HunyuanVideo-1.5."""

import json
from pathlib import Path

import pytest

from hyvideo.pipelines.sampling_defaults import FILE, HUNYUAN_480P_T2V, sampling_defaults


def test_a_model_without_a_file_is_sampled_as_hunyuan_480p(tmp_path: Path):
    assert sampling_defaults(tmp_path) == HUNYUAN_480P_T2V


def test_the_models_own_file_wins(tmp_path: Path):
    own = HUNYUAN_480P_T2V | {"guidance_scale": 1.0, "fixed_size": "64x64"}
    (tmp_path / FILE).write_text(json.dumps(own))
    assert sampling_defaults(tmp_path) == own


@pytest.mark.parametrize("content", ['{"shift": 3.0}', "[1, 2]", "not json", ""])
def test_a_file_that_is_not_those_settings_is_named(tmp_path: Path, content: str):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(ValueError, match=FILE):
        sampling_defaults(tmp_path)
