"""How the demo starts and stops: its ranks share the groups of a round evenly, and nothing ends with a traceback."""

import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from hyvideo.config.loading import load_config
from scripts.tiny.demo import main, num_ranks

DEMO = ["--config", "configs/tiny.yaml", "configs/demo.yaml"]
SHORT = ["--validate_video_length", "5", "--sample_n_frames", "5", "--validation_num_inference_steps", "1"]


@pytest.mark.parametrize(("batch_size", "expected"), [(32, 4), (8, 4), (2, 2), (24, 1), (5, 1)])
def test_ranks_share_whole_groups_and_leave_no_video_out(batch_size, expected):
    assert num_ranks(load_config([*DEMO, "--batch_size", str(batch_size)]).grpo, num_cores=5) == expected


def test_a_resume_without_the_base_model_is_refused(capsys):
    assert main(["--resume_from_checkpoint", "latest", "--output_dir", "outputs/demo"]) == 2
    assert "leave --resume_from_checkpoint out" in capsys.readouterr().err


def started(*flags: str) -> subprocess.Popen[str]:
    """Start the demo on two cores, as a terminal's group of processes."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    command = [sys.executable, "-m", "scripts.tiny.demo", *flags]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "2"}, **options)


def test_a_folder_that_cannot_be_made_is_refused_before_any_rank_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.multiprocessing.spawn", None)
    (tmp_path / "file").touch()
    assert main(["--output_dir", str(tmp_path / "file")]) == 2
    assert f"demo: '{tmp_path / 'file'}': File exists" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_saves_ends_all_ranks_and_names_the_command_that_trains_on(tmp_path):
    flags = ["--output_dir", str(tmp_path), "--validate_at_step0", "false", "--drift_guard", "{}", *SHORT]
    demo = started(*flags)
    rows, deadline = tmp_path / "metrics.jsonl", time.monotonic() + 300
    while not (rows.is_file() and rows.read_bytes().count(b"\n")):
        assert demo.poll() is None and time.monotonic() < deadline, demo.communicate()[0]
        time.sleep(0.1)
    os.killpg(demo.pid, signal.SIGINT)
    output = demo.communicate(timeout=300)[0]  # which ends when the last rank has closed it
    assert demo.returncode == 0 and "Traceback" not in output
    command = shlex.split(output.partition("To train on: python ")[2].splitlines()[0])
    assert command[:4] == ["post_train.py", *DEMO] and "sampling the same prompts" not in output
    finished = [sys.executable, *command, "--max_steps", "4"]
    more = subprocess.run(finished, check=False, capture_output=True, text=True)
    assert more.returncode == 0 and "resumed from" in more.stderr, more.stderr
