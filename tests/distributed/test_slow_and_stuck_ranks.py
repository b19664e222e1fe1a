"""A rank that is slow is named though all wait for each other, and so is one that does not come to a collective."""

import html
import os
import platform
import re
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyvideo.algorithms.algorithm import Trajectory
from hyvideo.config.loading import load_config
from hyvideo.distributed import HANGS
from hyvideo.distributed.hangs import summary_of
from hyvideo.observability.metrics import read_metrics
from hyvideo.observability.phase_timer import PhaseTimer, StragglerWatch, Watchdog
from hyvideo.training.build import open_run
from post_train import report
from scripts.reports.report import report_runs
from tests.support.ranks import run_on_ranks
from tests.support.training import arguments, training_of


@pytest.fixture
def argv(root_of_four_heads: Path, prompts_csv: Path, tmp_path: Path) -> Callable[..., list[str]]:
    sizes = {"enable_fsdp": True, "batch_size": 2, "grpo_sampling_steps": 2}
    return partial(arguments, root_of_four_heads, prompts_csv, tmp_path / "run", **sizes)


def train_beside(argv: list[str], slow: str, seconds: float) -> None:
    """Train; rank 1 sleeps in every block of the transformer, or before it scores, or all do for each video."""
    run = training_of(argv)
    blocks = run.policy.transformer.transformer_blocks
    slowed = [(block, "forward") for block in blocks] if slow == "blocks" else [(type(run.reward), "__call__")]
    times = len if slow == "videos" else lambda last: 1
    for owner, name in slowed if run.mesh.rank == 1 or slow == "videos" else ():
        work = getattr(owner, name)
        setattr(owner, name, lambda *a, work=work, **b: (time.sleep(seconds * times(a[-1])), work(*a, **b))[1])
    run.train()


@pytest.mark.parametrize(
    ("slow", "seconds", "phases"),
    [pytest.param("blocks", 0.1, "rollout|anchor|update", marks=pytest.mark.slow), ("reward", 0.5, "reward")],
)
def test_a_rank_that_computes_for_longer_is_named_and_not_those_that_wait_for_it(tmp_path, argv, slow, seconds, phases):
    run_on_ranks(2, train_beside, argv(max_steps=6), slow, seconds)
    _, *rows = read_metrics(tmp_path / "run" / "metrics.jsonl")  # the first round warms up
    assert [row["perf/slowest_rank"] for row in rows] == [1] * 5
    assert all(row["perf/slowest_ratio"] > 1.2 for row in rows)
    warned = [line for line in (tmp_path / "run" / "console.log").read_text().splitlines() if "is slow" in line]
    assert len(warned) == 1 and "Rank 1 on " in warned[0] and re.search(f"in phase '({phases})'", warned[0])
    page = report_runs([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert "the slowest one of the last round is rank 1 on " in page
    assert warned[0].partition("WARNING: ")[2][:40] in page


def test_a_rank_that_has_more_videos_to_score_is_not_called_slow(tmp_path, argv):
    sizes = {"sp_size": 2, "batch_size": 3, "num_generations": 3, "max_steps": 4}
    run_on_ranks(2, train_beside, argv(**sizes), "videos", 1.0)
    ratios = [row["perf/slowest_ratio"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert min(ratios) < 1.15, ratios
    own = [{"update": 4.0}, {"update": 4.0, "reward": 3.0}, {"update": 4.0, "reward": 3.0}]
    assert StragglerWatch().observe(["a", "b", "c"], own)[0]["perf/slowest_ratio"] == 1  # one of them scores none


def hang_in_the_second_round(argv: list[str]) -> None:
    """Train; after the second rollout rank 1 sleeps, and dies."""
    run = open_run(load_config(argv), report)
    run.journal.watchdog.seconds = 1.0
    begin_updates = run.begin_updates

    def sleep_and_die(trajectory: Trajectory) -> None:
        if run.state.step and run.mesh.rank == 1:
            time.sleep(6)
            os._exit(1)
        begin_updates(trajectory)

    run.begin_updates = sleep_and_die
    run.train()


def test_the_report_of_a_run_that_hung_and_died_names_the_collective_and_the_rank_that_did_not_come(tmp_path, argv):
    with pytest.raises(AssertionError, match="rank 1: ended without a result"):
        run_on_ranks(2, hang_in_the_second_round, argv())
    page = html.unescape((tmp_path / "run" / "report.html").read_text())
    waits = rf"{HANGS}gloo:\w+, collective \d+ of 2 ranks, waits for \d s: rank 1 on {platform.node()} "
    told = rf"{waits}\(\d s in phase 'between phases.*'\) did not come"
    assert re.search(told, page)
    assert re.search(told, (tmp_path / "run" / "console.log").read_text().splitlines()[-1])  # where restarts look


def summaries_of_a_hang(culprit: int, stops: bool) -> list[str]:
    """Return what this rank's watchdog told while another one slept, or was stopped, before a collective."""
    timer = PhaseTimer("cpu")
    group = dist.new_group([0, 1, 2])
    told: list[str] = []
    with Watchdog(timer, rank=dist.get_rank(), seconds=1.0) as watchdog:
        watchdog.tell = told.append
        dist.all_reduce(torch.ones(1), group=group)
        with timer("update"):
            if dist.get_rank() == culprit and stops:
                subprocess.Popen(["sh", "-c", f"sleep 5; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            elif dist.get_rank() == culprit:
                time.sleep(5)
            dist.all_reduce(torch.ones(1), group=group)
    return told


@pytest.mark.parametrize(("culprit", "stops"), [(2, False), (0, False), (2, True)])
def test_while_it_hangs_the_first_rank_names_the_collective_and_the_rank_that_did_not_come(culprit, stops):
    summaries, *others = run_on_ranks(3, summaries_of_a_hang, culprit, stops)
    where = "silent" if stops else r"\d s in phase 'update'"
    told = rf"gloo:all_reduce, collective 2 of 3 ranks, waits for \d s: rank {culprit} on \S+ \({where}\) did not come"
    assert summaries and re.search(told, summaries[0])
    assert others == [[], []]


def test_each_collective_that_is_waited_for_is_told_once_and_a_slow_network_is_no_missing_rank():
    def waits_in(group: str, number: int, *ranks: int) -> dict[str, Any]:
        waits = {group: ["nccl:all_to_all", number, ranks, 9.0]}
        return {"where": "1 s in phase 'update'", "last": {group: number}, "waits": waits}

    both = {0: waits_in("nccl 1", 7, 0, 1), 1: waits_in("nccl 1", 7, 0, 1)}
    hosts = [*"abcdefghijk"]
    assert summary_of(both, hosts).count("all came") == 1
    last = {"where": "here", "last": {"nccl 2": 2}, "waits": {}}
    chain = {0: waits_in("nccl 1", 7, 0, 1), 1: waits_in("nccl 2", 3, 1, 2), 2: last}
    assert re.findall(r"rank (\d on \w) \(", summary_of(chain, hosts)) == ["1 on b", "2 on c"]
    assert "no rank waits" in summary_of({0: last}, hosts)
    assert "rank 7 on h (silent), 2 more did" in summary_of({10: waits_in("nccl 1", 1, *range(11))}, hosts)
