"""torchrun, which also passes SIGUSR1 on and ends with the status of preempted ranks instead of 1.

Usage: `python -m scripts.post_train.launch_ranks [torchrun's options] post_train.py [flags]`
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
PREEMPTED = "75"


def launch(argv: list[str], run: Callable[[list[str]], None] = torchrun) -> int:
    """Start ranks and wait for them.

    Args:
        argv: torchrun's command line.
        run: torchrun.

    Returns:
        0 when all ended well, 75 when they were preempted and have saved.

    Raises:
        ChildFailedError: a rank failed.
        SignalException: asked to stop, and the ranks did not say that they have saved.
    """
    with TemporaryDirectory(prefix="launch-ranks-") as folder:
        status = Path(folder) / "status"
        os.environ["POST_TRAIN_STATUS_FILE"] = str(status)
        try:
            run([f"--signals_to_handle={SIGNALS}", *argv])
        except (ChildFailedError, SignalException):
            if status.is_file() and status.read_text() == PREEMPTED:
                return int(PREEMPTED)
            raise
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
