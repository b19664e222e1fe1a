"""Where a run writes, how long it lasts, how it resumes and what it watches."""

from dataclasses import dataclass
from typing import Literal

from hyvideo.config.setting import setting


@dataclass
class RunConfig:
    """Run: where it writes, how long it lasts, how it resumes."""

    output_dir: str | None = setting(None, decides=False)
    """Run folder, used exactly as given. None is `outputs/<run_name>-<time>`."""

    run_name: str | None = setting(None, decides=False)
    """Name of the run in trackers and in the default folder. None joins the names of the config files."""

    run_tags: list[str] = setting([], decides=False)
    """Tags of the run in trackers."""

    trackers: list[str] = setting(["tensorboard"], decides=False)
    """Experiment trackers by accelerate's names, such as wandb or mlflow, which you must install yourself."""

    max_steps: int = setting(10000, within="[1, inf)", unit="updates", decides=False)
    """Length of the run, counted from its start and not from a resume. The round that reaches it is made whole."""

    seed: int = setting(42, within="[0, 9223372036854775808)")
    """Seed of prompt order, noise and choice of steps. Equal seeds give equal runs."""

    save_interval: int = setting(100, within="[0, inf)", unit="updates", decides=False)
    """Time between checkpoints. 0 saves only at the end."""

    log_interval: int = setting(1, within="[1, inf)", unit="updates", decides=False)
    """Time between console lines. metrics.jsonl has every update."""

    keep_last: int = setting(3, within="[1, inf)", decides=False)
    """Checkpoints kept. Older ones are deleted."""

    keep_every: int = setting(0, within="[0, inf)", unit="updates", decides=False)
    """The first checkpoint at or after each multiple of this is never deleted. 0 keeps none."""

    nonfinite_update: Literal["stop", "skip"] = setting("stop", decides=False)
    """What happens when a loss or gradient is not finite. No weight changes. stop ends the run. skip counts the update
    (update/skipped) and goes on."""

    max_skipped_updates: int = setting(3, within="[1, inf)", decides=False, read_when="nonfinite_update = skip")
    """Updates that may be skipped in a row. One more ends the run, because the weights are then lost."""

    async_save: bool = setting(False, decides=False)
    """Write checkpoints during the next round, from a copy in host memory. They become valid when it ends."""

    profile: bool = setting(False, decides=False)
    """Write profiler traces of each rank and a table of the phases to `profile/` after the first round. Training goes
    on."""

    profile_steps: int = setting(2, within="[1, inf)", unit="updates", decides=False, read_when="profile = true")
    """Least time over which profile averages the phases. It ends with a round."""

    peak_tflops: float | None = setting(None, within="(0, inf)", unit="10^12 operations per second", decides=False)
    """Peak of one device in matrix products, for perf/mfu_*. None takes the data sheet's figure of a known GPU, or else
    measures a large product."""

    resume_from_checkpoint: str | None = setting(None, decides=False)
    """`latest` continues the newest checkpoint of output_dir, or starts fresh when there is none yet. A path continues
    that checkpoint. None needs an output_dir that is new or empty."""

    resume_may_change: list[str] = setting([], decides=False)
    """Settings, such as learning_rate, that may differ from those of the resumed checkpoint. Without it any difference
    that decides the result is refused. LoRA, optimizer and precision can never change."""

    dry_run: bool = setting(False, decides=False)
    """Check settings, files, free space and agreement of the ranks, print the plan and end. Nothing is written."""
