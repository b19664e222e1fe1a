"""What goes wrong on one rank stops all, with one message; what only one is told, all do."""

import dataclasses
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyvideo.algorithms.algorithm import Trajectory
from hyvideo.algorithms.grpo import ComparedRound
from hyvideo.algorithms.optimizer import NonFiniteUpdateError
from hyvideo.checkpoint.train_state import _group_of_writers, latest_checkpoint
from hyvideo.config.loading import load_config
from hyvideo.data import videos
from hyvideo.distributed.collectives import gather
from hyvideo.distributed.mesh import build_mesh, process_group
from hyvideo.training.build import read_inputs
from hyvideo.training.run import Run
from tests.support.equal_runs import rows_of, tensors_of
from tests.support.ranks import free_port, rank_environment, run_on_ranks
from tests.support.training import PROMPTS, arguments, training_of, write_prompts

SMALL = {"num_generations": 2, "batch_size": 1, "grpo_sampling_steps": 2, "max_steps": 2, "enable_fsdp": True}
Message = str | None
TIMEOUT = 2


def message_of(kind: type[Exception], action: Callable[[], object]) -> Message:
    try:
        action()
    except kind as error:
        return str(error)
    return None


def refusals(runs: dict[str, list[list[str]]], folders: list[Path]) -> dict[str, Message]:
    """Build every run's training, each rank with its command line in its folder; return why it was refused."""
    rank = build_mesh().rank
    os.chdir(folders[rank])
    return {name: message_of(ValueError, lambda argv=argvs[rank]: training_of(argv)) for name, argvs in runs.items()}


def test_what_differs_between_ranks_is_named_on_all(tmp_path: Path, root_of_four_heads: Path, prompts_csv: Path):
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder, prompt in zip(folders, ("a red circle", "a green cross"), strict=True):
        folder.mkdir()
        (folder / "own.csv").write_text(f"prompt\n{prompt}\n")
    copy = tmp_path / "prompts.csv"
    copy.write_bytes(prompts_csv.read_bytes())

    def run(csv: Path = prompts_csv, **settings: Any) -> list[str]:
        return arguments(root_of_four_heads, csv, tmp_path / "run", **{**SMALL, **settings})

    runs = {
        "settings": [run(), run(eta=0.4, sp_size=2, num_generations=1)],
        "world size": [run(sp_size=3), run(sp_size=3)],
        "file": [run(), run(tmp_path / "missing.csv")],
        "path": [run(prompts_csv), run(copy)],
        "content": [run(Path("own.csv")), run(Path("own.csv"))],
    }
    first, second = run_on_ranks(2, refusals, runs, folders)
    assert first == second
    assert first["settings"].startswith("rank 1: the configuration cannot run on 2 rank(s)")
    assert "world size 2 is not divisible by sp_size 3" in (said := first["world size"]) and not said.startswith("rank")
    assert "rank 1: " in first["file"] and "cannot be read" in first["file"] and "train_video_csv is" in first["path"]
    assert "the content of own.csv is" in first["content"] and "eta" not in first["content"]
    assert not (tmp_path / "run").exists()


def read_first_frames(argv: list[str]) -> tuple[Message, list[str]]:
    """Read a run's inputs; return why they were refused, and the images that this rank decoded."""
    decoded = []
    read_image = videos.read_image
    videos.read_image = lambda path: decoded.append(Path(path).name) or read_image(path)
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


def lose(training: Run, update: int) -> None:
    compare, updates = training.algorithm.compare, itertools.count(1)

    def compare_or_lose(trajectory: Trajectory) -> ComparedRound:
        compared = compare(trajectory)
        lost = torch.full_like(compared.advantages, float("nan" if next(updates) == update else 0.0))
        return dataclasses.replace(compared, advantages=compared.advantages + lost)

    training.algorithm.compare = compare_or_lose


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

    for name, update in (("not finite", 1), ("skipped", 2)):
        training = training_of(argvs[name])
        if second:
            lose(training, update)
        ended[name] = message_of(NonFiniteUpdateError, training.train)

    return ended


def test_a_signal_or_a_loss_on_one_rank_is_an_end_of_all(tmp_path, root_of_four_heads, prompts_csv):
    runs = {"stop": 100, "not finite": 1, "skipped": 3}
    own = {name: SMALL | {"max_steps": steps} for name, steps in runs.items()}
    argvs = {name: arguments(root_of_four_heads, prompts_csv, tmp_path / name, **own[name]) for name in runs}
    argvs["skipped"] += ["--max_skipped_updates", "3"]
    first, second = run_on_ranks(2, failures, argvs)
    assert first == second and first["stop"] == 1
    assert latest_checkpoint(tmp_path / "stop" / "checkpoints").name == "step_1"
    assert "Update 1" in first["not finite"] and "not finite" in first["not finite"]
    assert first["skipped"] is None
    assert [row["update/skipped"] for row in rows_of(tmp_path / "skipped")] == [0, 1, 0]
    assert "Update 2 skipped, 1 in a row" in (tmp_path / "skipped" / "console.log").read_text()
    tensors = tensors_of(latest_checkpoint(tmp_path / "skipped" / "checkpoints"))
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def seconds_until_given_up() -> dict[str, float]:
    """Sum over this rank's group of each axis, to which the last rank does not come; return how long that took."""
    sp = build_mesh(sp_size=2, collective_timeout=TIMEOUT)
    replicate = build_mesh(dp_replicate=2, collective_timeout=TIMEOUT)
    groups = {"sp": sp.sp_group, "replicate": replicate.weights["replicate"].get_group()}
    groups["writers"] = _group_of_writers(TIMEOUT)
    last, waited = sp.layout.world_size - 1, {}
    for axis, group in groups.items():
        dist.barrier()
        started = time.monotonic()
        try:
            if sp.rank != last:
                dist.all_reduce(torch.ones(1), group=group)
                assert last not in dist.get_process_group_ranks(group)
        except RuntimeError:
            waited[axis] = time.monotonic() - started
    dist.barrier()
    return waited


def test_a_rank_that_misses_a_collective_is_waited_for_as_long_as_is_configured():
    ranks = run_on_ranks(4, seconds_until_given_up)
    assert [sorted(waited) for waited in ranks] == [["writers"], ["replicate", "writers"], ["sp", "writers"], []]
    assert all(TIMEOUT / 2 < seconds < 3 * TIMEOUT for waited in ranks for seconds in waited.values())


def join(environment: dict[str, str], timeout_seconds: int) -> Message:
    os.environ |= environment

    def enter() -> None:
        with process_group(timeout_seconds):
            gather(1)

    return message_of(ValueError, enter)


def test_a_missing_rank_is_waited_for_and_named_and_so_is_a_port_in_use():
    port = free_port()
    (message,) = run_on_ranks(1, join, rank_environment(0, 2, port), 2)
    assert message.startswith(f"rank 0 of 2 could not meet the others at 127.0.0.1:{port} within 2 s")
    assert "1/2 clients joined" in message
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        (message,) = run_on_ranks(1, join, rank_environment(0, 2, port), 2)
    assert f"127.0.0.1:{port}" in message and "MASTER_PORT chooses it" in message


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
