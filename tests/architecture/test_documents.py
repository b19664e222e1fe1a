"""What the documents point to exists: code, configs, tests, links, and the files of the README's commands."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyvideo.config.loading import load_config
from hyvideo.training.checks import check_config, unread_settings

ROOT = Path(__file__).parents[2]
PROGRAM_FOLDERS = ("assets/", "benchmarks/", "configs/", "docs/", "hyvideo/", "scripts/", "tests/")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "assets").rglob("*.md")])


def references(markdown: str) -> set[str]:
    """Backticked paths in the project's folders, some with `::name` after them."""
    folders = "|".join(PROGRAM_FOLDERS)
    return set(re.findall(rf"`((?:{folders})[\w/.-]+(?:::[\w.]+)?)`", markdown))


def defined_names(tree: ast.AST, prefix: str = "") -> Iterator[str]:
    """Names a module defines: functions, classes, `Class.member`, and assigned names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from defined_names(node, f"{prefix}{node.name}.")
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


def resolves(reference: str, root: Path) -> bool:
    """Whether `path` or `path::name` is in the tree."""
    path, _, name = reference.partition("::")
    if not (root / path).exists():
        return False
    if not name:
        return True
    return name in set(defined_names(ast.parse((root / path).read_text(encoding="utf-8"))))


def commands(markdown: str) -> list[str]:
    """Lines of the fenced blocks that hold shell commands, continued lines joined, comments cut off."""
    blocks = re.findall(r"^```(?:bash|sh|shell|console)\n(.*?)^```", markdown, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line.split(" #")[0].strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def missing_of_command(command: str, root: Path) -> list[str]:
    """Programs, modules, make targets and project files a command names that are not there."""
    words = command.replace("'", " ").replace('"', " ").split()
    missing = []
    for before, word in zip(["", *words], words, strict=False):
        name = word.removeprefix("./")
        is_program = (
            before in ("python", "python3", "bash", "sh", "source", ".") or word.startswith("./") and not before
        )
        if before == "-m":
            module = root / name.replace(".", "/")
            known = module.with_suffix(".py").exists() or module.is_dir() or not name.startswith(("scripts", "hyvideo"))
        elif before == "make" and re.fullmatch(r"[a-z-]+", word):
            known = re.search(rf"^{word}:", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE) is not None
        elif re.search(r"[$<>*{}=]", word) or word.startswith(("-", ".venv/")):
            known = True  # filled in by the reader, an option, or made by `make setup`
        elif is_program or name.startswith(PROGRAM_FOLDERS):
            known = (root / name).exists()
        else:
            known = True
        if not known:
            missing.append(word)
    return missing


def missing_links(markdown: str, folder: Path) -> list[str]:
    """Relative links and images whose target is not there."""
    targets = re.findall(r"\]\(([^)\s]+)\)", markdown)
    local = [target.partition("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]
    return [target for target in local if not (folder / target).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_code_configs_and_tests_that_a_document_names_are_there(document: Path):
    found = references(document.read_text(encoding="utf-8"))
    assert sorted(reference for reference in found if not resolves(reference, ROOT)) == []


def test_every_command_of_the_readme_names_files_that_exist():
    found = commands((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(found) >= 3
    assert [f"{command}: {missing}" for command in found if (missing := missing_of_command(command, ROOT))] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_relative_link_leads_somewhere(document):
    assert missing_links(document.read_text(encoding="utf-8"), document.parent) == []


LAUNCHERS = {
    "torchrun --nproc_per_node 8 post_train.py": ("configs/sage_8gpu.yaml", 8),
    "python post_train.py": ("configs/sage_8gpu.yaml", 1),
    "run_post_train.sh": ("configs/sage_8gpu.yaml", 8),
    "run_post_train_multinode.sh": ("configs/sage_64gpu.yaml", 64),
    "slurm_train.sbatch": ("configs/sage_64gpu.yaml", 64),
}
"""Program -> configuration and ranks."""


def documented_trainings() -> list[tuple[str, str]]:
    """Program and flags of every command that trains on prompts of one's own, in documents and launchers."""
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("assets/*/*.md"), *ROOT.glob("*.sh")]
    texts = [path.read_text(encoding="utf-8") for path in (*paths, ROOT / "scripts/post_train/slurm_train.sbatch")]
    pattern = rf"({'|'.join(map(re.escape, LAUNCHERS))})((?: [^`|\n]*)? --train_video_csv[^`|\n]*)"
    return [found for text in texts for found in re.findall(pattern, re.sub(r"\\\n\s*", "", text))]


@pytest.mark.parametrize(("program", "flags"), documented_trainings())
def test_every_documented_training_has_settings_that_go_together(monkeypatch, program: str, flags: str):
    config, num_ranks = LAUNCHERS[program]
    prompts = {f"{name}.csv": str(ROOT / f"assets/prompts/{name}.csv") for name in ("train", "valid")}
    argv = [prompts.get(word, word) for word in shlex.split(flags)]
    monkeypatch.chdir(ROOT)
    loaded = load_config([*([] if "--config" in argv else ["--config", config]), *argv])
    check_config(loaded, num_ranks)
    assert list(unread_settings(loaded)) == []


def test_the_loop_that_the_architecture_page_quotes_is_the_code():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    (quoted,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    lines = [line.strip() for line in quoted.splitlines()]
    code = [line.strip() for line in (ROOT / "hyvideo/training/run.py").read_text(encoding="utf-8").splitlines()]
    start = code.index(lines[0])
    assert code[start : start + len(lines)] == lines
