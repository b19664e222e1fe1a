"""What a run trained can be taken out of its checkpoint and put into the base model."""

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel

from hyvideo.checkpoint.trained_policy import check_checkpoint, load_trained_policy
from hyvideo.models.attention import install_attention
from hyvideo.models.loading import load_transformer
from tests.support.training import collect_round


@pytest.mark.parametrize("use_lora", [False, True], ids=["full", "lora"])
def test_the_base_model_becomes_the_trained_policy(make_training, tiny_root, use_lora):
    training = make_training(max_steps=2, use_lora=use_lora)
    training.train()
    pipeline, trajectory = training.policy.pipeline, collect_round(training)
    arguments = (trajectory.rollout.latents[:, 0], 0, trajectory.conditioning_of(torch.arange(4)))
    with torch.no_grad():
        expected = pipeline.velocity(*arguments, training.policy.guidance)
        fresh = load_transformer(tiny_root)
        pipeline.transformer = install_attention(fresh)
        assert not torch.allclose(pipeline.velocity(*arguments, training.policy.guidance), expected)
        load_trained_policy(fresh, training.folder.checkpoints / "step_2")
        assert torch.equal(pipeline.velocity(*arguments, training.policy.guidance), expected)


@pytest.mark.parametrize("change", [{"num_layers": 1}, {"num_attention_heads": 4}], ids=["names", "shapes"])
def test_a_checkpoint_of_another_model_is_refused(make_training, tiny_root, change):
    training = make_training(max_steps=1)
    training.train()
    checkpoint = training.folder.checkpoints / "step_1"
    other = HunyuanVideo15Transformer3DModel.from_config({**load_transformer(tiny_root).config, **change})
    with pytest.raises(ValueError, match=f"'{checkpoint}'"):
        load_trained_policy(other, checkpoint)


def test_a_folder_that_is_no_checkpoint_is_refused(tiny_root, tmp_path):
    with pytest.raises(ValueError, match=f"'{tmp_path}' is not a readable checkpoint"):
        load_trained_policy(load_transformer(tiny_root), tmp_path)


@pytest.mark.parametrize("name", ["", "transformer"])
def test_a_checkpoint_of_the_original_script_is_refused_with_the_command_that_converts_it(tmp_path, name):
    (tmp_path / "checkpoint-7" / "transformer").mkdir(parents=True)
    (tmp_path / "checkpoint-7" / "transformer" / ".metadata").touch()
    with pytest.raises(ValueError, match="Convert it once: python -m scripts.convert_release_checkpoint"):
        check_checkpoint(tmp_path / "checkpoint-7" / name)
