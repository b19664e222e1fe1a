"""Training from images, from a checkpoint in the original layout: exact replay, each image encoded once."""

from collections import Counter
from pathlib import Path

import pytest

from tests.support.training import ALGORITHMS, arguments, collect_round, pairs_of, training_of, update, write_prompts


def test_nft_trains_from_images(original_root: Path, tmp_path: Path):
    csv = write_prompts(tmp_path / "prompts.csv", images=True)
    settings = {"pretrained_transformer_version": "480p_i2v", "batch_size": 4, **ALGORITHMS["nft"]}
    training = training_of(arguments(original_root, csv, tmp_path / "run", **settings))
    before = training.policy.transformer.image_embedder.linear_1.weight.clone()
    rows = [row for _ in range(2) for row in training.algorithm.updates(collect_round(training))]
    assert not before.equal(training.policy.transformer.image_embedder.linear_1.weight)
    assert all(row["grad_norm"] > 0 for row in rows) and rows[1]["nft/old_distance"] > 0


def test_replay_is_exact_each_image_encoded_once_and_the_vision_embedder_trained(original_root: Path, tmp_path: Path):
    csv = write_prompts(tmp_path / "prompts.csv", images=True)
    settings = {"pretrained_transformer_version": "480p_i2v", "cfg_scale": 3.0, "batch_size": 4}
    training = training_of(arguments(original_root, csv, tmp_path / "run", **settings))
    pipeline, counter = training.policy.pipeline, Counter()
    for name, network in (("vision", pipeline.image_encoder), ("vae", pipeline.vae.encoder)):
        network.register_forward_hook(lambda module, args, output, name=name: counter.update([name]))
    trajectory = collect_round(training)
    assert counter == {"vision": 2, "vae": 2}  # four videos of two prompts
    assert len(trajectory.conditioning.images.states) == 2
    before = pipeline.transformer.image_embedder.linear_1.weight.clone()
    metrics = update(training, trajectory, pairs_of(training, trajectory, permute=False)[0])
    assert metrics["replay/mean_error"] == metrics["ratio/max_deviation"] == 0
    assert not before.equal(pipeline.transformer.image_embedder.linear_1.weight)


@pytest.mark.parametrize(("version", "task"), [("480p_t2v", "text-to-video"), ("480p_i2v", "image-to-video")])
def test_prompts_of_the_other_task_are_refused_before_anything_is_made(original_root, tmp_path, version, task):
    csv = write_prompts(tmp_path / "prompts.csv", images=task == "text-to-video")
    with pytest.raises(ValueError, match=f"{task} model was given 4 of 4"):
        training_of(arguments(original_root, csv, tmp_path / "run", pretrained_transformer_version=version))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("row", [0, 3])
def test_an_image_that_cannot_be_read_is_named_before_anything_is_made(original_root: Path, tmp_path: Path, row: int):
    csv = write_prompts(tmp_path / "prompts.csv", images=True)
    (tmp_path / f"prompts_{row}.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=f"prompts_{row}.png' cannot be read"):
        training_of(arguments(original_root, csv, tmp_path / "run", pretrained_transformer_version="480p_i2v"))
    assert not (tmp_path / "run").exists()
