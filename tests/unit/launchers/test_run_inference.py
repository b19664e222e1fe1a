"""The sampling launcher takes the release's settings, and the caller's flags win."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from generate import parse_arguments
from tests.support.programs import write_program
from tests.support.training import REPOSITORY as ROOT

STUB = """#!/usr/bin/env bash
if [[ $1 == -c ]]; then echo "${NUM_GPUS:-1}"; exit; fi
printf '%s\\n' "$@"
"""
"""Stands in for Python: answers the question for GPUs, and prints what else it is asked to run."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "my project"
    shutil.copytree(ROOT / "scripts" / "post_train", project / "scripts" / "post_train")
    shutil.copytree(ROOT / "assets" / "prompts", project / "assets" / "prompts")
    shutil.copy(ROOT / "run_inference.sh", project)
    write_program(project / "stub-python", STUB)
    return project


def launch(project: Path, *flags: str, **settings: str) -> subprocess.CompletedProcess:
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(project / "stub-python")} | settings
    command = ["bash", str(project / "run_inference.sh"), *flags]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=60)


def test_its_settings_are_the_releases_and_one_process_per_gpu_samples(project, original_root, monkeypatch):
    words = launch(project, NUM_GPUS="8", MODEL_PATH=str(original_root)).stdout.splitlines()
    assert words[:4] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=8"]
    monkeypatch.chdir(project)
    found = parse_arguments(words[5:])
    assert (found.num_inference_steps, found.seed, found.fixed_size) == (40, [930], "480x864")
    assert found.prompts_csv == ["assets/prompts/valid.csv"] and str(found.output_path).startswith("outputs/")


def test_flags_win_and_a_prompt_takes_the_place_of_the_csv(project, original_root):
    given = ["--prompt", "a cat, grey", *"--output_path cat.mp4 --num_inference_steps 3 --aspect_ratio 1:1".split()]
    words = launch(project, *given, MODEL_PATH=str(original_root)).stdout.splitlines()
    assert words[0] == "generate.py" and not any(word.startswith(("--prompts_csv", "--fixed_size")) for word in words)
    found = parse_arguments(words[1:])
    assert (found.prompt, found.num_inference_steps, str(found.output_path)) == ("a cat, grey", 3, "cat.mp4")


def test_help_is_printed_and_a_wrong_number_of_processes_refused(project):
    assert "Usage: ./run_inference.sh" in launch(project, "--help").stdout
    refused = launch(project, NPROC_PER_NODE="0")
    assert refused.returncode == 1 and "NPROC_PER_NODE must be a whole number from 1" in refused.stderr
