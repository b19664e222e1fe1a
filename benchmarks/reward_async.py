"""Wall time of sampling and scoring, overlapped (`reward_async`) against one after the other, and that both agree.

The tiny model is trained both ways with the same seeds and a slow reward: moving_shapes with a wait per video, as for
the answer of a server. Further flags go to all runs.

Example: `python -m benchmarks.reward_async --seconds 1 --max_steps 4 --batch_size 16 --rollout_micro_batch_size 4`
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from hyvideo.config.loading import load_config
from hyvideo.models.reward_models.moving_shapes import MovingShapesReward
from hyvideo.models.reward_models.registry import RewardContext, register_reward
from hyvideo.observability.metrics import read_metrics
from hyvideo.training.assembly import build_training


@register_reward("slow_moving_shapes")
class SlowMovingShapes(MovingShapesReward):
    """The moving_shapes reward after a wait of `seconds` per video."""

    def __init__(self, context: RewardContext, seconds: float) -> None:
        super().__init__(context)
        self._seconds = seconds

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Wait, then score."""
        time.sleep(self._seconds * len(prompts))
        return super().__call__(videos, prompts)


def main(argv: Sequence[str]) -> int:
    """Train both ways and print the wall times; returns 1 where the metrics differ."""
    disable_progress_bar()
    parser = argparse.ArgumentParser("reward_async", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="wait per video; default 1")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each kind, alternating; the fastest counts")
    arguments, flags = parser.parse_known_args(argv)
    runs: dict[str, list] = {"false": [], "true": []}
    for _ in range(arguments.repeats):
        for overlapped, finished in runs.items():
            with TemporaryDirectory() as folder:
                settings = [*flags, "--reward_async", overlapped]
                finished.append(_train(Path(folder) / "run", arguments.seconds, settings))
    for what, index in (("waiting for scores", 0), ("sampling and scoring", 1), ("whole run", 2)):
        before, after = (min(times[index] for times, _ in finished) for finished in runs.values())
        print(f"{what}: {before:.1f} s one after the other, {after:.1f} s overlapped, ratio {before / after:.2f}")
    rows = [rows for finished in runs.values() for _, rows in finished]
    same = all(other == rows[0] for other in rows)
    print(f"{len(rows[0])} updates, metrics {'identical' if same else 'DIFFER'}")
    return 0 if same else 1


def _train(folder: Path, seconds: float, flags: Sequence[str]) -> tuple[tuple[float, ...], list[dict[str, float]]]:
    """Train in `folder`: seconds of what `main` prints, and the metrics but for times."""
    config = load_config(["--config", "configs/tiny.yaml", "--validation_interval", "0", *flags])
    config.run.output_dir = str(folder)
    config.rollout.save_rollout_videos = False
    entry = {"sub_reward": dict(config.reward.reward_weights), "options": {"seconds": seconds}}
    config.reward.reward_config = {"models": {"slow_moving_shapes": entry}}
    training = build_training(config)
    start = time.perf_counter()
    training.train()
    duration = time.perf_counter() - start
    rows = read_metrics(folder / "metrics.jsonl")
    scoring, sampling = (sum(row[f"time/{phase}"] for row in rows) for phase in ("reward", "rollout"))
    return (scoring, sampling + scoring, duration), [
        {k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
