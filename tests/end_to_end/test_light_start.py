"""The programs answer --help and a wrong command line at once: PyTorch, which takes seconds, is imported afterwards."""

import subprocess
import sys

import pytest

from tests.support.training import REPOSITORY

REFUSED = {
    "post_train": "--etta=1",
    "generate": "--model_path nowhere --prompt cat --output_path cat.mp4",
    "scripts.plan": "--world_size 8 --gpu H1000",
    "scripts.forecast.__main__": "--config configs/tiny.yaml --etta=1",
    "scripts.rehearse": "--world_size 8 --etta=1",
    "scripts.evaluate": "--prompts_csv prompts.csv --output_dir out --videos base nowhere",
    "scripts.export": "--model_path nowhere --output_path out --format other",
    "scripts.serve_reward": "--reward moving_shapes --host 0.0.0.0",
    "scripts.report": "=run",
}
"""Program -> a command line that it refuses."""

CODE = """
import importlib, sys
program = importlib.import_module(sys.argv[1])
arguments = sys.argv[2:]
sys.argv[1:] = arguments
try:
    status = program.main(*[arguments] if program.main.__code__.co_argcount else [])
except SystemExit as left:
    status = left.code
sys.exit(99 if {"torch", "diffusers", "transformers"} & set(sys.modules) else status)
"""


@pytest.mark.parametrize(("flags", "status"), [("--help", 0), ("refused", 2)])
@pytest.mark.parametrize("program", REFUSED)
def test_help_and_a_wrong_flag_are_answered_before_pytorch_is_imported(program: str, flags: str, status: int):
    argv = [flags] if flags == "--help" else REFUSED[program].split()
    command = [sys.executable, "-c", CODE, program, *argv]
    finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert finished.returncode == status, finished.stderr
    assert finished.stdout if status == 0 else finished.stderr
