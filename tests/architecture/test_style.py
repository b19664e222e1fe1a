"""Rules that ruff does not know: names of folders, and calls that could run a stranger's code."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
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
