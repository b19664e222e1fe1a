"""Post-train HunyuanVideo-1.5 by GRPO.

Example: `python post_train.py --config configs/tiny.yaml`; `--help` lists every setting. Over several ranks:
`torchrun --nproc_per_node 8 post_train.py --config configs/sage_8gpu.yaml`.
"""

import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from hyvideo.config.loading import load_config
from hyvideo.config.outside import complain, in_words, loading, printable
from hyvideo.config.schema import Config
from hyvideo.training.stop_signal import PREEMPTED, PREEMPTIONS, listened_preemptions

STATUS_FILE = "POST_TRAIN_STATUS_FILE"
"""Environment variable: file for the exit status of a node's ranks, which torchrun does not pass on."""


def main() -> int:
    """Train from the command line.

    Returns:
        The exit status: 0 finished, or stopped by Ctrl-C or the reward guard and saved; 1 the run failed; 2 wrong
        input; 75 preempted and saved, to be started again.
    """
    with ExitStack() as process:
        for number in listened_preemptions():
            process.callback(signal.signal, number, signal.signal(number, _leave))
        try:
            config = load_config(sys.argv[1:])
        except (ValueError, OSError) as error:  # answered at once: what is imported below takes seconds
            complain(f"post_train.py: {in_words(error)}")
            return 2
        status = _work(config, process)
    if status in (0, PREEMPTED) and not config.run.dry_run:
        _tell_launcher(status)
    return status


def _work(config: Config, process: ExitStack) -> int:
    """Rehearse or train what is configured; returns the exit status."""
    with loading("post_train.py"):
        import torch.distributed as dist
        from transformers.utils.logging import disable_progress_bar

        from hyvideo.distributed.mesh import process_group
        from hyvideo.planning.preflight import preflight
        from hyvideo.training.build import open_run
        from hyvideo.training.failure import exit_status

    disable_progress_bar()
    run = None
    try:
        process.enter_context(
            process_group(config.parallel.collective_timeout, of_one="weights" in config.parallel.offload)
        )
        if config.run.dry_run:
            checked = preflight(config)
            if not dist.is_initialized() or dist.get_rank() == 0:
                print(printable(checked))
            return 0
        run = open_run(config, report)
        return PREEMPTED if run.train() in PREEMPTIONS else 0
    except Exception as error:
        return exit_status(error, run)
    finally:
        if run:
            run.journal.console.close()


def report(folder: Path) -> None:
    """Write `report.html` into a run folder."""
    from scripts.reports.report import report_runs  # only now, for it takes seconds

    report_runs([folder], folder / "report.html")


def _leave(number: int, frame: FrameType | None) -> None:
    """End a process that is preempted outside training, where there is nothing to save."""
    complain(f"post_train.py: {signal.Signals(number).name}: nothing to save")
    _tell_launcher(PREEMPTED)
    os._exit(PREEMPTED)


def _tell_launcher(status: int) -> None:
    """Leave the exit status for a launcher that was asked to stop."""
    if STATUS_FILE in os.environ and os.environ.get("LOCAL_RANK", "0") == "0":
        Path(os.environ[STATUS_FILE]).write_text(str(status))


if __name__ == "__main__":
    sys.exit(main())
