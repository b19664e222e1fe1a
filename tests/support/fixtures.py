"""Fixtures of all tests: the tiny random model, written once per session, and pipelines and trainers of it."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hyvideo.pipelines.hunyuan_video_grpo_pipeline import HunyuanVideoGRPOPipeline
from hyvideo.training.run import Run
from tests.support.command_line import CommandLine
from tests.support.original_layout import save_original_model
from tests.support.pipelines import load_tiny_pipeline
from tests.support.tiny_model import GLYPH_WIDTH, build_transformer, save_tiny_model
from tests.support.training import REPOSITORY, arguments, training_of, write_prompts

gc.unfreeze = lambda: None


@pytest.fixture(scope="module", autouse=True)
def old_objects_are_no_garbage() -> None:
    """Keep imports and caches out of the collections that a run makes in each round: to walk them takes half a second.

    A run freezes what there is when it begins, and would thaw these too at its end. Here nothing thaws, so that some
    2.5 MB of every run stay.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny random model in the diffusers layout. Read only: damage a copy."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def stock_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random model that a process without `tests.support.tiny_model` loads too. Read only."""
    transformer = build_transformer(text_embed_2_dim=GLYPH_WIDTH + 8)
    return save_tiny_model(tmp_path_factory.mktemp("stock") / "model", transformer)


@pytest.fixture(scope="session")
def original_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny random model in the layout of HunyuanVideo-1.5's authors. Read only: damage a copy."""
    return save_original_model(tmp_path_factory.mktemp("original") / "ckpts")


@pytest.fixture(scope="session")
def root_of_four_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random model with four attention heads, for what runs on ranks. Read only.

    No weight of its transformer starts at 0. Adam's first steps depend only on the signs of the gradients, so such a
    weight would differ between setups where rounding turns a sign.
    """
    transformer = build_transformer(num_attention_heads=4)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in transformer.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return save_tiny_model(tmp_path_factory.mktemp("tiny4") / "model", transformer)


@pytest.fixture
def pipeline(tiny_root: Path) -> HunyuanVideoGRPOPipeline:
    """A pipeline over the tiny model with trimmed attention and four steps, in float32."""
    return load_tiny_pipeline(tiny_root)


@pytest.fixture(scope="session")
def prompts_csv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CSV of four prompts."""
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.csv")


@pytest.fixture
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


@pytest.fixture
def no_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The videos that runs in this process leave are a word: to encode them takes as long as to make them."""

    def write_word(path: Path, *video_and_rate: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"video")

    monkeypatch.setattr("hyvideo.training.collect.write_video", write_word)


@pytest.fixture
def make_training(no_encoding, tiny_root: Path, prompts_csv: Path, tmp_path: Path) -> Callable[..., Run]:
    """Build trainers of the tiny model; keywords are settings, each training gets a run folder of its own."""

    def make(**settings: object) -> Run:
        folder = tmp_path / f"run{len(list(tmp_path.glob('run*')))}"
        return training_of(arguments(tiny_root, prompts_csv, folder, **settings))

    return make


@pytest.fixture
def trained(make_training: Callable[..., Run]) -> Callable[..., Run]:
    """Build trainings as `make_training` does, and train each to its end."""

    def train(**settings: object) -> Run:
        run = make_training(**settings)
        run.train()
        return run

    return train


@pytest.fixture
def command_line(tmp_path: Path) -> CommandLine:
    """Runs the entry files in an empty folder."""
    (tmp_path / "here").mkdir()
    (tmp_path / "outputs_of_commands").mkdir()
    return CommandLine(tmp_path / "here", tmp_path / "outputs_of_commands")
