"""The version of the code names every edit, and the commit where git knows one."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hyvideo.training.state import code_version

HASH = "[0-9a-f]{16}"


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=Ann", "-c", "user.email=ann@localhost")
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_and_every_edit_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    git(tmp_path, "init")  # around the project: not its own
    package = tmp_path / "project" / "hyvideo"
    package.mkdir(parents=True)
    (package / "loss.py").write_text("weight = 1\n")
    alone = code_version(package)
    assert re.fullmatch(HASH, alone)
    git(package.parent, "init")
    git(package.parent, "add", ".")
    assert code_version(package) == alone  # no commit yet
    git(package.parent, "commit", "-m", "first")
    assert re.fullmatch(rf"{alone} \(commit [0-9a-f]+\)", code_version(package))
    (package / "loss.py").write_text("weight = 2\n")
    edited = code_version(package)
    assert re.fullmatch(rf"{HASH} \(commit [0-9a-f]+-dirty\)", edited) and alone not in edited
    (package / "loss.py").write_text("weight = 3\n")
    assert code_version(package) != edited
    monkeypatch.setenv("PATH", "")
    assert re.fullmatch(HASH, code_version(package))
