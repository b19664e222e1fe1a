"""Says when the replay of a rollout does not give what the rollout recorded, and what may be the cause."""

from collections.abc import Mapping

from hyvideo.config.schema import Config
from hyvideo.training.warnings_about_settings import videos_together


class ReplayMismatchError(RuntimeError):
    """The replay differs from the rollout by more than `clip_range`, and `replay_mismatch` is `stop`."""


class ReplayWatch:
    """Compares `ratio/max_deviation`, measured before the first update of each round, with `clip_range`.

    A ratio that leaves the clip range although no weight was changed is an error of the replay, not a step of the
    policy. The first update of a round does not depend on it, since its ratios are 1 by definition. In the later ones
    the clip would silence videos for this error alone.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._told = False

    def observe(self, metrics: Mapping[str, float]) -> str | None:
        """Take the metrics of an update; return a warning the first time that the replay differs too much.

        Raises:
            ReplayMismatchError: it differs too much, and `replay_mismatch` is `stop`.
        """
        deviation, grpo = metrics.get("ratio/max_deviation", 0.0), self._config.grpo
        if self._told or deviation <= grpo.clip_range:
            return None
        self._told = True
        message = (
            f"ratio/max_deviation is {deviation:.1e} although no weight was changed since the rollout, more than "
            f"clip_range {grpo.clip_range:g}: replaying a denoising step does not give what the rollout recorded. "
            f"{self._cause()}"
        )
        if grpo.replay_mismatch == "stop":
            raise ReplayMismatchError(f"{message} The run stops because replay_mismatch is stop.")
        return f"{message} Set replay_mismatch to stop where this must not happen."

    def _cause(self) -> str:
        """Name what in the settings lets a replay round otherwise than its rollout."""
        config = self._config
        rollout, update = videos_together(config), config.grpo.mini_batch_size_per_update
        if rollout == update:
            return (
                "The settings do not explain it, so the attention kernel may choose another plan with gradients than "
                "without (python -m benchmarks.attention shows it on your GPU), or an algorithm or reward of your own "
                "changes weights between rollout and update."
            )
        cause = f"the rollout computes {rollout} videos together and the update {update}"
        return f"In {config.model.dtype} the likely cause is that {cause}."
