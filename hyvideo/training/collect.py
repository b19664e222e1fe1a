"""Collect one round: sample the videos of every prompt with the policy, and score them."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hyvideo.algorithms.algorithm import Algorithm, Trajectory
from hyvideo.algorithms.policy import Policy
from hyvideo.distributed.collectives import gather, gather_rows
from hyvideo.distributed.mesh import Mesh
from hyvideo.grpo.advantages import parts_of_advantage
from hyvideo.models.reward_models.rewards import Scores, WeightedReward
from hyvideo.pipelines.conditioning import Conditioning
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Rollout, decoded_together
from hyvideo.training.diversity import group_diversity, thumbnails
from hyvideo.training.rounds import Round
from hyvideo.training.scoring_over_ranks import score_over_ranks


def collect(policy: Policy, algorithm: Algorithm, reward: WeightedReward, round: Round) -> Trajectory:
    """Sample and score this rank's videos of one round; every rank learns the scores of all.

    The algorithm says which steps draw noise and what must be recorded. The timer's phases are `rollout` and `reward`;
    with `reward_async` the latter is only the remaining wait.

    Raises:
        RewardFailureError: too many videos could not be scored.
    """
    mesh, timer, count = round.mesh, algorithm.timer, len(round.prompts)
    own = mesh.layout.share_to_score(count, mesh.rank)
    at_once = reward.asynchronous  # otherwise the ranks of a video decode a part each, when all are sampled
    scoring = reward.begin() if at_once and own else None
    unique = list(dict.fromkeys(round.prompt_indices))
    rows = tuple(unique.index(prompt) for prompt in round.prompt_indices)
    texts = tuple(prompt.text for prompt in round.prompts)
    with timer("rollout"), algorithm.sampling():
        conditioning = policy.encode([round.prompts[rows.index(row)] for row in range(len(unique))])
        noisy = algorithm.noisy_steps(round.index, round.num_videos)
        parts, size = [], policy.videos_at_once or count
        for start in range(0, count, size):
            block = range(start, min(start + size, count))
            conditions = conditioning.rows([rows[i] for i in block])
            parts.append(_sample(policy, algorithm, conditions, round, block, noisy, decode=at_once))
            inside = [i for i in block if i in own]
            if scoring and inside:
                scoring.add(parts[-1].videos[[i - start for i in inside]], [texts[i] for i in inside])
        rollout = Rollout.join(parts)
        del parts  # gigabytes that the reward's model may need
        if not at_once:
            rollout = replace(rollout, videos=_decode_over_ranks(policy, rollout.latents[:, -1], size, mesh))
    with timer("reward"):
        scores = score_over_ranks(reward, rollout.videos, texts, round.positions, mesh, scoring)
    metrics = _scores_metrics(scores) | _diversity_metrics(rollout.videos, round)
    if len(scores.weights) > 1:
        normalized = algorithm.config.reward.reward_aggregation != "sum"
        mixing = parts_of_advantage(scores.weighted(), scores.weights, round.num_generations, normalized=normalized)
        metrics |= {
            f"mixing/{statistic}_{name}": value
            for name, part in mixing.items()
            for statistic, value in vars(part).items()
        }
    return Trajectory(round.index, texts, round.positions, conditioning, rows, rollout, scores, metrics)


def _decode_over_ranks(policy: Policy, latents: Tensor, size: int, mesh: Mesh) -> Tensor:
    """Decode latents `[B, C, F', H', W']` once among the ranks that share the videos; all of them get all videos.

    Videos are decoded together as one rank alone would, `size` having been sampled together: then no pixel differs.
    """
    together = min(size, decoded_together(latents.shape))
    parts = [part for block in latents.split(size) for part in block.split(together)]
    of_ranks = [mesh.layout.share_to_score(len(parts), rank) for rank in range(mesh.sp_size)]
    own = [policy.pipeline.decode(parts[i]) for i in of_ranks[mesh.sp_rank]]
    videos = torch.cat(own) if own else torch.empty(0, policy.num_frames, *policy.size, 3, dtype=torch.uint8)
    return gather_rows(videos, [sum(len(parts[i]) for i in share) for share in of_ranks], mesh.video_group)


def _sample(
    policy: Policy,
    algorithm: Algorithm,
    conditioning: Conditioning,
    round: Round,
    block: Sequence[int],
    noisy: Tensor | None,
    *,
    decode: bool,
) -> Rollout:
    """Sample some of a round's videos as its algorithm needs them; `noisy` is of the videos of all ranks."""
    noise = round.noise.rows(block)
    if algorithm.needs == "final_latents":
        return policy.final_latents(conditioning, noise, decode=decode)
    return policy.rollout(
        conditioning, noise, None if noisy is None else noisy[round.positions[list(block)]], decode=decode
    )


def gain_over(
    policy: Policy,
    algorithm: Algorithm,
    reward: WeightedReward,
    round: Round,
    trajectory: Trajectory,
    *,
    without_noise: bool = False,
) -> float:
    """Sample and score a round's videos again, by the weights as they are now; return how much more they scored before.

    They start from the same noise, and every rank returns the same. With `without_noise` the ODE samples them, whatever
    the algorithm does: what training optimizes are the noisy videos, what people see are those without noise.
    """
    noisy, videos = algorithm.noisy_steps(round.index, round.num_videos), []
    for block in torch.arange(len(trajectory)).split(policy.videos_at_once or len(trajectory)):
        conditions, block = trajectory.conditioning_of(block), block.tolist()
        if without_noise:
            videos.append(policy.final_latents(conditions, round.noise.rows(block)).videos)
        else:
            videos.append(_sample(policy, algorithm, conditions, round, block, noisy, decode=True).videos)
    scores = score_over_ranks(reward, torch.cat(videos), trajectory.prompts, trajectory.positions, round.mesh)
    return float((trajectory.scores.total - scores.total).nanmean())


def _scores_metrics(scores: Scores) -> dict[str, float]:
    """Mean and spread of the round's scores; failed ones are left out and counted."""
    valid = scores.total[~scores.total.isnan()]
    return {
        "reward/mean": float(valid.mean()),
        "reward/std": float(valid.std(correction=0)) if len(valid) else math.nan,
        "reward/failed": float(scores.failed().sum()),
        **{f"reward/{name}": float(values.nanmean()) for name, values in scores.metrics.items()},
    }


def _diversity_metrics(videos: Tensor, round: Round) -> dict[str, float]:
    """How far the videos of a prompt are from each other, over the prompts of the round."""
    of_ranks = gather((thumbnails(videos), round.positions))[:: round.mesh.sp_size]
    points, positions = (torch.cat(parts) for parts in zip(*of_ranks, strict=True))
    diversity = group_diversity(points[positions.argsort()], round.num_generations)
    return {
        "rollout/diversity": float(diversity.mean()),
        "rollout/least_diversity": float(diversity.min()),
    }
