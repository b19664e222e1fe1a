"""Where a run writes, how long it lasts, how it resumes and what it watches."""

from dataclasses import dataclass

from hyvideo.config.setting import setting


@dataclass
class RunConfig:
    """Run: where it writes, how long it lasts, how it resumes."""

    output_dir: str | None = setting(None, decides=False)
    """Run folder. None is `outputs/<run_name>-<time>`."""

    run_name: str | None = setting(None, decides=False)
    """Name in trackers and in the default folder. None joins the names of the config files."""

    trackers: list[str] = setting(["tensorboard"], decides=False)
    """Experiment trackers by accelerate's names, such as wandb, which you install yourself."""

    max_steps: int = setting(10000, within="[1, inf)", unit="updates", decides=False)
    """Length of the run, counted from its start. The last round is made whole."""

    seed: int = setting(42, within="[0, 9223372036854775808)")
    """Seed of prompt order, noise and choice of steps."""

    save_interval: int = setting(100, within="[0, inf)", unit="updates", decides=False)
    """Time between checkpoints. 0 saves only at the end."""

    log_interval: int = setting(1, within="[1, inf)", unit="updates", decides=False)
    """Time between console lines. metrics.jsonl has every update."""

    keep_last: int = setting(3, within="[1, inf)", decides=False)
    """Checkpoints kept; older ones are deleted."""

    keep_every: int = setting(0, within="[0, inf)", unit="updates", decides=False)
    """Also keep the first checkpoint at or after each multiple of this. 0 keeps none."""

    max_skipped_updates: int = setting(0, within="[0, inf)", decides=False)
    """Updates that may be skipped in a row because loss or gradient is not finite. One more ends the run."""

    async_save: bool = setting(False, decides=False)
    """Write checkpoints during the next round, from a copy in host memory."""

    profile: bool = setting(False, decides=False)
    """After the first round, write profiler traces and a table of the phases to `profile/`."""

    peak_tflops: float | None = setting(None, within="(0, inf)", unit="10^12 operations per second", decides=False)
    """Peak of one device for perf/mfu_*. None uses the data sheet of a known GPU or measures."""

    resume_from_checkpoint: str | None = setting(None, decides=False)
    """`latest` continues the newest checkpoint of output_dir, or starts fresh if there is none. A path continues that
    checkpoint. None needs a new or empty output_dir."""

    resume_may_change: list[str] = setting([], decides=False)
    """Settings that may differ from the resumed checkpoint's. Otherwise any difference that decides the result is
    refused. LoRA, optimizer and precision can never change."""

    dry_run: bool = setting(False, decides=False)
    """Check settings, files, free space and ranks, print the plan and end. Nothing is written."""
