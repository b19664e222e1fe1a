"""What the numbers of a configuration multiply out to: pixels of a size, videos and prompts of a round."""

import re
from dataclasses import dataclass

from hyvideo.config.schema import Config


def parse_size(text: str) -> tuple[int, int]:
    """Read a size such as `352x624` as (height, width) in pixels.

    Raises:
        ValueError: the text is not HEIGHTxWIDTH with positive whole numbers.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", text)
    if match is None:
        raise ValueError(f"a size is HEIGHTxWIDTH in pixels, such as 352x624; received {text!r}")
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class RolloutSizes:
    """How many videos and prompts one rollout has over all ranks.

    Attributes:
        dp_degree: data-parallel ranks, each with videos of its own: world size / sp_size.
        videos: videos of one rollout over all ranks: batch_size x dp_degree.
        prompts: prompt groups of one rollout over all ranks: videos / num_generations.
    """

    dp_degree: int
    videos: int
    prompts: int


def rollout_sizes(cfg: Config, world_size: int) -> RolloutSizes:
    """Multiply out a configuration that `check_config` has accepted.

    Example:
        The 64-GPU recipe (sp_size 2, batch_size 2, num_generations 4) at 64 ranks has 32 data-parallel ranks, which
        sample 64 videos of 16 prompts.
    """
    dp_degree = world_size // cfg.parallel.sp_size
    videos = cfg.grpo.batch_size * dp_degree
    return RolloutSizes(dp_degree, videos, videos // cfg.grpo.num_generations)
