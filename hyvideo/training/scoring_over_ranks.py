"""Score videos over ranks: each video once, and every rank learns all scores."""

import traceback
from collections.abc import Sequence

import torch
from torch import Tensor

from hyvideo.distributed.collectives import all_or_none, gather
from hyvideo.distributed.mesh import Mesh
from hyvideo.models.reward_models.registry import RewardFailureError
from hyvideo.models.reward_models.rewards import Scores, Scoring, WeightedReward, frames_of_reward


def score_over_ranks(
    reward: WeightedReward,
    videos: Tensor,
    texts: Sequence[str],
    positions: Tensor,
    mesh: Mesh,
    scoring: Scoring | None = None,
) -> Scores:
    """Score the videos of all ranks; the ranks that share a video's tokens score a part of their videos each.

    Args:
        reward: the reward.
        videos: `[B, F, H, W, 3]`, the same on all ranks of one data-parallel rank.
        texts: their prompts.
        positions: `[B]` long, where each stands among the videos of all ranks.
        mesh: who shares what.
        scoring: has been given this rank's share of the videos already (`reward_async`); None: score them now.

    Returns:
        The scores of the videos of all ranks in the order of their positions, the same on every rank.

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
            frames = traceback.extract_tb(error.with_traceback(frames_of_reward(error)).__traceback__)
            at = [frame for frame in frames if frame.filename == frames[0].filename]  # not what it calls in libraries
            place = f" ({at[-1].filename}, line {at[-1].lineno}, in {at[-1].name})" if at else ""
            raise RewardFailureError(f"the reward failed: {type(error).__name__}: {error}{place}") from error
    parts, places = zip(*gather((part, positions[own.start : own.stop])), strict=True)
    parts = [part for part in parts if part is not None]
    scores = Scores.join(parts).at(torch.cat(places).argsort())
    failed = int(scores.failed().sum())
    if failed > reward.max_failed * len(scores):
        counts = {name: int(values.isnan().sum()) for name, values in scores.metrics.items()}
        listed = ", ".join(f"{name}: {count}" for name, count in counts.items() if count)
        raise RewardFailureError(
            f"{failed} of {len(scores)} videos could not be scored ({listed}); at most the share {reward.max_failed:g} "
            "may fail (reward_max_failed). Earlier warnings say why, where the reward gave a reason."
        )
    return scores
