"""The forecast: what it measures in closed form, and that a training is afterwards what it was."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from hyvideo.algorithms.optimizer import NonFiniteUpdateError
from hyvideo.config.loading import load_config
from hyvideo.data.prompts import Prompt
from scripts.forecast import measure
from scripts.forecast.measure import Agreement, GradientCollector, measure_gradients, outlook_of, walk
from tests.support.equal_runs import assert_same
from tests.support.training import ALGORITHMS, PROMPTS, collect_round, weights_of


def test_a_small_signal_is_gained_whole_and_a_large_one_up_to_what_there_is():
    def gain(signal: float, spoilt: float, most: float) -> float:
        return measure.expected_gain(signal, lambda square: spoilt * square, most)

    assert gain(1e-3, 0.0, 2.0) == pytest.approx(1e-3, rel=1e-3) and gain(1e3, 0.0, 2.0) == pytest.approx(2.0)
    walked = 3**0.5 * math.tanh(3**0.5 / 2 + math.atanh(3**-0.5)) - 1  # solves x' = 1 - x (1 + x / 2)
    assert gain(2.0, 1.0, 2.0) == pytest.approx(2.0 * (1 - math.exp(-1)) - walked, abs=2e-3)
    assert gain(0.0, 1.0, 2.0) == pytest.approx(-1.0) and gain(-0.5, 1.0, 2.0) == pytest.approx(-1.5)
    assert gain(0.5, 0.1, 0.0) == pytest.approx(0, abs=1e-9)


def test_signal_equals_noise_at_the_videos_where_it_does():
    """Gradients of rounds of 64 videos: a common part of square length 1, and noise of variance 640 per video."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(4000, generator=generator) / 4000**0.5
    noise = torch.randn(2, 200, 4000, generator=generator) * (640 / 64 / 4000) ** 0.5
    found = [Agreement.of(g @ g.T, 64) for g in (common + noise).transpose(0, 1).sign()]
    assert float(np.mean([one.correlation for one in found])) == pytest.approx(1 / 11, abs=0.007)
    product = 2 / math.pi * math.asin(1 / 11)
    assert Agreement.of(torch.tensor([[1.0, product], [product, 1.0]]), 64).videos == pytest.approx(640, rel=1e-4)
    assert math.isinf(Agreement.of(torch.tensor([[1.0, -0.1], [-0.1, 1.0]]), 64).videos)


def test_groups_say_what_is_left_to_be_found():
    groups = measure.find_groups([torch.tensor([1.0, 3.0, 5.0, 5.0]), torch.tensor([0.0, 4.0, 2.0, math.nan])], 2)
    assert groups.spread == pytest.approx((2**0.5 + 0 + 8**0.5) / 3)
    assert groups.best == pytest.approx((1 + 0 + 2) / 3)
    assert groups.dead == pytest.approx(2 / 4)  # a group with one score teaches nothing either
    valid = np.array([1, 3, 5, 5, 0, 4, 2.0])
    assert groups.share == pytest.approx(((1 + 0 + 4) / 3) / valid.var())


def test_the_walk_is_that_of_the_runs_learning_rates():
    config = load_config(["--config", "configs/tiny.yaml", "--max_steps", "4", "--lr_warmup_steps", "2"])
    assert walk(config, 1e-4) == pytest.approx((3.5e-4, 1e-4 * (0.25 + 3) ** 0.5))
    assert walk(config, 1e-4, first=2) == pytest.approx((2e-4, 1e-4 * 2**0.5))
    assert walk(config, 1e-4, first=2, scale=0.3) == pytest.approx((0.6e-4, 0.3e-4 * 2**0.5))  # after a rollback


def test_an_outlook_follows_from_steps_up_and_down():
    config = load_config(["--config", "configs/tiny.yaml", "--max_steps", "4", "--lr_warmup_steps", "0"])
    base, taught, spoilt = np.linspace(-1, 1, 40), 0.2, 1.0
    steps = ((taught, spoilt), (0.04, 0.02))
    long, short = (np.stack([base + up - down, base - up - down])[None] for up, down in steps)
    found = outlook_of(config, 1e-4, base, {1e-4: long, 1e-5: short}, most=2.0, first=0, rounds_per_half=4)
    assert (found.taught.mean, found.spoilt.mean) == pytest.approx((taught, spoilt))
    slope = 0.4  # of the short step, over the length of the long one
    signal = slope * 2 * math.sqrt(math.pi / 2) / math.sqrt(2 * 4)  # 4 rates over a walk of 2; half of 1 round, not 4
    n = signal / 2.0

    def lost(square: float) -> float:
        return np.interp(square, [0, 0.01, 1], [0, 0.02, spoilt])

    def grow(time: float, square: np.ndarray) -> np.ndarray:
        return 1 - n * square * (1 + lost(square) / 2.0)

    walked = solve_ivp(grow, (0, 1), [0.0], rtol=1e-8).y[0, -1]
    assert found.gain.mean == pytest.approx(2.0 * (1 - math.exp(-n)) - lost(walked), abs=1e-3)
    assert found.gain.low == pytest.approx(found.gain.mean)
    short[0, 0, 0] = math.nan
    assert outlook_of(config, 1e-4, base, {1e-4: long, 1e-5: short}, 2.0, 0, 4).gain.num == 39


def test_a_failed_score_costs_only_the_differences_that_need_it():
    config = load_config(["--config", "configs/tiny.yaml", "--max_steps", "4"])
    base, rng = np.linspace(-1, 1, 64), np.random.default_rng(0)
    moves = ((1e-5, 0.1, 0.0), (1e-4, 0.4, 0.2))
    steps = {rate: np.array([[[up], [-up]]] * 2) + base - down for rate, up, down in moves}
    whole = [outlook_of(config, rate, base, steps, 2.0, 0, 1) for rate in steps]
    tried = {rate: np.where(rng.random(rewards.shape) < 0.5, math.nan, rewards) for rate, rewards in steps.items()}
    assert not np.isfinite([*tried[1e-5], *tried[1e-4]]).all((0, 1)).any(), "no video has all its scores"
    for rate, full in zip(steps, whole, strict=True):
        found = outlook_of(config, rate, base, tried, 2.0, 0, 1)
        for part in ("taught", "spoilt", "gain"):
            seen, expected = getattr(found, part), getattr(full, part)
            assert (seen.mean, seen.low) == pytest.approx((expected.mean, expected.low), abs=1e-9)
            assert 5 < seen.num < 32 and expected.num == 64
    nothing = np.full_like(base, math.nan)
    broken = {**steps, 1e-4: steps[1e-4] + nothing}
    assert outlook_of(config, 1e-5, base, broken, 2.0, 0, 1).gain == whole[0].gain
    for rate, *given in ((1e-4, base, broken), (1e-5, nothing, steps)):
        gain = outlook_of(config, rate, *given, 2.0, 0, 1).gain
        assert math.isnan(gain.mean) and math.isnan(gain.low) and gain.num == 0


def test_the_interval_of_an_outlook_is_as_wide_as_its_halves_lie_apart():
    config = load_config(["--config", "configs/tiny.yaml", "--max_steps", "4"])
    base, taught = np.linspace(-1, 1, 40), np.array([0.1, 0.3])[:, None]
    found = outlook_of(config, 1e-4, base, {1e-4: np.stack([base + taught, base - taught], axis=1)}, 2.0, 0, 1)
    assert [found.taught.low, found.taught.mean, found.taught.high] == pytest.approx([0.1, 0.2, 0.3])
    assert found.gain.low < 0.6 * found.gain.mean and found.spoilt.high == pytest.approx(0)


@pytest.mark.parametrize("method", ALGORITHMS)
def test_gradients_are_those_of_a_halfs_updates_and_none_is_followed(make_training, method: str):
    training = make_training(**ALGORITHMS[method], updates_per_rollout=2)
    algorithm, before = training.algorithm, weights_of(training)
    rounds, config = [collect_round(training) for _ in range(2)], training.config
    gradients, agreement = measure_gradients(algorithm, rounds * 2, config)
    own = algorithm.optimization
    algorithm.optimization = collector = GradientCollector(own, config)
    for _ in algorithm.updates(rounds[1]):
        pass
    algorithm.optimization = own
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradient, 2 * collector.collected[name], rtol=1e-4, atol=1e-6)
    assert agreement == Agreement.of(measure.sign_products(gradients), 2 * 4)
    assert_same(weights_of(training), before)
    assert own.updates == 0 and all(weight.grad is None for weight in own.parameters.values())


@pytest.mark.parametrize("method", ALGORITHMS)
def test_a_gradient_that_is_not_finite_is_refused(make_training, method: str):
    training = make_training(**ALGORITHMS[method])
    own, trajectory = training.algorithm.optimization, collect_round(training)
    trajectory.rollout.latents[0].fill_(math.nan)
    with pytest.raises(NonFiniteUpdateError, match="gradient of a forecast's round must be finite; received loss nan"):
        measure_gradients(training.algorithm, [trajectory] * 2, training.config)
    assert training.algorithm.optimization is own and all(weight.grad is None for weight in own.parameters.values())


def test_each_round_of_a_resumed_run_is_measured_with_the_weights_that_its_algorithm_keeps(make_training):
    training = make_training(**ALGORITHMS["nft"])
    list(training.algorithm.updates(collect_round(training)))  # after it the old policy differs from the policy
    trajectory = collect_round(training)
    (first, second), _ = measure_gradients(training.algorithm, [trajectory] * 2, training.config)
    assert_same(first, second)


def test_trial_steps_go_down_the_loss_first_and_then_up(make_training, monkeypatch):
    """Where the weights are, whenever held-out videos are sampled."""
    training, again = (make_training(validation_interval=2, lr_warmup_steps=0, use_muon=False) for _ in range(2))
    seen, sample = [], type(training.validation).sample

    def look(validation: object, prompts: list[Prompt]) -> object:
        seen.append(weights_of(training))
        return sample(validation, prompts)

    monkeypatch.setattr(type(training.validation), "sample", look)
    prompts = [Prompt(text, number, None, None) for number, text in enumerate(PROMPTS)]
    measure.forecast(training, prompts, num_rounds=4, rates=[1e-3])
    rounds = [collect_round(again) for _ in range(4)]
    gradients, _ = measure_gradients(again.algorithm, rounds, again.config)
    base, length = seen[0], walk(again.config, 1e-3)[1]
    assert length == pytest.approx(1e-3 * 3**0.5)
    for number, sign in enumerate((-1, 1, -1, 1)):
        for name, gradient in gradients[number // 2].items():
            moved, large = seen[1 + number][name] - base[name], gradient.abs() > 1e-5  # of which 1e-8 is little
            torch.testing.assert_close(moved[large], (sign * length * gradient.sign())[large], rtol=2e-3, atol=1e-6)


def test_a_forecast_leaves_the_policy_as_it_was(make_training):
    training = make_training(validation_interval=2)
    before, said = weights_of(training), []
    prompts = [Prompt(text, number, None, None) for number, text in enumerate(PROMPTS)]
    found = measure.forecast(training, prompts, rates=[1e-3, 2e-4], say=said.append)
    assert_same(weights_of(training), before)
    assert [outlook.rate for outlook in found.outlooks] == [1e-3, 2e-4] and said[-1] == "held-out videos, 9 of 9"
    base, *tried = (np.array(found.held_out[name]) for name in ("base", "0.001", "0.0002"))
    assert tried[0].shape == (2, 2, 4) and (tried[0] != base).any()
    assert found.noise is not None and found.ode_gap != 0
    shown = dict(zip([1e-3, 2e-4], tried, strict=True))
    for outlook in found.outlooks:
        assert outlook == outlook_of(training.config, outlook.rate, base, shown, found.groups.best, 0, 6 / 2)
