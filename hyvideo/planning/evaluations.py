"""What a method costs: transformer evaluations per video, by phase. Counted, so it cannot be noisy."""

from dataclasses import dataclass

from hyvideo.grpo.timesteps import num_kept


@dataclass(frozen=True)
class Evaluations:
    """Transformer evaluations per video of a round; guidance makes each of them two rows.

    Attributes:
        rollout: forward passes without gradient that sample the video.
        anchor: those that compute the anchor's means; 0 in a round in which the anchor still equals the policy.
        update: forward and backward passes, over all updates of the round.
    """

    rollout: int
    anchor: int
    update: int


def evaluations_per_video(
    num_steps: int,
    num_stochastic: int,
    *,
    window_size: int | None = None,
    timestep_fraction: float = 1.0,
    with_anchor: bool = True,
    anchor_fraction: float = 1.0,
) -> Evaluations:
    """Count the evaluations of one video: every step once, and the trained steps once more per phase.

    Args:
        num_steps: K denoising steps (``grpo_sampling_steps``).
        num_stochastic: how many of them can draw noise (`FlowMatchDiscreteScheduler.trained_steps`).
        window_size: ``sde_window_size``; None where ``sde_window`` is all.
        timestep_fraction: share of the noisy steps that is trained.
        with_anchor: whether the loss has a position term and the anchor differs from the policy.
        anchor_fraction: share of the trained steps that is compared with it.

    Example:
        >>> evaluations_per_video(20, 20)
        Evaluations(rollout=20, anchor=20, update=20)
        >>> evaluations_per_video(20, 20, window_size=4)
        Evaluations(rollout=20, anchor=4, update=4)
    """
    trained = num_kept(timestep_fraction, num_stochastic if window_size is None else window_size)
    return Evaluations(num_steps, num_kept(anchor_fraction, trained) if with_anchor else 0, trained)
