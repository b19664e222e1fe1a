"""Fixtures of all tests: the tiny random model, written once per session, and pipelines and trainers of it."""

import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # equalities to the last bit are promised on the CPU
if "PYTEST_XDIST_WORKER" in os.environ:  # a core each for the workers of `make test`, and for what they start
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # PyTorch has looked at the variable already
else:
    rehearsals = tempfile.TemporaryDirectory()  # shared by all workers, and by what they start
    os.environ["SAGE_GRPO_CACHE"] = rehearsals.name
settings.register_profile("long", max_examples=10_000)
if "HYPOTHESIS_PROFILE" in os.environ:
    settings.load_profile(os.environ["HYPOTHESIS_PROFILE"])

from hyvideo.pipelines.hunyuan_video_grpo_pipeline import HunyuanVideoGRPOPipeline  # noqa: E402
from hyvideo.training.run import Run  # noqa: E402
from tests.support.command_line import CommandLine  # noqa: E402
from tests.support.original_layout import save_original_model  # noqa: E402
from tests.support.pipelines import load_tiny_pipeline  # noqa: E402
from tests.support.tiny_model import GLYPH_WIDTH, build_transformer, save_tiny_model  # noqa: E402
from tests.support.training import REPOSITORY, arguments, training_of, write_prompts  # noqa: E402

freeze, gc.freeze, gc.unfreeze = gc.freeze, lambda: None, lambda: None


@pytest.fixture(scope="module", autouse=True)
def old_objects_are_no_garbage() -> None:
    """Keep imports and caches out of the collections that a run makes in each round: to walk them takes half a second.

    A run freezes and thaws by itself, and would thaw these too. Here its calls do nothing.
    """
    gc.collect()
    freeze()


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
def make_training(no_encoding, tiny_root: Path, prompts_csv: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Build trainers of the tiny model; keywords are settings, each training gets a run folder of its own."""
    made = []

    def make(**settings: object) -> Run:
        folder = tmp_path / f"run{len(list(tmp_path.glob('run*')))}"
        made.append(training_of(arguments(tiny_root, prompts_csv, folder, **settings)))
        return made[-1]

    yield make
    for run in made:  # each has threads, and stacks are printed of 100 threads only
        if run.journal.metrics:
            run.journal.metrics.close()


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
