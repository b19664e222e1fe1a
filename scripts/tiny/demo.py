"""The demo: post-train the bundled tiny model on this machine and show what improved (`make demo`).

It samples held-out prompts with the base model, trains with the flags of `configs/tiny.yaml` (any flag of post_train.py
may follow), samples the same prompts and seeds again, and writes a reward curve and the videos side by side.
"""

import sys
import time
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from hyvideo.config.loading import load_config
from hyvideo.observability.before_after import side_by_side
from hyvideo.observability.plots import plot_reward_curve
from hyvideo.training.assembly import build_trainer
from scripts.tiny.comparison import Sampled, gains, held_out_prompts, sample_held_out, write_gains

NUM_HELD_OUT = 128
NUM_SHOWN = 8


def main(argv: list[str]) -> int:
    """Run the demo; returns the exit status."""
    disable_progress_bar()
    started = time.monotonic()
    config = load_config(["--config", "configs/tiny.yaml", *argv])
    if config.run.output_dir is None:
        config.run.output_dir = f"outputs/demo-{time.strftime('%Y%m%d-%H%M%S')}"
    trainer = build_trainer(config)
    prompts = held_out_prompts(config, NUM_HELD_OUT)
    trainer.console.info(f"sampling {NUM_HELD_OUT} held-out prompts with the base model ...")
    before = sample_held_out(trainer, prompts)
    trainer.train()
    trainer.console.info("sampling the same prompts and seeds with the trained model ...")
    after = sample_held_out(trainer, prompts)
    folder = trainer.folder.path
    result = gains(before.scores, after.scores)
    write_gains(folder / "gains.json", result)
    plot_reward_curve(folder / "metrics.jsonl", folder / "reward_curve.png")
    _show(before, after, [prompt.text for prompt in prompts], folder / "before_after.mp4")
    trainer.write_report()
    trainer.console.info(
        f"\nPaired gain on {NUM_HELD_OUT} held-out prompts and seeds (ODE), mean and 95 % interval:\n"
        + "\n".join(f"  {name:7s} {gain}" for name, gain in result.items())
        + f"\n{_verdict(result)}\n"
        f"report: {folder / 'report.html'}\nreward curve: {folder / 'reward_curve.png'}\n"
        f"before/after: {folder / 'before_after.mp4'} (and .png)\n"
        f"{(time.monotonic() - started) / 60:.1f} minutes"
    )
    trainer.console.close()
    return 0


def _show(before: Sampled, after: Sampled, texts: list[str], path: Path) -> None:
    """Write the first videos side by side: no choosing by result."""
    captions = [
        f"{text} ({old:+.1f} to {new:+.1f})"
        for text, old, new in zip(texts, before.scores.total, after.scores.total, strict=True)
    ]
    side_by_side(before.videos[:NUM_SHOWN], after.videos[:NUM_SHOWN], captions[:NUM_SHOWN], path)


def _verdict(result: dict) -> str:
    """Say in one line whether the reward improved."""
    reward, alignment = result["reward"], result["TA"]
    if reward.low <= 0:
        return "No clear improvement: the interval of the reward's gain includes 0."
    held = "rose" if alignment.low > 0 else "did not fall" if alignment.high >= 0 else "FELL"
    return f"Improved: reward {reward.mean:+.2f} ({reward.in_base_std:+.2f} base std); text alignment {held}."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
