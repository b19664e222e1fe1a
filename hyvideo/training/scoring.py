"""Score videos over ranks: each video once, and every rank learns all scores."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hyvideo.distributed.collectives import all_or_none, gather
from hyvideo.distributed.mesh import Mesh
from hyvideo.models.reward_models.rewards import Scores, WeightedReward


def score_over_ranks(
    reward: WeightedReward, videos: Tensor, texts: Sequence[str], mesh: Mesh
) -> tuple[Scores | None, list[Scores]]:
    """Score this data-parallel rank's videos; the ranks that share them score a part each.

    Args:
        reward: scores videos `[B, F, H, W, 3]` for B texts.
        videos: the same on all ranks of one data-parallel rank.
        texts: their prompts.
        mesh: who shares what.

    Returns:
        The scores of these videos (None when there are none), and those of every data-parallel rank that has some.

    Raises:
        RuntimeError: the reward failed on a rank; all raise it.
    """
    first, last = (place * len(texts) // mesh.sp_size for place in (mesh.sp_rank, mesh.sp_rank + 1))
    with all_or_none(RuntimeError):
        part = reward(videos[first:last], texts[first:last]) if last > first else None
    if mesh.world_size == 1:
        return part, [part]
    parts = gather(part)
    joined = [join_scores([parts[rank] for rank in mesh.ranks_of(dp_rank)]) for dp_rank in range(mesh.dp_size)]
    return joined[mesh.dp_rank], [scores for scores in joined if scores is not None]


def join_scores(parts: Sequence[Scores | None]) -> Scores | None:
    """Join scores of consecutive videos; parts without videos are None, and so is the result when all are."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    metrics = {name: torch.cat([part.metrics[name] for part in present]) for name in present[0].metrics}
    return Scores(metrics, torch.cat([part.total for part in present]))
