"""Post-train HunyuanVideo-1.5 by GRPO.

Example: `python post_train.py --config configs/tiny.yaml`; `--help` lists every setting. Over several ranks:
`torchrun --nproc_per_node 8 post_train.py --config configs/sage_8gpu.yaml`.
"""

import os
import signal
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from hyvideo.config.loading import load_config
from hyvideo.config.outside import complain, in_words, printable, say_loading
from hyvideo.config.schema import Config
from hyvideo.data.files import FULL, LOCK
from hyvideo.training.stop_signal import PREEMPTED, PREEMPTIONS, listened_preemptions

if TYPE_CHECKING:
    from hyvideo.training.run import Run

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
        except (ValueError, OSError) as error:
            complain(f"post_train.py: {in_words(error)}")
            return 2
        status = _work(config, process)
    if status in (0, PREEMPTED) and not config.run.dry_run:
        _tell_launcher(status)
    return status


def _work(config: Config, process: ExitStack) -> int:
    """Rehearse or train what is configured; returns the exit status."""
    # Imported only now, for it takes seconds: --help and a wrong flag are answered at once.
    say_loading("post_train.py")
    import torch
    import torch.distributed as dist
    from transformers.utils.logging import disable_progress_bar

    from hyvideo.distributed.process_group import process_group
    from hyvideo.planning.preflight import plan_on_main, preflight
    from hyvideo.training.build import open_run
    from hyvideo.training.device_memory import out_of_memory_loading

    disable_progress_bar()
    try:
        planned = plan_on_main(config) if config.run.dry_run else None
        parallel = config.parallel
        process.enter_context(process_group(parallel.collective_timeout, of_one=parallel.cpu_offload))
        if config.run.dry_run:
            rehearsed = preflight(config, planned)
            if not dist.is_initialized() or dist.get_rank() == 0:
                print(printable(rehearsed))
            return 0
        run = open_run(config, report)
    except torch.OutOfMemoryError as error:
        complain(f"post_train.py: {out_of_memory_loading(error)}")
        raise SystemExit(1) from None
    except (ValueError, OSError) as error:
        if not dist.is_initialized() or dist.get_rank() == 0:  # once the ranks have met, all print the same
            complain(f"post_train.py: {in_words(error)}")
        return 2
    return _train(run)


def _train(run: "Run") -> int:
    """Train, and put what ends a run too early into words; returns the exit status."""
    import torch

    from hyvideo.algorithms.optimizer import NonFiniteUpdateError
    from hyvideo.checkpoint.train_state import SaveError
    from hyvideo.models.reward_models.registry import RewardFailureError
    from hyvideo.training.device_memory import out_of_memory
    from hyvideo.training.guard import ReplayMismatchError

    try:
        stopped_by = run.train()
    except torch.OutOfMemoryError as error:
        # Only on this rank: the others wait for it, and the launcher ends them.
        run.journal.console.error(out_of_memory(error, run.timer.phase, run.state.step, run.mesh.rank, run.config))
        raise SystemExit(1) from None
    except (NonFiniteUpdateError, ReplayMismatchError, RewardFailureError, SaveError) as error:
        # Their message says everything: no traceback, but that of a custom reward that failed on this rank.
        cause = error.__cause__
        if isinstance(error, RewardFailureError) and cause and not isinstance(cause, RewardFailureError):
            traceback.print_exception(cause)
        if run.mesh.is_main:
            for number in listened_preemptions():  # torchrun sends SIGTERM when the first rank has ended
                signal.signal(number, signal.SIG_IGN)
            run.journal.console.error(str(error))
            run.journal.write_report()
        return 1
    except OSError as error:
        advice = "Earlier checkpoints are intact. Make space, then continue with --resume_from_checkpoint latest."
        if error.errno not in FULL:
            error.add_note(advice := run.whereabouts())
            if (run.folder.path / LOCK).exists():
                raise
        run.journal.console.error(f"{in_words(error)}. {advice}")  # here alone: the launcher ends the other ranks
        raise SystemExit(1) from None
    except Exception as error:
        error.add_note(run.whereabouts())
        raise
    finally:
        run.journal.console.close()
    return PREEMPTED if stopped_by in PREEMPTIONS else 0


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
