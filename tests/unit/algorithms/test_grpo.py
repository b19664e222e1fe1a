"""One update against the paper's formulas, written again here with torch alone, one (sample, step) pair at a time."""

import math
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from hyvideo.algorithms.algorithm import Trajectory
from hyvideo.algorithms.grpo import StepGradients
from hyvideo.grpo.clipped_loss import clipped_policy_loss
from hyvideo.grpo.timesteps import Pairs
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
from hyvideo.training.run import Run
from tests.support.training import REPOSITORY, GradientRecorder, collect_round, pairs_of, update

SHIFT, STEPS, ETA, CLAMP = 3.0, 4, 0.5, 3e-3
CLIP, CLIP_HIGH = 0.02, 0.03
COEFFICIENT = 3.0
"""Large, so that the trust region weighs as much as the reward."""


class Step(NamedTuple):
    """One SAGE step, paper Eq. 5-7: `x_next ~ N(x - delta v + variance / 2 * score, variance)`."""

    sigma: float
    delta: float
    variance: float

    @property
    def gradient_norm(self) -> float:
        """Of the log-probability by the velocity, paper Eq. 8."""
        return (self.delta + self.variance * (1 - self.sigma) / (2 * self.sigma)) / math.sqrt(self.variance)

    def law(self, training: Run, trajectory: Trajectory, rows: list[int], step: int) -> Normal:
        """The law of these videos' next latents under the weights as they are."""
        x, conditioning = trajectory.rollout.latents[rows, step], trajectory.conditioning_of(torch.tensor(rows))
        v = training.policy.velocity(x, step, conditioning)
        score = -(x + (1 - self.sigma) * v) / self.sigma
        return Normal(x - self.delta * v + self.variance / 2 * score, math.sqrt(self.variance))


def sage_steps() -> list[Step]:
    sigmas = [SHIFT * s / (1 + (SHIFT - 1) * s) for s in (1 - k / STEPS for k in range(STEPS + 1))]
    steps = []
    for sigma, following in pairwise(sigmas):
        clamped = min(sigma, 1 - CLAMP)
        variance = ETA**2 * (math.log((1 - following) / (1 - clamped)) - (clamped - following))
        steps.append(Step(sigma, sigma - following, variance))
    return steps


def reference(training: Run, anchor: Run, trajectory: Trajectory, pairs: Pairs, moving: float, step_wise: float):
    """The loss of an update whose trust region gives its two terms these weights, and the metrics of the update."""
    steps = sage_steps()
    median = sorted(step.gradient_norm for step in steps)[(STEPS - 1) // 2]
    groups = trajectory.scores.total.view(2, 2)
    advantages = ((groups - groups.mean(1, keepdim=True)) / groups.std(1, correction=0, keepdim=True)).flatten()
    columns = []
    for row, index in zip(*(part.tolist() for part in pairs), strict=True):
        step, advantage = steps[index], advantages[row]
        law = step.law(training, trajectory, [row], index)
        with torch.no_grad():
            anchored = step.law(anchor, trajectory, [row], index)
        log_prob = law.log_prob(trajectory.rollout.latents[row, index + 1]).mean()
        ratio = (log_prob - trajectory.rollout.log_probs[row, index]).exp()
        gain, bounded = advantage * ratio, advantage * ratio.clamp(1 - CLIP, 1 + CLIP_HIGH)
        policy = -median / step.gradient_norm * torch.minimum(gain, bounded)
        position = kl_divergence(law, anchored).mean() if moving else torch.zeros(())
        error = ((law.mean - trajectory.rollout.means[row, index]).abs() / law.stddev).max()
        columns.append((policy, position, -ratio.log(), (gain > bounded).float(), (ratio - 1).abs(), error))
    policy, position, velocity, clipped, deviation, error = map(torch.stack, zip(*columns, strict=True))
    loss = policy.mean() + COEFFICIENT * (moving * position.mean() + step_wise * velocity.mean())
    said = {"loss/policy": policy.mean(), "loss/total": loss, "kl/position": position.mean()}
    said |= {"kl/velocity": velocity.mean(), "clip_fraction": clipped.mean()}
    said |= {"ratio/max_deviation": deviation.max(), "replay/mean_error": error.max()}
    return loss, {name: value.item() for name, value in said.items()}


@pytest.mark.parametrize(
    ("kl", "weights"), [("fixed", (1.0, 0.0)), ("moving", (1.0, 0.0)), ("step", (0.0, 0.3)), ("dual", (0.7, 0.3))]
)
def test_an_update_follows_the_gradient_of_the_papers_loss(make_training, kl, weights):
    """Anchor, rollout and policy have different weights, as in the second update of a round."""
    config = [REPOSITORY / "configs" / "tiny.yaml", REPOSITORY / "configs" / "kl" / f"{kl}.yaml"]
    settings = {"clip_range": CLIP, "clip_range_high": CLIP_HIGH, "mini_batch_size_per_update": 3, "max_grad_norm": 0.1}
    settings |= {"learning_rate": 4e-3}
    settings |= {"config": config, "dual_kl_moving_weight": weights[0], "dual_kl_step_weight": 0.3}
    training, anchor = (make_training(**settings) for _ in range(2))
    algorithm = training.algorithm
    first = collect_round(training)
    update(training, first, pairs_of(training, first)[0], first.rollout.means)
    trajectory = collect_round(training)
    updates = pairs_of(training, trajectory, num_updates=2)
    means = algorithm._anchor_means(trajectory, updates)
    update(training, trajectory, updates[0], means)

    loss, said = reference(training, anchor, trajectory, updates[1], *weights)
    parameters = algorithm.optimization.parameters.values()
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
    expected = torch.cat([gradient.flatten() for gradient in gradients])
    recorder = GradientRecorder(training)
    metrics = update(training, trajectory, updates[1], means, COEFFICIENT)
    assert (recorder.gradient - expected * (0.1 / expected.norm())).norm() < 1e-3 * 0.1
    said["grad_norm"] = expected.norm().item()
    assert {name: metrics[name] for name in said} == pytest.approx(said, rel=1e-3, abs=1e-4)
    every_term = abs(said["loss/total"] - said["loss/policy"])
    assert 0 < said["clip_fraction"] < 1 and every_term > 1e-4 and expected.norm() > 0.2


def test_velocity_gradients_are_those_of_each_pair_alone_and_leave_the_graph_whole():
    scheduler, generator = FlowMatchDiscreteScheduler(shift=5.0), torch.Generator().manual_seed(0)
    scheduler.set_timesteps(4)
    weights = scheduler.step_weights(sde_type="sage_grpo", eta=0.5)
    norms = scheduler.gradient_norms(sde_type="sage_grpo", eta=0.5)
    sample, velocity, noise = (torch.randn(3, 2, 50, generator=generator) for _ in range(3))
    index, advantages, scales = torch.tensor([0, 1, 3]), torch.tensor([0.5, -2.0, 0.0]), torch.tensor([1.0, 0.3, 7.0])
    velocity.requires_grad_()
    mean, std = scheduler.transition(velocity, sample, index, sde_type="sage_grpo", eta=0.5)
    log_probs = scheduler.log_prob(scheduler.sample_next(mean, std, noise), mean, std, sde_type="sage_grpo")
    loss, _ = clipped_policy_loss(log_probs, log_probs.detach(), advantages, 1e-4, scales)
    found = StepGradients(weights.velocity).norms(loss, mean, index)
    rms = noise.square().mean(dim=(1, 2)).sqrt()
    torch.testing.assert_close(found, scales * advantages.abs() * norms[index] * rms, rtol=1e-4, atol=1e-6)
    loss.backward()
    per_pair = velocity.grad.flatten(1).norm(dim=1) * 3 * 100**0.5
    torch.testing.assert_close(found, per_pair, rtol=1e-4, atol=1e-6)
