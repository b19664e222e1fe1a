"""Runs of the tiny random model: their command line, their training, and one round by hand."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hyvideo.algorithms.algorithm import Trajectory
from hyvideo.config.loading import load_config
from hyvideo.grpo.timesteps import Pairs, select_timesteps, split_updates
from hyvideo.models.parallelize import trainable_parameters
from hyvideo.training.build import open_run
from hyvideo.training.collect import collect
from hyvideo.training.run import Run

REPOSITORY = Path(__file__).parents[2]

PROMPTS = (
    "a red circle moves slowly to the left",
    'the blue square with the word "go" glides upwards quickly, far away from the camera',
    "slowly moving to the lower right, a cross in cyan",
    "a yellow triangle travels down, quickly",
)
"""Of several lengths, one with a quoted text; each asks for one scene."""

VIDEOS = {"sample_n_frames": 5, "rollout_size": "32x32", "infer_flow_shift_video": 3.0, "grpo_sampling_steps": 4}
ROUND = {"batch_size": 4, "num_generations": 2, "rollout_micro_batch_size": 2, "mini_batch_size_per_update": 2}
KL = {"kl_weight": 0.01, "kl_warmup_updates": 2, "update_ref_model_step": 2}
VALIDATION = {"validation_interval": 0, "validation_num_videos": 2, "validate_video_length": 5}
VALIDATION |= {"validation_fixed_size": "32x32", "validation_num_inference_steps": 2}
SETTINGS: Mapping[str, Any] = {
    **{"config": [REPOSITORY / "configs" / "tiny.yaml", Path(__file__).with_name("no_trackers.yaml")]},
    **{"updates_per_rollout": 1, "learning_rate": 1e-3},
    **{"max_steps": 3, "save_interval": 0, "peak_tflops": 0.1},  # or every run would measure it
    **{**VIDEOS, **ROUND, **KL, **VALIDATION},
}
"""One round is 4 videos of 2 prompts in 4 steps; every part of the method acts within a few updates."""

EVERY_PART = {"ema_decay": 0.9, "base_interval": 2}
NFT = {"algorithm": "nft", "timestep_fraction": 0.75, "adv_clip_max": 1.0}
NFT["algorithm_options"] = ["old_ramp=0.2", "kl_weight=0.1"]
ALGORITHMS: Mapping[str, Mapping[str, Any]] = {"grpo": EVERY_PART, "nft": EVERY_PART | NFT}
"""Every built-in algorithm, with settings under which every part of it acts within a few updates. What holds for all
algorithms is tested for each of these."""


def write_prompts(path: Path, prompts: Sequence[str] = PROMPTS, *, images: bool = False) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "ref_image_path"])
        for number, prompt in enumerate(prompts):
            name = f"{path.stem}_{number}.png" if images else ""
            if images:
                noisy_image(number).save(path.parent / name)
            writer.writerow([prompt, name])
    return path


def noisy_image(number: int, size: tuple[int, int] = (48, 40)) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def arguments(root: Path, csv: Path, output_dir: Path, **settings: Any) -> list[str]:
    """Return the command line of a run; `settings` replace those of SETTINGS, None leaves one out."""
    paths = {"pretrained_model_root": root, "train_video_csv": csv, "valid_video_csv": csv, "output_dir": output_dir}
    return flags_of({**SETTINGS, **paths, **settings})


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    given = {name: one if isinstance(one, list) else [one] for name, one in settings.items() if one is not None}
    return [text for name, values in given.items() for text in (f"--{name}", *map(str, values))]


def training_of(argv: Sequence[str]) -> Run:
    """Build the training of a command line, as post_train.py does, but without a report."""
    return open_run(load_config(argv))


def train_all(runs: Sequence[Sequence[str]]) -> None:
    """Train runs, given by their command lines, one after the other; for ranks to call."""
    for argv in runs:
        training_of(argv).train()


class GradientRecorder(torch.optim.SGD):
    """Takes the place of a training's optimizers, and keeps the gradient of an update instead of following it."""

    def __init__(self, training: Run) -> None:
        super().__init__(training.algorithm.optimization.parameters.values(), lr=0.0)
        training.algorithm.optimization.optimizers = [self]

    def step(self, closure: None = None) -> None:
        self.gradient = torch.cat([p.grad.flatten() for p in self.param_groups[0]["params"]])


def weights_of(training: Run) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainable_parameters(training.policy.transformer).items()}


def collect_round(training: Run) -> Trajectory:
    return collect(training.policy, training.algorithm, training.reward, training.rounds.next())


def pairs_of(training: Run, trajectory: Trajectory, num_updates: int = 1, *, permute: bool = True) -> list[Pairs]:
    """Deal all trained (video, step) pairs of a trajectory to updates."""
    trained = training.policy.stochastic_steps()
    steps = select_timesteps(trained, 1.0, len(trajectory), permute=permute, generator=torch.Generator().manual_seed(5))
    return split_updates(steps, num_updates, num_generations=training.config.grpo.num_generations)


def update(training: Run, trajectory: Trajectory, pairs: Pairs, anchor_means=None, coefficient=0.0) -> dict[str, float]:
    compared = training.algorithm.compare(trajectory)
    if anchor_means is not None:
        compared = replace(compared, anchor_means=anchor_means)
    return training.algorithm.update(compared, pairs, coefficient)
