"""Compare a trained tiny model with its base on held-out prompts; demo and learning proof share it."""

from hyvideo.config.schema import Config
from hyvideo.data.prompts import Prompt, read_prompts, repeated
from hyvideo.evaluation.paired import Gain, paired_gain
from hyvideo.models.reward_models.rewards import Scores


def held_out_prompts(config: Config, count: int, *, first: int = 0) -> list[Prompt]:
    """Return `count` held-out prompts from number `first` on, over and over, each with a noise of its own.

    Raises:
        ValueError: there are not more than `first`.
    """
    prompts = read_prompts(config.data.valid_video_csv)
    if len(prompts) <= first:
        raise ValueError(f"valid_video_csv has {len(prompts)} prompts; expected more than {first}, which are left out.")
    return repeated(prompts[first:], count)


def gains(before: Scores, after: Scores) -> dict[str, Gain]:
    """Return the paired gain of the total reward and of each metric, with 95 % intervals."""
    metrics = {name: paired_gain(before.metrics[name], after.metrics[name]) for name in before.metrics}
    return {"reward": paired_gain(before.total, after.total), **metrics}
