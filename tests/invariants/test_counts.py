"""What a GRPO step costs, counted in calls of the networks."""

from collections import Counter

import pytest
import torch

from benchmarks.plain_loop import make_round
from hyvideo.algorithms.algorithm import Evaluations
from hyvideo.config.schema import Config
from hyvideo.config.settings import value_of
from hyvideo.training.run import Run
from tests.support.equal_runs import rows_of

DEFAULTS = Config()
NUM_VIDEOS = DEFAULTS.grpo.num_generations
NAMES = "grpo_sampling_steps cfg_scale rollout_micro_batch_size num_generations mini_batch_size_per_update offload"
METHOD = {name: value_of(DEFAULTS, name) for name in f"{NAMES} updates_per_rollout update_ref_model_step".split()}
METHOD["batch_size"] = NUM_VIDEOS
"""The default method on one process: one prompt and its group of four videos per round."""


def count_calls(training: Run) -> Counter[str]:
    """Count the networks' forward passes from now on, the rows of the transformer and the videos of the decoder."""
    pipeline, calls = training.policy.pipeline, Counter()
    for name in ("text_encoder", "text_encoder_2", "transformer"):
        getattr(pipeline, name).register_forward_hook(lambda *_, name=name: calls.update([name]))
    pipeline.transformer.register_forward_hook(lambda module, args, output: calls.update(rows=len(output[0])))
    pipeline.vae.encoder.register_forward_hook(lambda *_: calls.update(["vae_encoder"]))
    pipeline.vae.decoder.register_forward_hook(lambda module, args, output: calls.update(videos=len(output)))
    return calls


def test_network_calls_of_the_default_method(make_training):
    """One text encoding per prompt; K evaluations of two rows per video and phase; the anchor's if it differs."""
    training = make_training(**METHOD, max_steps=2)
    calls = count_calls(training)
    cost = training.algorithm.evaluations(training.config)
    assert cost == Evaluations(20, 20, 20)
    for anchor in (0, cost.anchor):  # in the first round the anchor is the policy
        make_round(training)
        evaluations = NUM_VIDEOS * (cost.rollout + anchor + cost.update)
        calls.pop("text_encoder_2", None)  # one of the prompts quotes a text
        assert calls == {"text_encoder": 1, "transformer": evaluations, "rows": 2 * evaluations, "videos": NUM_VIDEOS}
        assert rows_of(training.folder.path)[-1]["update/evaluations"] == NUM_VIDEOS * cost.update
        calls.clear()


@pytest.fixture
def train_and_count(make_training):
    """Train on rounds of eight videos in micro-batches of two, and count."""

    def train(**settings: object) -> Counter[str]:
        training = make_training(batch_size=8, **settings)
        calls = count_calls(training)
        training.train()
        return calls

    return train


def test_a_round_of_several_prompts_encodes_each_once_and_decodes_each_video_once(train_and_count):
    assert train_and_count(max_steps=1) == {
        "text_encoder": 4,  # the CSV's prompts, two videos each
        "text_encoder_2": 1,  # one of them quotes a text
        "videos": 8,
        "transformer": 2 * 4 * 8 // 2,  # rollout and replay of four steps; the anchor equals the policy
        "rows": 2 * 4 * 8,
    }


def test_guidance_encodes_the_negative_prompt_once_and_doubles_rows_not_calls(train_and_count):
    unguided, guided = train_and_count(max_steps=2), train_and_count(max_steps=2, cfg_scale=4.0)
    assert guided.pop("rows") == 2 * unguided.pop("rows")
    assert unguided == guided  # the negative prompt was encoded before the first round


@pytest.mark.parametrize("settings", [{"kl_weight": 0}, {"dual_kl_moving_weight": 0}], ids=str)
def test_without_a_position_term_there_is_no_anchor_pass(train_and_count, settings):
    assert train_and_count(max_steps=2, update_ref_model_step=10, **settings)["transformer"] == 2 * 2 * 4 * 8 // 2


def test_the_negative_prompt_is_encoded_with_the_trainer(make_training):
    training = make_training(cfg_scale=4.0, negative_prompt="blurred")
    expected = training.policy.pipeline.encode(["blurred"], glyphs=False)
    assert torch.equal(training.policy.guidance.negative.text[0], expected.text[0])


@pytest.mark.parametrize("kl_weight", [0.0, 0.1], ids=["without KL", "with KL"])
def test_nft_costs_what_it_says(make_training, kl_weight: float):
    training = make_training(algorithm="nft", algorithm_options=f"kl_weight={kl_weight}", timestep_fraction=0.5)
    calls, cost = count_calls(training), training.algorithm.evaluations(training.config)
    for spared in (cost.update, 0):  # in the first round the old policy is the policy
        make_round(training)
        assert calls["rows"] == 4 * (cost.rollout + cost.anchor - spared + cost.update)
        assert rows_of(training.folder.path)[-1]["update/evaluations"] == 4 * cost.update
        calls.clear()
