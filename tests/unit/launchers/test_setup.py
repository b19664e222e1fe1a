"""What a newcomer meets first: make targets that explain themselves, exact pins, scripts that do not pretend."""

import os
import re
import shutil
import subprocess
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement

from tests.support.programs import write_program
from tests.support.training import REPOSITORY as ROOT

LINES = (line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines())
PINS = [line for line in LINES if line]


def make(folder, *arguments):
    command = ["make", "--no-print-directory", *arguments]
    environment = {"PATH": os.environ["PATH"]}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def fresh_clone(tmp_path):
    for name in ("Makefile", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@pytest.fixture
def python_that_records(tmp_path):
    """A Python whose environments contain itself; it writes down what it is asked to run."""
    script = f"""#!/usr/bin/env bash
if [[ $1 == -m && $2 == venv ]]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi
if [[ $1 != -c ]]; then echo "$@" >> {tmp_path}/calls; fi
"""
    return write_program(tmp_path / "python-that-records", script)


def calls(folder):
    return (folder / "calls").read_text().splitlines()


def test_make_alone_lists_every_target_with_what_it_does(fresh_clone):
    result = make(fresh_clone)
    listed = re.findall(r"^  ([a-z-]+) +\S+", result.stdout, flags=re.MULTILINE)
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1].split()
    assert result.returncode == 0 and sorted(listed) == sorted(targets)


def test_a_target_sets_up_first_and_only_once(fresh_clone, python_that_records):
    for _ in range(2):
        assert make(fresh_clone, "test", f"PYTHON={python_that_records}", "ARGS=-x tests/unit").returncode == 0
    assert calls(fresh_clone) == [
        "-m venv .venv",
        "-m pip install --quiet --requirement requirements.txt",
        *["-m pytest -q -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder -x tests/unit"] * 2,
    ]


def test_an_installation_that_failed_is_tried_again(fresh_clone, python_that_records):
    python_that_records.write_text(python_that_records.read_text() + "[[ $2 != pip ]]\n")
    for _ in range(2):
        assert make(fresh_clone, "test", f"PYTHON={python_that_records}").returncode != 0
    assert sum("pip install" in call for call in calls(fresh_clone)) == 2
    assert not any("pytest" in call for call in calls(fresh_clone))


def test_an_old_or_missing_python_is_refused_with_its_version_and_the_way_on(fresh_clone):
    result = make(fresh_clone, "setup", "PYTHON=no-such-python")
    assert result.returncode != 0 and "No 'no-such-python' found" in result.stderr
    script = '#!/usr/bin/env bash\n[[ $1 == -V ]] && echo "Python 3.8.10" && exit; exit 1\n'
    old = write_program(fresh_clone / "old-python", script)
    result = make(fresh_clone, "setup", f"PYTHON={old}")
    told = ("Python 3.11 or newer is needed", "Python 3.8.10", "PYTHON=/path/to/python3")
    assert result.returncode != 0 and all(words in result.stderr for words in told)


@pytest.mark.parametrize("pin", PINS)
def test_every_requirement_is_pinned_to_the_version_that_runs_here(pin):
    requirement = Requirement(pin)
    (specifier,) = requirement.specifier
    assert specifier.operator == "=="
    if requirement.marker is None or requirement.marker.evaluate():
        assert version(requirement.name).partition("+")[0] == specifier.version
