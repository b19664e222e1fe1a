"""The bundled model in its own configuration: what it promises of the random one holds for it too."""

import pytest
import torch

from hyvideo.training.trainer import Trainer
from tests.support.training import REPOSITORY, collect_round, flags_of, pairs_of, trainer_of

TINY = REPOSITORY / "assets" / "tiny"


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """The trainer of configs/tiny.yaml, with fewer videos and steps per round; its videos are not decoded."""
    prompts = TINY / "prompts" / "train.csv"
    settings = {
        "config": REPOSITORY / "configs" / "tiny.yaml",
        "pretrained_model_root": TINY,
        "train_video_csv": prompts,
        "valid_video_csv": prompts,
        "output_dir": tmp_path_factory.mktemp("tiny_config") / "run",
        "batch_size": 16,
        "grpo_sampling_steps": 6,
    }
    trainer = trainer_of(flags_of(settings))
    blank = torch.zeros(1, trainer.config.rollout.sample_n_frames, 64, 64, 3, dtype=torch.uint8)
    trainer.update.pipeline.decode = lambda latents: blank.expand(len(latents), -1, -1, -1, -1)
    return trainer


def test_the_replay_is_exact(trainer: Trainer):
    trajectory = collect_round(trainer)
    (pairs,) = pairs_of(trainer, trajectory)
    stats = trainer.update(trajectory, pairs, None, coefficient=0.0)
    assert (stats.ratio_deviation, stats.mean_error) == (0.0, 0.0)
