"""Imports point only to lower layers, and rooms of one layer do not know each other."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = {
    "config": 0,
    "data": 1,
    "schedulers": 1,
    "grpo": 1,
    "distributed": 1,
    "models": 2,
    "observability": 2,
    "pipelines": 3,
    "algorithms": 4,
    "checkpoint": 4,
    "evaluation": 5,
    "training": 6,
    "planning": 7,
    "scripts": 8,
    "benchmarks": 9,
    "post_train": 9,
    "generate": 9,
}
FORBIDDEN = {
    # The paper's mathematics is importable and testable alone.
    "schedulers": ("hyvideo.config", "torch.distributed"),
    "grpo": ("hyvideo.config", "torch.distributed"),
    # The pipeline is blind to parallelism, and sampling needs no training.
    "pipelines": ("hyvideo.distributed", "torch.distributed"),
    "generate": ("hyvideo.training", "hyvideo.planning", "scripts"),
}


def room_of(module: str) -> str:
    """The room of a dotted module name; '' for the package itself and for everything that is not the project's."""
    package, _, rest = module.partition(".")
    if package == "hyvideo":
        return rest.partition(".")[0]
    return package if package in LAYERS else ""


def imports_of(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of every import in a file, wherever in the file it stands."""
    package = path.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def project_files(root: Path) -> list[Path]:
    """Every Python file that belongs to a layer."""
    folders = [path for name in ("hyvideo", "scripts", "benchmarks") for path in (root / name).rglob("*.py")]
    return sorted([*folders, *(path for name in ("post_train", "generate") if (path := root / f"{name}.py").exists())])


def violations(root: Path) -> list[str]:
    """Imports that point up, sideways or to what their room may not know; and rooms that have no layer."""
    found = []
    for path in project_files(root):
        relative = path.relative_to(root)
        room = room_of(".".join(relative.with_suffix("").parts))
        if room in ("", "__init__"):
            room = ""
        elif room not in LAYERS:
            found.append(f"{relative}: room {room} has no layer; add it to LAYERS and to docs/architecture.md")
            continue
        for line, name in imports_of(path, root):
            target = room_of(name)
            up = target in LAYERS and target != room and (not room or LAYERS[target] >= LAYERS[room])
            barred = any(f"{name}.".startswith(f"{module}.") for module in FORBIDDEN.get(room, ()))
            if up or barred:
                found.append(f"{relative}:{line}: {room or 'the package itself'} may not import {name}")
    return found


def test_imports_point_only_to_lower_layers():
    assert project_files(ROOT)
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("hyvideo/config/a.py", "import hyvideo.data.prompts"),
        ("hyvideo/config/a.py", "from hyvideo import data"),
        ("hyvideo/data/a.py", "from hyvideo.grpo.advantages import group_advantages"),
        ("hyvideo/data/a.py", "from ..grpo import advantages"),
        ("hyvideo/data/a.py", "from .. import training"),
        ("hyvideo/data/deep/a.py", "from ...models.loading import load_vae"),
        ("hyvideo/data/__init__.py", "from ..models import loading"),
        ("hyvideo/models/a.py", "def late():\n    from hyvideo.pipelines import noise"),
        ("hyvideo/training/a.py", "import post_train"),
        ("hyvideo/training/a.py", "from scripts.tiny import clips"),
        ("hyvideo/grpo/a.py", "from hyvideo.config.schema import Config"),
        ("hyvideo/schedulers/a.py", "import torch.distributed as dist"),
        ("hyvideo/pipelines/a.py", "from torch import distributed"),
        ("hyvideo/__init__.py", "from hyvideo.config import schema"),
        ("hyvideo/tools/a.py", "import torch"),
        ("hyvideo/training/a.py", "from scripts.reports.report import report_runs"),
        ("generate.py", "from scripts import reports"),
        ("generate.py", "from hyvideo.training.run import Run"),
        ("scripts/a.py", "import benchmarks.attention"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path, file, statement):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(statement)
    assert len(violations(tmp_path)) == 1


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("hyvideo/data/a.py", "from . import prompts\nfrom .prompts import Prompt\nfrom hyvideo.data import samplers"),
        (
            "hyvideo/training/a.py",
            "from hyvideo.config.schema import Config\nfrom ..grpo import advantages\nimport torch.distributed",
        ),
        ("post_train.py", "from hyvideo.training.run import Run"),
        ("scripts/tiny/a.py", "from scripts.tiny.clips import render\nfrom . import clips"),
    ],
)
def test_an_allowed_import_passes(tmp_path, file, statement):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(statement)
    assert violations(tmp_path) == []
