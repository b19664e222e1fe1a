"""How the demo starts: its ranks share the groups of a round evenly, and wrong input ends with one sentence."""

import subprocess

import pytest
import torch

from scripts.tiny.demo import main


@pytest.mark.parametrize(("batch_size", "num_ranks"), [(32, 4), (8, 4), (2, 2), (24, 1), (5, 1)])
def test_ranks_share_whole_groups_and_leave_no_video_out(monkeypatch, batch_size, num_ranks):
    started = []
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    monkeypatch.setattr(subprocess, "call", lambda command, env: started.extend(command) or 0)
    assert main(["--batch_size", str(batch_size)]) == 0 and f"--nproc_per_node={num_ranks}" in started


def test_a_folder_that_cannot_be_made_and_a_resume_without_the_base_model_are_refused(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["--output_dir", str(tmp_path / "file")]) == 2 and "demo: " in capsys.readouterr().err
    monkeypatch.delenv("WORLD_SIZE")
    assert main(["--resume_from_checkpoint", "latest", "--output_dir", "outputs/demo"]) == 2
    assert "leave --resume_from_checkpoint out" in capsys.readouterr().err
