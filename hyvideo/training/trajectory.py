"""What one round leaves for its updates, as one frozen record."""

from dataclasses import dataclass

from torch import Tensor

from hyvideo.models.reward_models.rewards import Scores
from hyvideo.pipelines.conditioning import Conditioning
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Rollout


@dataclass(frozen=True)
class Trajectory:
    """B videos of this rank, how they were made and how good they are.

    Attributes:
        prompts: the B prompt texts.
        conditioning: one row per unique prompt.
        conditioning_rows: row of `conditioning` of every sample, length B.
        rollout: videos, latents `[B, K + 1, ...]`, means `[B, K, ...]` and log-probabilities `[B, K]`.
        scores: raw metrics and total reward, `[B]` each.
        round_scores: those of the videos of all ranks, in round order: groups are contiguous.
        rewards: those by which the videos of a group are compared, likewise; NaN for a failed score.
        advantages: `[B]`, group-normalised; 0 for a failed score.
        diversity: of every group of the round, `[N / G]`: how far its videos are from each other.
    """

    prompts: tuple[str, ...]
    conditioning: Conditioning
    conditioning_rows: tuple[int, ...]
    rollout: Rollout
    scores: Scores
    round_scores: Scores
    rewards: Tensor
    advantages: Tensor
    diversity: Tensor

    def __len__(self) -> int:
        """Number of samples B."""
        return len(self.prompts)

    def conditioning_of(self, samples: Tensor) -> Conditioning:
        """Return the conditioning of `samples` (LongTensor `[b]`), one row each."""
        return self.conditioning.rows([self.conditioning_rows[i] for i in samples.tolist()])


def blocks(count: int, size: int) -> list[range]:
    """Split `range(count)` into consecutive blocks of `size` (the last may be smaller)."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]
