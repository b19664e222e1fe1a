"""Train for one look at a time, and see which look drift names first.

Example: `python -m scripts.tiny.plant --output_dir outputs/planted`

Each planted reward pays for one look, whatever the prompt; stillness is that of the shape's centre, since a shape that
fades seems slower too. The controls shuffle the true rewards of a round among its videos. Finished runs are kept:
started again, the command makes the others. Unknown flags are passed to the runs.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from hyvideo.config.flags import Parser
from hyvideo.config.loading import load_config
from hyvideo.config.outside import complain
from hyvideo.evaluation.drift import LOOKS, drift, looks_of
from hyvideo.models.reward_models.moving_shapes import measure
from hyvideo.models.reward_models.registry import RewardModel
from hyvideo.training.build import open_run
from scripts.tiny.prove_learning import ShuffledReward

FOUND = "found.json"
"""File of a run's folder: the look that was named first, and in what words."""

SETTINGS = (
    *("--config", "configs/tiny.yaml", "configs/demo.yaml", "--save_interval", "0", "--validation_interval", "0"),
    *("--base_interval", "0", "--validation_num_videos", "64", "--drift_guard", "{}", "--log_interval", "8"),
    *("--sample_n_frames", "9", "--validate_video_length", "9", "--batch_size", "64", "--max_steps", "8"),
    *("--learning_rate", "2e-4", "--lr_warmup_steps", "0", "--kl_weight", "0"),
    *("--infer_flow_shift_video", "3", "--sage_clamp", "0.05"),
)
"""Short videos and no trust region: a reward is exploited within a few updates of many videos.

With 8 videos for each of 40 updates at 4e-4, a policy with shuffled rewards wandered in 6 of 10 runs.
"""

FIRST_STEP = (
    *("--sde_window_size", "1", "--sage_clamp", "3e-3"),
    *("--batch_size", "128", "--learning_rate", "1e-4", "--max_steps", "24"),
)
"""For rewards that backgrounds decide: the first step alone, which decides these, has noise and is trained.

The gradients of three more steps are noise to such a reward: by `scripts.forecast` signal and noise are equal at 1,796
videos with them, and at 281 without. Twice the videos for each update, at half the rate, make less noise still.
"""

ONE_BACKGROUND = (*FIRST_STEP, "--learning_rate", "2e-4", "--max_steps", "22")
"""Half the rate takes 40 updates. After more than these 22, shapes fade as well."""

STILLNESS = ("--batch_size", "128", "--learning_rate", "4e-4", "--max_steps", "28", "--validation_num_videos", "128")
"""Motion is slow to change: in 20 updates by -0.3 base std, which 64 videos do not show clearly."""

LOST = 0.005
"""What a lost shape costs, as speed in frame widths per frame; slow shapes move by 0.009, quick ones by 0.021."""

KINDS = {
    "brightness": ("brightness", FIRST_STEP),
    "sharpness": ("sharpness", ()),
    "stillness": ("motion", STILLNESS),
    "saturation": ("saturation", ()),
    "one_background": ("border", ONE_BACKGROUND),
    "shuffled": ("nothing", ()),
    "shuffled_background": ("nothing", ONE_BACKGROUND),
    "shuffled_stillness": ("nothing", STILLNESS),
}
"""Planted reward -> the look that it pays for, and flags on top of SETTINGS; last, the controls."""


class Planted(RewardModel):
    """Pays for looks."""

    metrics = tuple(kind for kind, (look, _) in KINDS.items() if look != "nothing")

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Score uint8 videos `[B, F, H, W, 3]`: metric -> `[B]`."""
        looks, seen = looks_of(videos), measure(videos)
        of = {name: torch.tensor([video[name] for video in looks]) for name in LOOKS}
        return {
            "brightness": of["brightness"],
            "sharpness": of["sharpness"],
            "stillness": LOST * seen.presence - seen.centre.diff(dim=1).norm(dim=-1).mean(1),
            "saturation": of["saturation"],
            "one_background": -(of["border"] - 0.5).abs(),
        }


def main(argv: list[str]) -> int:
    """Train what is not trained yet and say what was named; returns the exit status."""
    disable_progress_bar()
    parser = Parser("plant", description=__doc__)
    parser.add_argument("--runs", type=int, default=10, help="runs of each reward; default 10")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="default all")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/planted"), help="folder of the runs")
    arguments, flags = parser.parse_known_args(argv)
    try:
        for kind in arguments.kinds:
            named = []
            for seed in range(1, arguments.runs + 1):
                folder = arguments.output_dir / f"{kind}-{seed}"
                if not (folder / FOUND).is_file():
                    _train(folder, kind, seed, flags)
                first, told = json.loads((folder / FOUND).read_text())
                named.append(first)
                print(f"{folder.name:18s} {first:12s} {told}", flush=True)
            print(f"{kind}: {KINDS[kind][0]} first in {named.count(KINDS[kind][0])} of {len(named)} runs", flush=True)
    except (ValueError, OSError) as error:
        complain(f"plant: {error}")
        return 2
    return 0


def _train(folder: Path, kind: str, seed: int, flags: list[str]) -> None:
    """Train one run, anew if it was cut off, and write what the panel names first."""
    shutil.rmtree(folder, ignore_errors=True)
    look, own = KINDS[kind]
    argv = [*SETTINGS, *own, "--output_dir", str(folder), "--seed", str(seed)]
    if look != "nothing":
        argv += ["--reward_model", "scripts.tiny.plant:Planted", "--reward_weights", json.dumps({kind: 1.0})]
    training = open_run(load_config([*argv, *flags]))
    if look == "nothing":
        training.reward = ShuffledReward(training.reward, seed)
    training.config.validation.validate_at_step0 = False
    prompts = [prompt.text for prompt in training.validation.prompts]
    before = looks_of(training.validation.sample(training.validation.prompts).videos)
    training.train()
    if training.state.step < training.config.run.max_steps:
        sys.exit("stopped; start the same command again to go on")
    found = drift(before, looks_of(training.validation.sample(training.validation.prompts).videos), prompts)
    first = next((name for name, change in found.changes.items() if change.clear()), "nothing")
    training.journal.console.close()
    (folder / FOUND).write_text(json.dumps([first, str(found)]) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
