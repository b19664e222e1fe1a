"""What goes wrong on one rank stops all, with one message; what only one is told, all do."""

import contextlib
import dataclasses
import os
import re
import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hyvideo.algorithms.optimizer import NonFiniteUpdateError
from hyvideo.checkpoint.train_state import SaveError, latest_checkpoint
from hyvideo.config.loading import load_config
from hyvideo.data import images
from hyvideo.distributed.collectives import gather
from hyvideo.distributed.mesh import build_mesh, process_group
from hyvideo.training.build import read_inputs
from tests.support.limits import limited
from tests.support.ranks import free_port, rank_environment, run_on_ranks
from tests.support.rewards import scoring_with
from tests.support.training import PROMPTS, arguments, training_of, write_prompts

SMALL = {"num_generations": 2, "batch_size": 1, "grpo_sampling_steps": 2, "max_steps": 2, "enable_fsdp": True}
Message = str | None


def message_of(kind: type[Exception], action: Callable[[], object]) -> Message:
    """What an action that must fail says; None when it does not."""
    try:
        action()
    except kind as error:
        return str(error)
    return None


def refusals(runs: dict[str, list[list[str]]]) -> dict[str, Message]:
    """Build the training of every run, each rank with its own command line; return why it was refused."""
    rank = build_mesh().rank
    return {name: message_of(ValueError, lambda argv=argvs[rank]: training_of(argv)) for name, argvs in runs.items()}


def test_what_differs_between_ranks_is_named_on_all(tmp_path: Path, root_of_four_heads: Path, prompts_csv: Path):
    other = tmp_path / "other.csv"
    other.write_text("prompt\nsomething else\n")
    copy = tmp_path / "prompts.csv"
    copy.write_bytes(prompts_csv.read_bytes())

    def run(csv: Path = prompts_csv, **settings: Any) -> list[str]:
        return arguments(root_of_four_heads, csv, tmp_path / "run", **{**SMALL, **settings})

    runs = {
        "settings": [run(), run(eta=0.4, sp_size=2, num_generations=1)],
        "world size": [run(sp_size=3), run(sp_size=3)],
        "file": [run(), run(tmp_path / "missing.csv")],
        "path": [run(prompts_csv), run(copy)],
    }
    first, second = run_on_ranks(2, refusals, runs)
    assert first == second
    assert first["settings"].startswith("rank 1: the configuration cannot run on 2 rank(s)")
    assert "world size 2 is not divisible by sp_size 3" in first["world size"]
    assert not first["world size"].startswith("rank")
    assert "rank 1: " in first["file"]
    assert "cannot be read" in first["file"]
    assert "train_video_csv is" in first["path"]
    assert not (tmp_path / "run").exists()


def differing_content(argv: list[str], csv: str) -> Message:
    """Build a training whose prompt file is another on rank 1's machine."""
    if build_mesh().rank == 1:
        Path(f"{csv}.other").write_text("prompt\na green cross\n")
        os.chdir(Path(csv).parent / "elsewhere")
    else:
        os.chdir(Path(csv).parent)
    return message_of(ValueError, lambda: training_of(argv))


def test_prompt_files_of_one_name_and_other_content_are_found(tmp_path: Path, root_of_four_heads: Path):
    (tmp_path / "elsewhere").mkdir()
    for folder, prompt in ((tmp_path, "a red circle"), (tmp_path / "elsewhere", "a green cross")):
        (folder / "prompts.csv").write_text(f"prompt\n{prompt}\n")
    argv = arguments(root_of_four_heads, Path("prompts.csv"), tmp_path / "run", **SMALL)
    first, second = run_on_ranks(2, differing_content, argv, str(tmp_path / "prompts.csv"))
    assert first == second
    assert "the content of prompts.csv is" in first
    assert "eta" not in first


def read_first_frames(argv: list[str]) -> tuple[Message, list[str]]:
    """Read a run's inputs; return why they were refused, and the images that this rank decoded."""
    decoded = []
    read_image = images.read_image
    images.read_image = lambda path: decoded.append(Path(path).name) or read_image(path)
    return message_of(ValueError, lambda: read_inputs(load_config(argv))), decoded


def test_ranks_share_the_decoding_of_first_frames_and_all_name_a_damaged_one(original_root: Path, tmp_path: Path):
    csv = write_prompts(tmp_path / "prompts.csv", PROMPTS[:4], images=True)
    settings = {**SMALL, "pretrained_transformer_version": "480p_i2v", "valid_video_csv": csv}
    argv = arguments(original_root, csv, tmp_path / "run", **settings)
    (first, even), (second, odd) = run_on_ranks(2, read_first_frames, argv)
    assert first is second is None
    assert ({*even}, {*odd}) == ({"prompts_0.png", "prompts_2.png"}, {"prompts_1.png", "prompts_3.png"})
    (tmp_path / "prompts_3.png").write_bytes(b"no image")
    (first, _), (second, _) = run_on_ranks(2, read_first_frames, argv)
    assert first == second and "prompts_3.png' cannot be read" in first


def fail(videos: torch.Tensor, prompts: list[str]) -> None:
    """Be a reward that breaks."""
    raise RuntimeError("the server is gone")


def failures(argvs: dict[str, list[str]]) -> dict[str, Any]:
    """Runs in which something happens on rank 1 alone; return what each ended with on this rank."""
    second = build_mesh().rank == 1
    ended: dict[str, Any] = {}

    training = training_of(argvs["stop"])
    if second:
        log = training.journal.log
        training.journal.log = lambda *args, **kw: (log(*args, **kw), signal.raise_signal(signal.SIGTERM))
    training.train()
    ended["stop"] = training.state.step

    training = training_of(argvs["not finite"])
    if second:
        compare = training.algorithm.compare
        training.algorithm.compare = lambda trajectory: dataclasses.replace(
            compared := compare(trajectory), advantages=torch.full_like(compared.advantages, float("nan"))
        )
    ended["not finite"] = message_of(NonFiniteUpdateError, training.train)

    training = training_of(argvs["reward"])
    if second:
        training.reward = scoring_with(training.reward, fail)
    ended["reward"] = message_of(RuntimeError, training.train)

    training = training_of(argvs["full disk"])
    with limited(resource.RLIMIT_FSIZE, 1 << 20) if second else contextlib.nullcontext():
        said = message_of(SaveError, training.train)
    ended["full disk"] = said and re.sub(r"[0-9.]+ GB are free", "... GB are free", said)  # each rank's own reading
    return ended


def test_a_signal_a_loss_or_a_full_disk_on_one_rank_is_an_end_of_all(tmp_path, root_of_four_heads, prompts_csv):
    def argv(name: str, **settings: Any) -> list[str]:
        return arguments(root_of_four_heads, prompts_csv, tmp_path / name, **{**SMALL, **settings})

    names = ("stop", "not finite", "reward", "full disk")
    argvs = {name: argv(name, max_steps=100 if name == "stop" else 1) for name in names}
    first, second = run_on_ranks(2, failures, argvs)
    assert first == second
    assert first["stop"] == 1
    assert latest_checkpoint(tmp_path / "stop" / "checkpoints").name == "step_1"
    assert "Update 1" in first["not finite"]
    assert "not finite" in first["not finite"]
    assert first["reward"].startswith("rank 1: the reward failed: RuntimeError: the server is gone")
    checkpoints = tmp_path / "full disk" / "checkpoints"
    assert first["full disk"].startswith(f"Cannot save '{checkpoints / 'step_1'}'")
    assert "Make space or choose another output_dir" in first["full disk"]
    assert list(checkpoints.glob("*")) == []


def join(environment: dict[str, str], timeout_seconds: int) -> Message:
    """Join a process group with the variables of a launcher."""
    os.environ |= environment

    def enter() -> None:
        with process_group(timeout_seconds):
            gather(1)

    return message_of(ValueError, enter)


def test_a_missing_rank_is_waited_for_and_named():
    port = free_port()
    (message,) = run_on_ranks(1, join, rank_environment(0, 2, port), 2)
    assert message.startswith(f"rank 0 of 2 could not meet the others at 127.0.0.1:{port} within 2 s")
    assert "1/2 clients joined" in message


def test_a_port_in_use_is_named():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        (message,) = run_on_ranks(1, join, rank_environment(0, 2, port), 2)
    assert f"127.0.0.1:{port}" in message
    assert "MASTER_PORT chooses it" in message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"RANK": "first"}, "WORLD_SIZE is 2, but RANK is not set or no whole number"),
        ({"MASTER_PORT": ""}, "WORLD_SIZE is 2, but MASTER_PORT is not set or no whole number"),
        (None, "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set or.*torchrun"),
    ],
)
def test_a_launchers_variable_that_is_missing_or_no_number_is_named(monkeypatch, change, expected):
    for name in (given := rank_environment(0, 2, 1)):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"WORLD_SIZE": "2"} if change is None else given | change).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=expected), process_group(1):
        pass
