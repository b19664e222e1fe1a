"""The average of the trained weights: the closed form, apart from the training, and where it can be taken."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from generate import parse_arguments
from hyvideo.checkpoint.trained_policy import load_trained_policy
from hyvideo.evaluation.generate import request_of
from hyvideo.models.loading import load_transformer
from hyvideo.training.run import Run
from scripts.evaluate import main as evaluate
from scripts.export import main as export
from tests.support.equal_runs import rows_of
from tests.support.training import weights_of


def train(make_training: Callable[..., Run], **settings: Any) -> tuple[Run, list[dict[str, Tensor]]]:
    """Train; return the training, and the weights that it began with and those after each update."""
    training = make_training(**settings)
    weights = [weights_of(training)]
    log = training.log

    def keep(*args: Any) -> None:
        weights.append(weights_of(training))
        log(*args)

    training.log = keep
    training.train()
    return training, weights


@pytest.mark.parametrize("settings", [{}, {"ema_offload": True, "use_lora": True}], ids=["full", "adapter, offloaded"])
def test_it_is_the_average_with_its_ramp_and_the_training_does_not_see_it(make_training, settings):
    training, (average, *updates) = train(make_training, ema_decay=0.26, **settings)
    for decay, weights in zip((2 / 11, 3 / 12, 0.26), updates, strict=True):
        average = {name: decay * average[name] + (1 - decay) * weights[name] for name in average}
    torch.testing.assert_close(training.state.optimization.ema.state_dict(), average)
    plain, (_, *others) = train(make_training, **settings)
    assert rows_of(plain.folder.path) == rows_of(training.folder.path)
    assert all(torch.equal(others[-1][name], weights[name]) for name in weights)


def test_a_skipped_update_leaves_it(make_training):
    training = make_training(ema_decay=0.5, max_skipped_updates=3)
    optimization = training.state.optimization
    before = {name: weight.clone() for name, weight in optimization.ema.state_dict().items()}
    for parameter in optimization.parameters.values():
        parameter.data += 1
        parameter.grad = torch.zeros_like(parameter)
    assert optimization.step(float("nan")).skipped
    assert all(torch.equal(weight, before[name]) for name, weight in optimization.ema.state_dict().items())
    optimization.step(0.0)
    assert not all(torch.equal(weight, before[name]) for name, weight in optimization.ema.state_dict().items())


@pytest.mark.parametrize("use_lora", [False, True], ids=["full", "adapter"])
def test_a_checkpoint_gives_policy_or_average_and_validation_samples_with_the_average(
    make_training, tiny_root, use_lora
):
    settings = {"ema_decay": 0.5, "use_lora": use_lora, "max_steps": 2, "save_interval": 2, "validation_interval": 2}
    training = make_training(**settings)
    training.train()
    optimization = training.state.optimization
    state = {False: weights_of(training), True: dict(optimization.ema.state_dict())}
    checkpoint = training.folder.checkpoints / "step_2"
    for ema, expected in state.items():
        transformer = load_transformer(tiny_root, dtype=torch.float32)
        load_trained_policy(transformer, checkpoint, ema=ema)
        loaded = dict(transformer.named_parameters())
        assert all(torch.equal(loaded[name], weight) for name, weight in expected.items())
    assert any(not torch.equal(state[True][name], state[False][name]) for name in state[True])
    validated = rows_of(training.folder.path)[-1]["valid/reward"]
    with optimization.ema.in_place_of_policy():
        sampled = training.validation.sample(training.validation.prompts)
    assert validated == float(sampled.scores.total.nanmean())


def test_a_checkpoint_without_an_average_is_refused_before_a_model_is_read(
    make_training, tiny_root, prompts_csv, tmp_path, capsys
):
    training = make_training(max_steps=1)
    training.train()
    checkpoint = str(training.folder.checkpoints / "step_1")
    model = ["--model_path", str(tiny_root), "--ema", "--output_path", str(tmp_path / "made.mp4")]
    with pytest.raises(ValueError, match="step_1' has no average of the weights: only runs with ema_decay"):
        request_of(parse_arguments([*model, "--prompt", "a red circle", "--checkpoint_path", checkpoint]))
    with pytest.raises(ValueError, match="--ema takes the average in a checkpoint: give --checkpoint_path"):
        request_of(parse_arguments([*model, "--prompt", "a red circle"]))
    assert export([*model, "--format", "diffusers", "--checkpoint_path", checkpoint]) == 2
    told = ["--prompts_csv", str(prompts_csv), "--output_dir", str(tmp_path / "evaluated"), "--ema", "trained"]
    assert evaluate([*told, "--model", "trained", str(tiny_root), checkpoint]) == 2
    assert evaluate([*told, "--model", "base", str(tiny_root)]) == 2
    error = capsys.readouterr().err
    assert error.count("has no average of the weights") == 2 and "--ema trained: there is no --model of that" in error
