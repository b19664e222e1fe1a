"""Collect one round: sample every prompt's group, score it, compare within the group."""

from collections.abc import Callable, Sequence

import torch

from hyvideo.config.schema import Config
from hyvideo.config.sizes import parse_size
from hyvideo.data.prompts import Prompt
from hyvideo.data.samplers import Assignment
from hyvideo.distributed.collectives import gather
from hyvideo.distributed.layout import Layout
from hyvideo.distributed.mesh import Mesh
from hyvideo.grpo.advantages import group_advantages, normalize_then_sum
from hyvideo.grpo.diversity import group_diversity, thumbnails
from hyvideo.models.reward_models.rewards import Scores, WeightedReward
from hyvideo.observability.phase_timer import PhaseTimer
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Guidance, HunyuanVideoGRPOPipeline, Rollout
from hyvideo.pipelines.noise import SampleNoise
from hyvideo.training.scoring import score_over_ranks
from hyvideo.training.trajectory import Trajectory, blocks


def collect(
    pipeline: HunyuanVideoGRPOPipeline,
    reward: WeightedReward,
    guidance: Guidance,
    prompts: Sequence[Prompt],
    assignments: Sequence[Assignment],
    *,
    mesh: Mesh,
    layout: Layout,
    round_index: int,
    config: Config,
    timer: PhaseTimer,
    noisy: torch.Tensor | None = None,
    before_scoring: Callable[[], None] | None = None,
) -> Trajectory:
    """Sample, score and compare this rank's videos of one round.

    Args:
        pipeline: policy and encoders, the scheduler's steps set.
        reward: scores the videos.
        guidance: classifier-free guidance of the rollout.
        prompts: all training prompts.
        assignments: which prompt and generation each of this rank's samples is.
        mesh: who else samples videos of this round.
        layout: where the videos of the round lie.
        round_index: number of the round; it seeds the noise.
        config: the run's configuration.
        timer: records the time under `rollout` and `reward`; with `reward_async` the latter is only the remaining wait.
        noisy: `[B, K]` bool, the steps at which each of this rank's videos draws noise; None: all.
        before_scoring: called when all videos are sampled and the memory for that is free.

    Raises:
        RewardFailureError: too many videos could not be scored.
    """
    own = mesh.layout.share_to_score(len(assignments), mesh.rank)
    scoring = reward.begin() if config.reward.reward_async and own else None
    unique = list(dict.fromkeys(assignment.prompt_index for assignment in assignments))
    texts = tuple(prompts[assignment.prompt_index].text for assignment in assignments)
    rows = tuple(unique.index(assignment.prompt_index) for assignment in assignments)
    with timer("rollout"):
        size = parse_size(config.rollout.rollout_size)
        conditioning = pipeline.encode_prompts([prompts[index] for index in unique], size)
        parts = []
        for block in blocks(len(assignments), config.rollout.rollout_micro_batch_size or len(assignments)):
            parts.append(
                pipeline.rollout(
                    conditioning.rows([rows[i] for i in block]),
                    _noise([assignments[i] for i in block], round_index, config),
                    guidance,
                    num_frames=config.rollout.sample_n_frames,
                    size=size,
                    sde_type=config.rollout.sde_type,
                    eta=config.rollout.eta,
                    noisy=None if noisy is None else noisy[list(block)],
                )
            )
            inside = [i for i in block if i in own]
            if scoring and inside:
                scoring.add(parts[-1].videos[[i - block.start for i in inside]], [texts[i] for i in inside])
        rollout = Rollout(*(torch.cat(field) for field in zip(*map(_fields, parts), strict=True)))
        del parts  # gigabytes that the reward's model may need
    with timer("reward"):
        if before_scoring:
            before_scoring()
        max_failed = config.reward.reward_max_failed
        scores, of_ranks = score_over_ranks(reward, rollout.videos, texts, mesh, scoring, max_failed=max_failed)
    of_round = _in_round_order(of_ranks, layout)
    points = layout.in_round_order(gather(thumbnails(rollout.videos))[:: mesh.sp_size])
    diversity = group_diversity(points, config.grpo.num_generations)
    rewards = _compared(of_round, reward, config)
    advantages = group_advantages(rewards, config.grpo.num_generations, config.grpo.adv_clip_max)
    own_advantages = advantages[layout.positions(mesh.dp_rank)]
    return Trajectory(texts, conditioning, rows, rollout, scores, of_round, rewards, own_advantages, diversity)


def _noise(assignments: Sequence[Assignment], round_index: int, config: Config) -> SampleNoise:
    """Return the noise of a batch of videos."""
    return SampleNoise(
        seeds=[config.run.seed] * len(assignments),
        stream="rollout",
        round=round_index,
        prompts=[assignment.prompt_index for assignment in assignments],
        generations=[assignment.generation for assignment in assignments],
        share_initial=config.rollout.use_same_noise,
    )


def _in_round_order(of_ranks: Sequence[Scores], layout: Layout) -> Scores:
    """Join the scores of all data-parallel ranks: groups become contiguous."""
    metrics = {name: layout.in_round_order([part.metrics[name] for part in of_ranks]) for name in of_ranks[0].metrics}
    return Scores(metrics, layout.in_round_order([part.total for part in of_ranks]))


def _compared(scores: Scores, reward: WeightedReward, config: Config) -> torch.Tensor:
    """Return the rewards by which the videos of a group are compared, `[N]` for the round's N videos."""
    if config.reward.reward_aggregation == "normalize_then_sum":
        return normalize_then_sum(scores.metrics, reward.weights, config.grpo.num_generations)
    return scores.total


def _fields(rollout: Rollout) -> tuple[torch.Tensor, ...]:
    return rollout.videos, rollout.latents, rollout.means, rollout.log_probs
