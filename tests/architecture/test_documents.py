"""What the documents point to exists: code, configs, tests, links, and the files of the README's commands."""

import importlib
import re
import shlex
from itertools import pairwise
from operator import attrgetter
from pathlib import Path

import pytest

from hyvideo.config.loading import load_config
from hyvideo.training.checks import check_config, unread_settings
from tests.support.training import REPOSITORY as ROOT

FOLDERS = "(?:assets|benchmarks|configs|docs|hyvideo|scripts|tests)/"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "assets").rglob("*.md")])


def commands(markdown: str) -> list[str]:
    """Lines of the fenced blocks that hold shell commands, continued lines joined, comments cut off."""
    blocks = re.findall(r"^```(?:bash|sh|shell|console)\n(.*?)^```", markdown, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line.split(" #")[0].strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def is_there(reference: str) -> bool:
    """Whether `path` is in the tree, and `path::name` in its module, which is imported."""
    path, _, name = reference.partition("::")
    if name:
        attrgetter(name)(importlib.import_module(path.removesuffix(".py").replace("/", ".")))
    return (ROOT / path).exists()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_code_configs_and_tests_that_a_document_names_are_there(document: Path):
    found = re.findall(rf"`({FOLDERS}[\w/.-]+(?:::[\w.]+)?)`", document.read_text(encoding="utf-8"))
    assert [reference for reference in found if not is_there(reference)] == []


def test_every_command_of_the_readme_names_files_that_exist():
    found = commands((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(found) >= 3
    words = [word.removeprefix("./") for command in found for word in re.split(r"[\s'\"]+", command)]
    files = [word for word in words if re.fullmatch(rf"{FOLDERS}[\w/.-]+|\w+\.(?:py|sh)", word)]
    modules = [name.replace(".", "/") for name in re.findall(r"-m ((?:scripts|hyvideo|benchmarks)[\w.]*)", str(found))]
    targets = [re.escape(word) for before, word in pairwise(words) if before == "make" and word.islower()]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [name for name in files if not (ROOT / name).exists()] == []
    assert [name for name in modules if not (ROOT / name).is_dir() and not (ROOT / f"{name}.py").is_file()] == []
    assert [name for name in targets if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []
    assert files and modules and targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_relative_link_leads_somewhere(document):
    targets = re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8"))
    local = [target.partition("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]
    assert [target for target in local if not (document.parent / target).exists()] == []


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
