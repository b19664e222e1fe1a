"""The demo: post-train the bundled tiny model on this machine and show what improved (`make demo`).

It samples held-out prompts with the base model, trains with the settings of `configs/demo.yaml` (any flag of
post_train.py may follow), samples the same prompts and seeds again, and writes a reward curve and the videos side by
side. Up to four cores work as data-parallel ranks: at this size they do twice as much as the threads of one process.
"""

import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
from torch.distributed.elastic.utils.distributed import get_free_port
from transformers.utils.logging import disable_progress_bar

from hyvideo.config.loading import load_config
from hyvideo.config.outside import complain, in_words
from hyvideo.config.schema import Config, GrpoConfig
from hyvideo.data.prompts import Prompt
from hyvideo.distributed.collectives import gather
from hyvideo.distributed.mesh import process_group
from hyvideo.evaluation.drift import write_drift
from hyvideo.training.build import open_run
from hyvideo.training.collect import Sampled, save_samples
from hyvideo.training.run import Run
from hyvideo.training.stop_signal import PREEMPTIONS
from scripts.reports.improvement import (
    HELD_OUT_VIDEOS,
    HeldOutGains,
    verdict_of,
    worst_median_best,
    write_held_out,
)
from scripts.reports.pictures import BEFORE_AFTER, plot_reward_curve, side_by_side
from scripts.reports.report import report_runs
from scripts.tiny.comparison import gains, held_out_prompts, kept, tiny_looks

NUM_HELD_OUT = 128
NUM_PROMPTS = 64
NUM_SHOWN = 8
MAX_RANKS = 4


def main(argv: list[str]) -> int:
    """Start the ranks, and wait for them; returns the exit status."""
    try:
        config = _config(argv)
        if config.run.resume_from_checkpoint:
            raise ValueError(
                "the demo compares with the base model, so it cannot go on from a checkpoint: leave "
                "--resume_from_checkpoint out, and name a new --output_dir."
            )
        if config.run.output_dir:
            Path(config.run.output_dir).mkdir(parents=True, exist_ok=True)  # before ranks start, which takes seconds
    except (ValueError, OSError) as error:
        complain(f"demo: {in_words(error)}")
        return 2
    if not config.run.output_dir:
        argv = [*argv, "--output_dir", f"outputs/demo-{time.strftime('%Y%m%d-%H%M%S')}"]
    ranks = num_ranks(config.grpo, num_cores := torch.get_num_threads())
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port()), "WORLD_SIZE": str(ranks)}
    os.environ |= {"OMP_NUM_THREADS": str(num_cores // ranks), "CUDA_VISIBLE_DEVICES": ""}
    signal.signal(signal.SIGINT, lambda *received: None)  # the ranks have it too, and this waits until they have saved
    try:
        torch.multiprocessing.spawn(_rank, (argv,), nprocs=ranks)
    except torch.multiprocessing.ProcessExitedException as error:
        if error.signal_name:  # otherwise the rank itself has said why
            complain(f"demo: {error}; perhaps this machine's memory ran out")
        return abs(error.exit_code)
    return 0


def _config(argv: list[str]) -> Config:
    return load_config(["--config", "configs/tiny.yaml", "configs/demo.yaml", *argv])


def num_ranks(grpo: GrpoConfig, num_cores: int) -> int:
    """Return how many ranks, on a core or more each, share a round's groups evenly."""
    found = 1
    for number in (2, MAX_RANKS):
        share, left_over = divmod(grpo.batch_size, number)
        whole = not left_over and (share % grpo.num_generations == 0 or grpo.num_generations % share == 0)
        found = number if number <= num_cores and whole else found
    return found


def _rank(rank: int, argv: list[str]) -> None:
    """Be one of the ranks, without any GPU; wrong input ends it with status 2, Ctrl-C with 130."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.orig_argv = [sys.executable, "-m", "scripts.tiny.demo", *argv]  # what the run says that it was started by
    disable_progress_bar()
    config = _config(argv)
    config.grpo.batch_size //= int(os.environ["WORLD_SIZE"])  # the ranks share the videos of a round
    with process_group(config.parallel.collective_timeout):
        try:
            training = open_run(config, report)
        except (ValueError, OSError) as error:
            complain(f"demo: {in_words(error)}", once=True)  # all ranks have the same to say
            sys.exit(2)
        try:
            _train_and_compare(training)
        except KeyboardInterrupt:  # the first one while it samples, or the second while it trains
            complain("demo: stopped at once; what was saved before is still there", once=True)
            sys.exit(130)


def _train_and_compare(training: Run) -> None:
    """Train, and sample before and after; the main rank writes the results."""
    started = time.monotonic()
    prompts = held_out_prompts(training.config, NUM_HELD_OUT, slice(NUM_PROMPTS))
    training.journal.console.info(f"sampling {NUM_HELD_OUT} videos of held-out prompts with the base model ...")
    before = training.validation.sample(prompts)
    if training.train() in (signal.SIGINT.name, *PREEMPTIONS):
        flags = [*sys.orig_argv[3:], "--resume_from_checkpoint", "latest"]
        training.journal.console.info(
            "The demo ends without its comparison. To train on: python post_train.py --config configs/tiny.yaml "
            f"configs/demo.yaml {shlex.join(flags)}"
        )
        training.journal.console.close()
        return
    training.journal.console.info("sampling the same prompts and seeds with the trained model ...")
    after = training.validation.sample(prompts)
    own = [tiny_looks(sampled.videos, [prompts[number] for number in sampled.numbers]) for sampled in (before, after)]
    looks = [
        list(chain.from_iterable(gather(of_side)[:: training.mesh.layout.sp_size])) for of_side in own
    ]  # the ranks' prompts follow each other
    found = kept(*looks, prompts)
    shown = {*worst_median_best(before.scores.total, after.scores.total).values(), *found.drift.most_changed}
    for name, sampled, of_side in zip(HELD_OUT_VIDEOS, (before, after), own, strict=True):
        save_samples(
            training.folder.path / name,
            sampled.videos,
            [prompts[number].text for number in sampled.numbers],
            sampled.scores,
            fps=training.config.rollout.video_fps,
            numbers=sampled.numbers,
            mesh=training.mesh,
            how=training.validation.how(),
            notes=[{"looks": looks} for looks in of_side],
            shown=shown,
        )
    if training.mesh.is_main:
        write_drift(training.folder.path, training.state.step, found.drift)
        _write(training, before, after, prompts)
        training.journal.console.info(str(found))
        training.journal.console.info(f"{(time.monotonic() - started) / 60:.1f} minutes")
    training.journal.console.close()


def report(folder: Path) -> None:
    """Write `report.html` into a run folder."""
    report_runs([folder], folder / "report.html")


def _write(training: Run, before: Sampled, after: Sampled, prompts: Sequence[Prompt]) -> None:
    """Write gains, curve and the first videos, whatever their result, to the run folder, and say what improved."""
    folder = training.folder.path
    measured = HeldOutGains(training.state.step, gains(before.scores, after.scores))
    write_held_out(folder, measured)
    plot_reward_curve(folder / "metrics.jsonl", folder / "reward_curve.png", held_out=measured.comparison.gains)
    totals = zip(prompts, before.scores.total, after.scores.total, strict=True)
    captions = [f"{prompt.text} ({old:+.1f} to {new:+.1f})" for prompt, old, new in totals][:NUM_SHOWN]
    side_by_side(before.videos[:NUM_SHOWN], after.videos[:NUM_SHOWN], captions, folder / BEFORE_AFTER)
    report(folder)
    verdict = verdict_of(measured.comparison)
    training.journal.console.info(
        f"\nPaired gain on {len(prompts)} held-out prompts and seeds (ODE), mean and 95 % interval:\n"
        + "\n".join(f"  {name:7s} {gain}" for name, gain in measured.gains.items())
        + f"\n{verdict.headline}\n{verdict.detail}\n"
        f"report: {folder / 'report.html'}\nreward curve: {folder / 'reward_curve.png'}\n"
        f"before/after: {folder / BEFORE_AFTER} (and .png)"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
