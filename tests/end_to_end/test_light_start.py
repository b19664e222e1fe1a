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
name, *refused = sys.argv[1:]
program = importlib.import_module(name)
for arguments, wanted in ((["--help"], 0), (refused, 2)):
    sys.argv[1:] = arguments
    try:
        status = program.main(*[arguments] if program.main.__code__.co_argcount else [])
    except SystemExit as left:
        status = left.code
    assert status == wanted, (arguments, status)
assert not {"torch", "diffusers", "transformers"} & set(sys.modules)
"""


@pytest.mark.parametrize("program", REFUSED)
def test_help_and_a_wrong_flag_are_answered_before_pytorch_is_imported(program: str):
    command = [sys.executable, "-c", CODE, program, *REFUSED[program].split()]
    finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert finished.returncode == 0 and finished.stdout and finished.stderr, finished.stderr


def test_what_restarts_a_run_waits_for_no_pytorch():
    code = "import sys, scripts.post_train.restarts; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
