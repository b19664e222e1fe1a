"""DiffusionNFT against its formulas (arXiv 2509.16117), written again here one pair at a time."""

import math

import pytest
import torch

from hyvideo.algorithms.algorithm import Trajectory
from hyvideo.algorithms.nft import NFT, NFTOptions, nft_losses, optimality
from hyvideo.config.loading import load_config
from hyvideo.data.randomness import generator_for
from hyvideo.models.parallelize import trainable_parameters
from hyvideo.training.run import Run
from tests.support.training import GradientRecorder, collect_round, weights_of

SHIFT, STEPS = 3.0, 4
CLIP = 2.0
TWO_UPDATES = {"algorithm": "nft", "updates_per_rollout": 2, "adv_clip_max": CLIP, "mini_batch_size_per_update": 3}


def test_at_the_old_policy_the_gradient_is_the_advantage_times_that_of_flow_matching_whatever_beta_and_clip():
    """Theorem 3.2's direction, with the release's factor ``clip / beta``."""
    drawn = torch.Generator().manual_seed(1)
    old, clean, noise = (torch.randn(6, 8, generator=drawn, dtype=torch.float64) for _ in range(3))
    sigma = torch.full((6, 1), 0.7, dtype=torch.float64)
    noised = (1 - sigma) * clean + sigma * noise
    advantages = torch.tensor([-1.9, -0.5, 0.0, 0.1, 1.0, 1.9], dtype=torch.float64)
    gradients = []
    for beta, clip in ((0.1, 2.0), (1.0, 5.0)):
        v = old.clone().requires_grad_()
        good, bad = nft_losses(v, old, noised, clean, sigma, beta=beta, adaptive=False)
        r = optimality(advantages, clip)
        gradients += torch.autograd.grad(clip / beta * (r * good + (1 - r) * bad).sum(), v)
    v = old.clone().requires_grad_()
    expected = torch.autograd.grad((advantages * (v - (noise - clean)).square().mean(1)).sum(), v)[0]
    for gradient in gradients:
        torch.testing.assert_close(gradient, expected)


def reference(policy: Run, old: Run, base: Run | None, trajectory: Trajectory, pairs: list[tuple[int, int]]):
    """The loss of an update, its videos noised and compared one at a time, with three separate models."""
    nft, seed = policy.algorithm.options, policy.config.run.seed
    rewards = trajectory.scores.total.view(2, 2)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, correction=0, keepdim=True)).flatten()
    columns = []
    for row, index in pairs:
        linear = 1 - index / STEPS
        sigma = SHIFT * linear / (1 + (SHIFT - 1) * linear)
        clean = trajectory.rollout.latents[row, -1]
        noise = torch.randn(clean.shape, generator=generator_for(seed, "nft", trajectory.round, row, 0, index))
        noised, target = (1 - sigma) * clean + sigma * noise, noise - clean
        asked = (noised[None], index, trajectory.conditioning_of(torch.tensor([row])))
        v = policy.policy.velocity(*asked)[0]
        with torch.no_grad():
            v_old = old.policy.velocity(*asked)[0]
            v_base = base.policy.velocity(*asked)[0] if base else v.detach()
        errors = []
        for implicit in ((1 - nft.beta) * v_old + nft.beta * v, (1 + nft.beta) * v_old - nft.beta * v):
            error = (implicit - target).square()
            if nft.adaptive_weighting:
                error = sigma**2 * error / (sigma * (implicit - target)).abs().mean().detach()
            errors.append(error.mean())
        r = 0.5 + 0.5 * max(-1.0, min(1.0, float(advantages[row]) / CLIP))
        distance = (v - v_base).square().mean()
        loss = CLIP / nft.beta * (r * errors[0] + (1 - r) * errors[1])
        columns.append((loss, errors[0], errors[1], (v - v_old).square().mean(), distance))
    loss, good, bad, moved, distance = (torch.stack(column).mean() for column in zip(*columns, strict=True))
    total = loss + nft.kl_weight * distance
    said = {"loss/policy": loss, "loss/total": total, "nft/good_error": good, "nft/bad_error": bad}
    said |= {"nft/old_distance": moved} | ({"nft/base_distance": distance} if base else {})
    return total, {name: value.item() for name, value in said.items()}


KL = ["kl_weight=5.0"]


@pytest.mark.parametrize(
    ("options", "settings"),
    [([], {}), (["beta=0.3", "adaptive_weighting=false"], {}), (KL, {}), (KL, {"use_lora": True, "cfg_scale": 3.0})],
    ids=["default", "plain errors", "KL to the base", "adapter, guidance, KL"],
)
def test_a_second_update_follows_the_gradient_of_the_formula(make_training, options, settings):
    """Base, old policy and policy have different weights: the old one is of a round with a decay of one half."""
    options = {"algorithm_options": ["old_ramp=1.0", *options]}
    settings = TWO_UPDATES | {"max_grad_norm": 0.1} | options | settings
    training, old, base = (make_training(**settings) for _ in range(3))
    list(training.algorithm.updates(collect_round(training)))
    for name, weight in trainable_parameters(old.policy.transformer).items():
        weight.data.copy_(training.algorithm.anchor.state_dict()[name])
    trajectory = collect_round(training)
    algorithm, every = training.algorithm, torch.ones(training.config.rollout.grpo_sampling_steps, dtype=torch.bool)
    dealt = algorithm.deal(algorithm.choose_steps(trajectory, every))[1]
    pairs = list(zip(*(index.tolist() for index in dealt), strict=True))
    updates = training.algorithm.updates(trajectory)
    next(updates)
    parameters = training.algorithm.optimization.parameters.values()
    total, said = reference(training, old, base if training.algorithm.options.kl_weight else None, trajectory, pairs)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(total, parameters, materialize_grads=True)])
    recorder = GradientRecorder(training)
    metrics = next(updates)
    assert (recorder.gradient - expected * (0.1 / expected.norm())).norm() < 1e-3 * 0.1
    said["grad_norm"] = expected.norm().item()
    assert {name: metrics[name] for name in said} == pytest.approx(said, rel=1e-3, abs=1e-5)
    assert said["nft/old_distance"] > 0 and expected.norm() > 0.1


def test_the_old_policy_samples_and_follows_with_the_published_ramp(make_training):
    training = make_training(algorithm="nft", algorithm_options=["old_ramp=0.25", "old_decay=0.4"])
    old, decays, sampled_with = weights_of(training), [], []
    training.policy.transformer.register_forward_pre_hook(lambda *_: sampled_with.append(weights_of(training)))
    for _ in range(3):
        sampled_with.clear()
        trajectory = collect_round(training)
        assert sampled_with and all(torch.equal(w[name], old[name]) for w in sampled_with for name in old)
        (metrics,) = training.algorithm.updates(trajectory)
        decays.append(metrics["nft/old_decay"])
        policy = weights_of(training)
        expected = {name: decays[-1] * old[name] + (1 - decays[-1]) * policy[name] for name in old}
        torch.testing.assert_close(training.algorithm.anchor.state_dict(), expected)
        old = {name: weight.clone() for name, weight in training.algorithm.anchor.state_dict().items()}
    assert decays == [0.25, 0.4, 0.4]
    assert (NFTOptions.old_ramp, NFTOptions.old_decay) == (0.001, 0.5)  # the release's, where nothing else is said


def test_a_video_without_a_score_has_no_influence(make_training):
    gradients = []
    for latents in (0.0, 1.0):
        training = make_training(algorithm="nft", num_generations=4)
        trajectory, recorder = collect_round(training), GradientRecorder(training)
        trajectory.scores.total[1] = math.nan
        trajectory.rollout.latents[1] += latents
        list(training.algorithm.updates(trajectory))
        gradients.append(recorder.gradient)
    assert torch.equal(*gradients)


def test_options_that_do_not_exist_or_cannot_be_are_refused():
    for option, message in (
        ("betta=1", "betta: .*nft has beta, adaptive_weighting, old_ramp, old_decay, kl_weight"),
        ("beta=much", "algorithm_options: beta: .*valid number.*received much"),
        ("beta=0", "beta: .*greater than 0, received 0"),
        ("old_decay=1.5", "old_decay: .*less than or equal to 1, received 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            NFT.evaluations(load_config(["--algorithm", "nft", "--algorithm_options", option]))
