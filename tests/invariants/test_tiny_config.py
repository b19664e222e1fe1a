"""The bundled model in its own configuration: what it promises of the random one holds for it too."""

import pytest
import torch

from hyvideo.training.run import Run
from tests.support.training import REPOSITORY, collect_round, flags_of, pairs_of, training_of, update

TINY = REPOSITORY / "assets" / "tiny"


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The training of configs/tiny.yaml, with fewer videos and steps per round; its videos are not decoded."""
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
    training = training_of(flags_of(settings))
    blank = torch.zeros(1, training.config.rollout.sample_n_frames, 64, 64, 3, dtype=torch.uint8)
    training.policy.pipeline.decode = lambda latents: blank.expand(len(latents), -1, -1, -1, -1)
    return training


def test_its_start_warns_of_nothing(training: Run):
    log = (training.folder.path / "console.log").read_text()
    assert "run folder" in log and "WARNING" not in log


def test_the_replay_is_exact(training: Run):
    trajectory = collect_round(training)
    (pairs,) = pairs_of(training, trajectory)
    metrics = update(training, trajectory, pairs)
    assert (metrics["ratio/max_deviation"], metrics["replay/mean_error"]) == (0.0, 0.0)
