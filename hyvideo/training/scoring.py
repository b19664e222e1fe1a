"""Score videos over ranks: each video once, and every rank learns all scores."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hyvideo.distributed.collectives import all_or_none, gather
from hyvideo.distributed.mesh import Mesh
from hyvideo.models.reward_models.registry import RewardFailureError
from hyvideo.models.reward_models.rewards import Scores, WeightedReward
from hyvideo.models.reward_models.scoring import Scoring


def score_over_ranks(
    reward: WeightedReward,
    videos: Tensor,
    texts: Sequence[str],
    mesh: Mesh,
    scoring: Scoring | None = None,
    *,
    max_failed: float,
) -> tuple[Scores | None, list[Scores]]:
    """Score this data-parallel rank's videos; the ranks that share them score a part each.

    Args:
        reward: scores videos `[B, F, H, W, 3]` for B texts.
        videos: the same on all ranks of one data-parallel rank.
        texts: their prompts.
        mesh: who shares what.
        scoring: has this rank's share of the videos already, where they are scored while others are sampled.
        max_failed: share of the videos of all ranks that may have no total (`reward_max_failed`).

    Returns:
        The scores of these videos (None when there are none), and those of every data-parallel rank that has some.

    Raises:
        RewardFailureError: the reward failed on a rank, or too many videos have no total; all raise it.
    """
    own = mesh.layout.share_to_score(len(texts), mesh.rank)
    with all_or_none(RewardFailureError):
        try:
            if scoring is not None:
                part = reward.finish(scoring)
            else:
                part = reward(videos[own.start : own.stop], texts[own.start : own.stop]) if own else None
        except (RewardFailureError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise RewardFailureError(f"the reward failed: {type(error).__name__}: {error}") from error
    parts = gather(part)
    joined = [join_scores([parts[rank] for rank in mesh.layout.ranks_of(dp_rank)]) for dp_rank in range(mesh.dp_size)]
    of_ranks = [scores for scores in joined if scores is not None]
    _check_failures(join_scores(of_ranks), max_failed)
    return joined[mesh.dp_rank], of_ranks


def _check_failures(scores: Scores, max_failed: float) -> None:
    """Stop the run where too many videos have no total."""
    failed = int(scores.total.isnan().sum())
    if failed > max_failed * len(scores.total):
        counts = {name: int(values.isnan().sum()) for name, values in scores.metrics.items()}
        listed = ", ".join(f"{name}: {count}" for name, count in counts.items() if count)
        raise RewardFailureError(
            f"{failed} of {len(scores.total)} videos could not be scored ({listed}); at most the share {max_failed:g} "
            "may fail (reward_max_failed). Earlier warnings say why, where the reward gave a reason."
        )


def join_scores(parts: Sequence[Scores | None]) -> Scores | None:
    """Join scores of consecutive videos; parts without videos are None, and so is the result when all are."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    metrics = {name: torch.cat([part.metrics[name] for part in present]) for name in present[0].metrics}
    return Scores(metrics, torch.cat([part.total for part in present]))
