"""Fixtures of all tests: the tiny random model, written once per session, and pipelines over it."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # equalities to the last bit are promised on the CPU

from hyvideo.pipelines.hunyuan_video_grpo_pipeline import HunyuanVideoGRPOPipeline  # noqa: E402
from tests.support.pipelines import load_tiny_pipeline  # noqa: E402
from tests.support.tiny_model import save_tiny_model  # noqa: E402


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny random model in the diffusers layout. Read only: damage a copy."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def pipeline(tiny_root: Path) -> HunyuanVideoGRPOPipeline:
    """A pipeline over the tiny model with trimmed attention and four steps, in float32."""
    return load_tiny_pipeline(tiny_root)
