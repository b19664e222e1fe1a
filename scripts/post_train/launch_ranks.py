"""torchrun that also passes SIGUSR1 on, and ends with its ranks' own exit status where they report one.

Usage: `python -m scripts.post_train.launch_ranks [torchrun's options] post_train.py [flags]`
"""

import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from hyvideo.config.outside import complain
from hyvideo.training.stop_signal import LOST, PREEMPTED

SIGNALS = "SIGTERM,SIGINT,SIGQUIT,SIGUSR1"
TOLD = (2, PREEMPTED)
"""Statuses of post_train.py that its ranks have explained: wrong input, preempted."""


def launch(argv: list[str], run: Callable[[list[str]], None] = torchrun) -> int:
    """Start ranks and wait for them.

    Args:
        argv: torchrun's command line.
        run: torchrun.

    Returns:
        0 when all ended well or were stopped and have saved, 2 for wrong input, 75 when they were preempted, 128 and
        the signal's number when a rank was killed or crashed, 69 when the connection to ranks elsewhere was lost.

    Raises:
        ChildFailedError: a rank failed otherwise.
        SignalException: asked to stop, and the ranks did not say that they have saved.
    """
    lost_terminal = "" if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else ",SIGHUP"  # ignored under nohup
    before = _children()
    with TemporaryDirectory(prefix="launch-ranks-") as folder:
        status = Path(folder) / "status"
        os.environ["POST_TRAIN_STATUS_FILE"] = str(status)
        try:
            run([f"--signals_to_handle={SIGNALS}{lost_terminal}", *argv])
        except ChildFailedError as error:
            # torchrun ends the others by SIGTERM as soon as the first has ended, some before they can tell.
            failures = {r: failure for r, failure in error.failures.items() if failure.exitcode != -signal.SIGTERM}
            statuses = {failure.exitcode for failure in failures.values()}
            if statuses and statuses <= set(TOLD):
                return min(statuses)
            if not statuses or any(0 < status and status not in (LOST, PREEMPTED) for status in statuses):
                raise
            rank = min(failures, key=lambda r: (failures[r].timestamp, failures[r].exitcode))
            return _lost(rank, failures[rank].exitcode)
        except SignalException as error:
            said = status.read_text() if status.is_file() else ""
            if said not in (("0", "75") if error.sigval == signal.SIGINT else ("75",)):
                for left in _children() - before:  # asked a third time, torchrun leaves its ranks to themselves
                    os.kill(left, signal.SIGKILL)
                raise
            return int(said)
    return 0


def _lost(rank: int, exitcode: int) -> int:
    """Say which rank was lost, and return the status for it."""
    noticed = "noticed that others are gone, or lost its device"
    how = noticed if exitcode > 0 else f"was ended by {signal.Signals(-exitcode).name}"
    told = f"rank {rank} on {socket.gethostname()} {how}"
    complain(f"launch_ranks.py: {told}")
    if "TRAIN_LOST_FILE" in os.environ:
        Path(os.environ["TRAIN_LOST_FILE"]).write_text(told)
    return LOST if exitcode > 0 else 128 - exitcode


def _children() -> set[int]:
    """Return the processes that this one has started."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    return {int(number) for number in listed.read_text().split()} if listed.is_file() else set()


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
