"""Training from images, from a checkpoint in the original layout: exact replay, each image encoded once."""

from collections import Counter
from pathlib import Path

import pytest

from hyvideo.training.trainer import Trainer
from tests.support.training import arguments, collect_round, pairs_of, trainer_of, write_prompts


@pytest.fixture
def trainer(original_root: Path, tmp_path: Path) -> Trainer:
    csv = write_prompts(tmp_path / "prompts.csv", images=True)
    settings = {"pretrained_transformer_version": "480p_i2v", "cfg_scale": 3.0, "batch_size": 4}
    return trainer_of(arguments(original_root, csv, tmp_path / "run", **settings))


def test_replay_is_exact_and_the_vision_embedder_is_trained(trainer: Trainer):
    trajectory = collect_round(trainer)
    pairs = pairs_of(trainer, trajectory, permute=False)
    before = trainer.update.pipeline.transformer.image_embedder.linear_1.weight.clone()
    stats = trainer.update(trajectory, pairs[0], None, 0.0)
    assert stats.mean_error == 0
    assert stats.ratio_deviation == 0
    assert not before.equal(trainer.update.pipeline.transformer.image_embedder.linear_1.weight)


def test_each_image_is_encoded_once_a_round(trainer: Trainer):
    pipeline, counter = trainer.update.pipeline, Counter()
    for name, network in (("vision", pipeline.image_encoder), ("vae", pipeline.vae.encoder)):
        network.register_forward_hook(lambda module, args, output, name=name: counter.update([name]))
    trajectory = collect_round(trainer)
    assert counter == {"vision": 2, "vae": 2}  # four videos of two prompts
    assert len(trajectory.conditioning.images.states) == 2


@pytest.mark.parametrize(
    ("version", "images", "message"),
    [
        ("480p_t2v", True, "text-to-video model was given 4 of 4"),
        ("480p_i2v", False, "image-to-video model was given 4"),
    ],
)
def test_prompts_of_the_other_task_are_refused_before_anything_is_made(
    original_root: Path, tmp_path: Path, version: str, images: bool, message: str
):
    csv = write_prompts(tmp_path / "prompts.csv", images=images)
    with pytest.raises(ValueError, match=message):
        trainer_of(arguments(original_root, csv, tmp_path / "run", pretrained_transformer_version=version))
    assert not (tmp_path / "run").exists()
