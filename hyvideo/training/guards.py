"""What watches over a run from beside its loop."""

from dataclasses import dataclass

from hyvideo.observability.watchdog import Watchdog
from hyvideo.training.reward_watch import RewardWatch


@dataclass
class Guards:
    """Watches of one rank.

    Attributes:
        watchdog: prints where the rank is when it is stuck.
        reward_watch: warns of a reward that is being hacked.
        skipped_in_row: updates left out since the last one that was made (`nonfinite_update`).
    """

    watchdog: Watchdog
    reward_watch: RewardWatch
    skipped_in_row: int = 0
