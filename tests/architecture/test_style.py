"""Rules that ruff does not know: names of folders, calls that could run a stranger's code, imports that point up."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.training import REPOSITORY as ROOT

NAMELESS = {"utils", "util", "common", "commons", "helpers", "helper", "misc"}


def python_files(*, tests: bool = False) -> list[Path]:
    """The project's Python files; with `tests` those of the tests too."""
    folders = ["hyvideo", "scripts", "benchmarks", *(["tests"] if tests else [])]
    files = [*ROOT.glob("*.py"), *(path for name in folders for path in (ROOT / name).rglob("*.py"))]
    return sorted(files)


TRUSTING = {r"(\w+\.)*Auto[A-Z]\w+\.from_pretrained": "trust_remote_code=False", r"torch\.load": "weights_only=True"}
"""Calls that could run a stranger's code, and what must stand in them; ruff finds eval, exec, pickle and yaml.load."""


def test_nothing_may_run_code_of_a_file_that_is_read():
    assert not [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node.func)} without {wanted}"
        for path in python_files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        for pattern, wanted in TRUSTING.items()
        if re.fullmatch(pattern, ast.unparse(node.func)) and wanted not in map(ast.unparse, node.keywords)
    ]


def test_every_folder_and_module_is_named_for_what_is_in_it():
    files = python_files(tests=True)
    parts = {path.relative_to(ROOT).with_suffix("").parts[: depth + 1] for path in files for depth in range(9)}
    assert sorted("/".join(names) for names in parts if names[-1].lower() in NAMELESS) == []


FROM_BELOW = (
    *("config", "data schedulers grpo distributed", "models observability", "pipelines", "algorithms checkpoint"),
    *("evaluation", "training", "planning", "scripts", "benchmarks post_train generate"),
)
LAYERS = {room: layer for layer, rooms in enumerate(FROM_BELOW) for room in rooms.split()}
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


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of every import in a file, wherever in the file it stands."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def test_imports_point_only_to_lower_layers():
    """And not sideways, nor to what their room may not know; every room has a layer."""
    found = []
    for path in python_files():
        relative = path.relative_to(ROOT)
        room = room_of(".".join(relative.with_suffix("").parts)).replace("__init__", "")
        if room and room not in LAYERS:
            found.append(f"{relative}: room {room} has no layer; add it to FROM_BELOW and to docs/architecture.md")
            continue
        for line, name in imports_of(path):
            target = room_of(name)
            up = target in LAYERS and target != room and (not room or LAYERS[target] >= LAYERS[room])
            barred = any(f"{name}.".startswith(f"{module}.") for module in FORBIDDEN.get(room, ()))
            if up or barred:
                found.append(f"{relative}:{line}: {room or 'the package itself'} may not import {name}")
    assert python_files() and found == []
