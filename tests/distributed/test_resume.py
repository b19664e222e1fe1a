"""Checkpoints of several ranks: bit for bit for as many, within rounding for another number, whole or not there."""

import re
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hyvideo.checkpoint.tensors import verify_files
from hyvideo.checkpoint.train_state import checkpoints_of, latest_checkpoint
from hyvideo.training.stop_signal import LOST
from tests.support.command_line import Command, CommandLine
from tests.support.equal_runs import assert_identical, tensors_of
from tests.support.ranks import free_port, rank_environment, run_on_ranks
from tests.support.training import ALGORITHMS, arguments, train_all

SMALL = {"enable_fsdp": True, "num_generations": 2, "batch_size": 1, "grpo_sampling_steps": 2, "learning_rate": 1e-4}
SMALL |= {"rollout_micro_batch_size": 1, "mini_batch_size_per_update": 1}
SMALL |= {"save_interval": 2, "max_steps": 4, "keep_last": 20}
"""Two videos per round on two ranks; policy and anchor differ from the second update on."""


def largest_error(received: Path, expected: Path) -> float:
    """Largest relative error of a weight, of the policy or its anchor, in two checkpoints."""
    mine, theirs = tensors_of(received), tensors_of(expected)
    names = [name for name in theirs if name.startswith(("policy.", "anchor.", "base.", "ema."))]
    assert names
    return max(float((mine[name] - theirs[name]).norm() / theirs[name].norm()) for name in names if theirs[name].any())


@pytest.fixture
def run_of(tmp_path: Path, root_of_four_heads: Path, prompts_csv: Path):
    """Command line of a run in the folder of a name, which is returned too."""

    def make(name: str, **settings: Any) -> tuple[Path, list[str]]:
        return tmp_path / name, arguments(root_of_four_heads, prompts_csv, tmp_path / name, **{**SMALL, **settings})

    return make


@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("nft", marks=pytest.mark.slow)])
def test_two_ranks_go_on_bit_for_bit_and_other_numbers_of_ranks_within_rounding(run_of, algorithm: str):
    run_of = partial(run_of, **ALGORITHMS[algorithm])
    whole, argv_whole = run_of("whole", async_save=True)
    parts, argv_first = run_of("parts", max_steps=2)
    argv_then = run_of("parts", resume_from_checkpoint="latest", async_save=True)[1]
    split, argv_split = run_of("split", sp_size=2, batch_size=2)
    lora = {"use_lora": True, "max_steps": 2}
    adapter, argv_lora = run_of("adapter", **lora)
    run_on_ranks(2, train_all, [argv_whole, argv_first, argv_then, argv_split, argv_lora])
    assert_identical(parts, whole)
    assert [path.name for path in checkpoints_of(whole / "checkpoints")] == ["step_2", "step_4"]
    assert (adapter / "checkpoints" / "step_2" / "lora" / "pytorch_lora_weights.safetensors").is_file()

    alone, argv_alone = run_of("alone", batch_size=2, resume_from_checkpoint=split / "checkpoints" / "step_2")
    fewer, argv_fewer = run_of("fewer", batch_size=2, resume_from_checkpoint=whole / "checkpoints" / "step_2")
    run_on_ranks(1, train_all, [argv_alone, argv_fewer])
    for pair in ((alone, split), (fewer, whole)):  # sequence parallel over two to one, and data parallel
        assert largest_error(*(run / "checkpoints" / "step_4" for run in pair)) <= 1e-5


def start_ranks(command_line: CommandLine, argv: list[str], victim: int | None = None, **fault: str) -> list[Command]:
    """Start `post_train.py argv...` on two ranks, as a launcher does; one may have a fault."""
    places = [rank_environment(rank, 2, port) | fault for port in [free_port()] for rank in (0, 1)]
    scripts = ["tests/support/faulty_post_train.py" if rank == victim else "post_train.py" for rank in (0, 1)]
    return [command_line.start(script, argv, place) for script, place in zip(scripts, places, strict=True)]


KILLED_SAVES = [
    ("it is killed while it writes tensors", 1, False),
    ("it is killed while it writes tensors", 0, True),
    ("it is killed while it reads files back", 1, True),
    ("it is killed before the checkpoint is in its place", 0, False),
    ("it is killed before latest moves", 0, True),
]
"""Fault, the rank it happens to, whether the checkpoint is saved beside the training."""


@pytest.mark.parametrize(
    "saves",
    [pytest.param(KILLED_SAVES[1:2], id="one"), pytest.param(KILLED_SAVES, id="every moment", marks=pytest.mark.slow)],
)
def test_a_rank_killed_in_a_save_leaves_the_checkpoint_before_and_the_same_end(run_of, command_line, saves):
    settings = {"save_interval": 1, "max_steps": len(saves) + 1}
    whole, argv_whole = run_of("never_killed", **settings)
    run_on_ranks(2, train_all, [argv_whole])

    killed = None
    for number, (fault, victim, async_save) in enumerate(saves):
        killed, argv = run_of("killed_in_save", async_save=async_save, resume_from_checkpoint="latest", **settings)
        files = 0 if number == 0 else 1  # the first save of the run is killed, then the second one of a start
        ranks = start_ranks(command_line, argv, victim, FAULT=fault, FAULT_AFTER=str(files))
        assert ranks[victim].wait().returncode == -signal.SIGKILL, ranks[victim].read("stderr")
        assert ranks[1 - victim].wait().returncode == LOST
        found = checkpoints_of(killed / "checkpoints")
        latest = latest_checkpoint(killed / "checkpoints")
        assert latest is None if number == 0 else latest in found, fault
        for checkpoint in found:
            verify_files(checkpoint)
    finished = [rank.wait() for rank in start_ranks(command_line, argv)]
    assert [rank.returncode for rank in finished] == [0, 0], finished
    assert_identical(killed, whole)


def test_a_rank_that_stands_still_ends_the_other_in_time_and_keeps_the_folder(run_of, command_line: CommandLine):
    settings = {"save_interval": 1, "max_steps": 1000, "collective_timeout": 10, "resume_from_checkpoint": "latest"}
    run, argv = run_of("frozen", **settings)
    ranks = start_ranks(command_line, argv)
    latest = run / "checkpoints" / "latest"
    ranks[0].signal_when(signal.SIGSTOP, latest.exists)  # the one that writes metrics.jsonl and latest
    began = time.monotonic()
    ended = ranks[1].wait()
    assert ended.returncode == LOST and time.monotonic() - began < 30
    assert re.search(r"Rank 1 failed in phase '[^']+', update \d+\. .*continue with .*_checkpoint latest", ended.stderr)
    refused = [rank.wait() for rank in start_ranks(command_line, argv)]
    assert [rank.returncode for rank in refused] == [2, 2], refused
    assert f"another process is training in '{run}'" in refused[0].stderr
    ranks[0].signal(signal.SIGCONT)
    assert ranks[0].wait().returncode == LOST
