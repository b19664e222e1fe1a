"""A round encodes every prompt once, decodes every video once and evaluates the transformer no more than it must."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from hyvideo.training.trainer import Trainer

NUM_STEPS, NUM_VIDEOS, MICRO_BATCH = 4, 8, 2


@pytest.fixture
def calls(make_trainer: Callable[..., Trainer]) -> Callable[..., Counter]:
    """Train for some updates and count the forward passes of every network."""

    def count(**settings: object) -> Counter:
        trainer = make_trainer(batch_size=NUM_VIDEOS, **settings)
        pipeline, counter = trainer.update.pipeline, Counter()
        networks = {
            "text_encoder": pipeline.text_encoder,
            "text_encoder_2": pipeline.text_encoder_2,
            "decoder": pipeline.vae.decoder,
            "encoder": pipeline.vae.encoder,
            "transformer": pipeline.transformer,
        }
        for name, network in networks.items():
            network.register_forward_hook(
                lambda module, args, output, name=name: counter.update({name: len(output) if name == "decoder" else 1})
            )  # small videos are decoded together: count videos there, calls elsewhere
        trainer.train()
        return counter

    return count


def test_one_round(calls: Callable[..., Counter]):
    counter = calls(max_steps=1)
    assert counter == {
        "text_encoder": 4,  # the CSV's prompts, two videos each
        "text_encoder_2": 1,  # one of them quotes a text
        "decoder": NUM_VIDEOS,
        "transformer": 2 * NUM_STEPS * NUM_VIDEOS // MICRO_BATCH,  # rollout and replay; the anchor equals the policy
    }


def test_guidance_encodes_the_negative_prompt_once_and_doubles_rows_not_calls(calls: Callable[..., Counter]):
    unguided, guided = calls(max_steps=2), calls(max_steps=2, cfg_scale=4.0)
    assert unguided == guided  # the negative prompt was encoded before the first round


def test_an_anchor_that_differs_costs_one_more_pass(calls: Callable[..., Counter]):
    counter = calls(max_steps=2, update_ref_model_step=10)
    assert counter["transformer"] == (2 + 3) * NUM_STEPS * NUM_VIDEOS // MICRO_BATCH
    assert counter["decoder"] == 2 * NUM_VIDEOS


@pytest.mark.parametrize("settings", [{"kl_weight": 0}, {"dual_kl_moving_weight": 0}], ids=str)
def test_without_a_position_term_there_is_no_anchor_pass(calls: Callable[..., Counter], settings: dict[str, float]):
    counter = calls(max_steps=2, update_ref_model_step=10, **settings)
    assert counter["transformer"] == 2 * 2 * NUM_STEPS * NUM_VIDEOS // MICRO_BATCH


def test_steps_that_are_not_trained_are_not_replayed(calls: Callable[..., Counter]):
    counter = calls(max_steps=1, timestep_fraction=0.5)
    assert counter["transformer"] == (NUM_STEPS + NUM_STEPS // 2) * NUM_VIDEOS // MICRO_BATCH


def test_the_negative_prompt_is_encoded_with_the_trainer(make_trainer: Callable[..., Trainer]):
    trainer = make_trainer(cfg_scale=4.0, negative_prompt="blurred")
    expected = trainer.update.pipeline.encode(["blurred"], glyphs=False)
    assert torch.equal(trainer.update.guidance.negative.text, expected.text)
