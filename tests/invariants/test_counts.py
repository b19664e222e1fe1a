"""What a GRPO step of the default configuration costs, counted: network calls, and what crosses between host and device."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from hyvideo.config.schema import Config
from hyvideo.grpo.evaluations import Evaluations, evaluations_per_video
from hyvideo.models.parallelize import trainable_parameters
from hyvideo.training.anchor import Anchor
from hyvideo.training.optimizer import build_optimizers
from hyvideo.training.trainer import Trainer
from tests.support.pretend_device import Elsewhere, Transfers, move_elsewhere

DEFAULTS = Config()
NUM_STEPS = DEFAULTS.rollout.grpo_sampling_steps
NUM_VIDEOS = DEFAULTS.grpo.num_generations
METHOD = {
    "grpo_sampling_steps": NUM_STEPS,
    "cfg_scale": DEFAULTS.rollout.cfg_scale,
    "rollout_micro_batch_size": DEFAULTS.rollout.rollout_micro_batch_size,
    "num_generations": DEFAULTS.grpo.num_generations,
    "batch_size": NUM_VIDEOS,
    "mini_batch_size_per_update": DEFAULTS.grpo.mini_batch_size_per_update,
    "updates_per_rollout": DEFAULTS.grpo.updates_per_rollout,
    "update_ref_model_step": DEFAULTS.kl.update_ref_model_step,
    "reference_mode_offload": DEFAULTS.kl.reference_mode_offload,
}
"""The default method on one process: one prompt and its group of four videos per round."""


@pytest.fixture
def trainer_elsewhere(make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """A trainer of the default method whose networks are on the pretended device."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())  # which knows real devices alone
    trainer = make_trainer(**METHOD, max_steps=100)
    update, state = trainer.update, trainer.state
    for component in update.pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            move_elsewhere(component)
    parameters = trainable_parameters(update.pipeline.transformer)
    update.parameters = list(parameters.values())
    update.optimizers = state.optimizers = build_optimizers(parameters, trainer.config.optimizer)
    update.anchor = state.anchor = Anchor(parameters, offload=False)
    negative = update.guidance.negative
    for name in ("text", "text_mask", "glyph", "glyph_mask"):
        object.__setattr__(negative, name, Elsewhere(getattr(negative, name)))
    return trainer


def test_a_step(trainer_elsewhere: Trainer):
    trainer, calls = trainer_elsewhere, Counter()
    pipeline = trainer.update.pipeline
    for name in ("text_encoder", "text_encoder_2", "transformer"):
        getattr(pipeline, name).register_forward_hook(lambda *_, name=name: calls.update([name]))
    pipeline.vae.decoder.register_forward_hook(lambda module, args, output: calls.update(videos=len(output)))
    with Transfers() as transfers:
        trainer.run_round()
        print(dict(calls), transfers.copies, transfers.bytes)
        calls.clear(); transfers.clear()
        trainer.run_round()
        print(dict(calls), transfers.copies, transfers.bytes)
