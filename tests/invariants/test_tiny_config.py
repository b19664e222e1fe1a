"""The bundled model in its own configuration: what it promises of the random one holds for it too."""

from pathlib import Path

import torch

from tests.support.training import REPOSITORY, collect_round, flags_of, pairs_of, training_of, update

TINY = REPOSITORY / "assets" / "tiny"


def test_its_start_warns_of_nothing_and_its_replay_is_exact(tmp_path: Path):
    """In fewer videos and steps per round, and the videos are not decoded."""
    prompts, config = TINY / "prompts" / "train.csv", REPOSITORY / "configs" / "tiny.yaml"
    settings = {"config": config, "pretrained_model_root": TINY, "train_video_csv": prompts, "valid_video_csv": prompts}
    settings |= {"output_dir": tmp_path / "run", "batch_size": 16, "grpo_sampling_steps": 6}
    training = training_of(flags_of(settings))
    log = (training.folder.path / "console.log").read_text()
    assert "run folder" in log and "WARNING" not in log
    blank = torch.zeros(1, training.config.rollout.sample_n_frames, 64, 64, 3, dtype=torch.uint8)
    training.policy.pipeline.decode = lambda latents: blank.expand(len(latents), -1, -1, -1, -1)
    trajectory = collect_round(training)
    (pairs,) = pairs_of(training, trajectory)
    metrics = update(training, trajectory, pairs)
    assert (metrics["ratio/max_deviation"], metrics["replay/mean_error"]) == (0.0, 0.0)
