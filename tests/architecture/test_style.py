"""Rules that keep the code readable: names of folders, documentation of every public name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMELESS = {"utils", "util", "common", "commons", "helpers", "helper", "misc"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def python_files(*, tests: bool = False) -> list[Path]:
    """The project's Python files; with `tests` those of the tests too."""
    folders = ["hyvideo", "scripts", "benchmarks", *(["tests"] if tests else [])]
    files = [*ROOT.glob("*.py"), *(path for name in folders for path in (ROOT / name).rglob("*.py"))]
    return sorted(files)


def public_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """A module's public classes, functions and methods; what is inside a function is private to it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, *FUNCTIONS)) and not child.name.startswith("_"):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from public_nodes(child)
        elif isinstance(child, (ast.If, ast.Try)):
            yield from public_nodes(child)


TRUSTING = {r"(\w+\.)*Auto[A-Z]\w+\.from_pretrained": "trust_remote_code=False", r"torch\.load": "weights_only=True"}
"""Calls that could run a stranger's code, and what must stand in them; ruff finds eval, exec, pickle and yaml.load."""


def test_every_module_and_public_name_has_a_docstring():
    found = []
    for path in python_files():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        bare = [node for node in (tree, *public_nodes(tree)) if ast.get_docstring(node) is None]
        found += [f"{path.relative_to(ROOT)}:{getattr(n, 'lineno', 1)} {getattr(n, 'name', 'module')}" for n in bare]
    assert found == []


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
