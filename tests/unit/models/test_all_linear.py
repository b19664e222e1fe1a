"""`lora_target_modules all-linear`, the default of the release: all linear layers but the last have an adapter."""

import pytest
from peft.tuners.lora import LoraLayer
from torch import nn

from hyvideo.models.adapter import lora_config
from hyvideo.models.parallelize import prepare_policy
from tests.support.tiny_model import build_transformer
from tests.support.training import collect_round, weights_of


@pytest.mark.parametrize("change", [{}, {"num_layers": 3, "use_meanflow": True}], ids=["tiny", "deeper, two timesteps"])
def test_every_linear_layer_but_the_last_has_an_adapter(change: dict):
    plain = {name for name, module in build_transformer(**change).named_modules() if isinstance(module, nn.Linear)}
    network = build_transformer(**change)
    prepare_policy(network, gradient_checkpointing=False, lora=lora_config(2, 4, ["all-linear"]))
    assert {name for name, module in network.named_modules() if isinstance(module, LoraLayer)} == plain - {"proj_out"}


def test_a_run_trains_and_resumes_with_it(make_training):
    settings = {"use_lora": True, "lora_target_modules": "all-linear", "max_steps": 2, "save_interval": 1}
    training = make_training(**settings)
    before = weights_of(training)
    training.train()
    changed = [name for name, value in weights_of(training).items() if not value.equal(before[name])]
    assert all(any(one in name for name in changed) for one in ("norm1.linear", "context_embedder.proj_in"))
    again = make_training(**settings, resume_from_checkpoint=training.folder.checkpoints / "step_1")
    again.train()
    assert all(value.equal(weights_of(training)[name]) for name, value in weights_of(again).items())
    assert len(collect_round(again)) == 4
