"""Knobs of a run: prompts, validation, output and length. None of them changes the method."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class DataConfig:
    """Prompts: CSV files with a `prompt` column and optional `index`, `seed` and `ref_image_path`."""

    train_video_csv: list[str] = field(default_factory=list)
    """One or more CSV files of training prompts. Required."""

    valid_video_csv: list[str] = field(default_factory=list)
    """One or more CSV files of validation prompts. Required unless validation is off."""

    image_root: str | None = None
    """Folder in which every ref_image_path must lie, links resolved: for CSVs you do not trust. None: anywhere."""


@dataclass
class ValidationConfig:
    """Validation: deterministic sampling of fixed prompts and seeds, scored by the training reward."""

    validation_interval: int = 100
    """Optimizer updates between validations. 0 switches them off."""

    validate_at_step0: bool = False
    """Validate once before training, so that curves start at the base model."""

    validation_num_videos: int = 32
    """Videos per validation: the first prompts of the validation CSVs."""

    validate_video_length: int = 81
    """Frames per validation video, 4n + 1."""

    validation_fixed_size: str = "480x864"
    """HEIGHTxWIDTH of validation videos in pixels, multiples of the VAE factor."""

    validation_num_inference_steps: int = 40
    """Denoising steps of validation sampling (ODE, no noise added)."""

    validation_timestep_shift: float = 5.0
    """Timestep shift of the validation's sigma schedule."""

    validation_global_seed: int = 930
    """Seed of validation noise for prompts to which the CSV gives none."""

    @property
    def is_on(self) -> bool:
        """Whether there is any validation."""
        return self.validation_interval > 0 or self.validate_at_step0


@dataclass
class RunConfig:
    """Run: where it writes, how long it lasts, how it resumes. A step is one optimizer update."""

    output_dir: str | None = None
    """Run folder, used exactly as given. None: `outputs/<run_name>-<time>`."""

    run_name: str | None = None
    """Name of the run in trackers and the default folder. None: the names of the config files, joined by '-'."""

    run_tags: list[str] = field(default_factory=list)
    """Tags of the run in trackers."""

    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Experiment trackers by accelerate's names: tensorboard, wandb, mlflow, ... All but tensorboard must be installed.
    metrics.jsonl is always written."""

    max_steps: int = 10000
    """Optimizer updates after which training ends, counted from the start of the run, not from a resume."""

    seed: int = 42
    """Seed of prompt order, noise and permutations. Equal seeds give equal runs."""

    save_interval: int = 100
    """Optimizer updates between checkpoints. 0 saves only at the end."""

    log_interval: int = 1
    """Optimizer updates between console lines. metrics.jsonl has every update."""

    keep_last: int = 3
    """Checkpoints kept; older ones are deleted."""

    keep_every: int = 0
    """The first checkpoint at or after each multiple of this many updates is never deleted. 0: none."""

    nonfinite_update: Literal["stop", "skip"] = "stop"
    """An update whose loss or gradient is not finite changes no weight. stop: it ends the run; skip: it is counted and
    logged (update/skipped), and the run goes on."""

    max_skipped_updates: int = 3
    """Consecutive updates that nonfinite_update skip may leave out; one more ends the run, since the weights are then
    lost."""

    async_save: bool = False
    """Write checkpoints during the next round, from a copy in host memory; each becomes valid at that round's end."""

    profile: bool = False
    """Write PyTorch profiler traces of each rank and a table of the phases to `profile/` of the run folder, after the
    first round: of each phase the first two passes through the transformer. Training goes on afterwards."""

    profile_steps: int = 2
    """Updates over which profile averages the seconds of each phase, at least: those of whole rounds."""

    peak_tflops: float | None = None
    """Peak of one device in matrix products, 10^12 operations per second; perf/mfu_* is the share in use. None: the
    data sheet's figure for a known GPU, otherwise what a large product reaches when the run begins."""

    resume_from_checkpoint: str | None = None
    """`latest` continues the newest checkpoint of output_dir, or starts fresh when there is none yet; a path
    continues that checkpoint. None: output_dir must be new or empty."""

    resume_may_change: list[str] = field(default_factory=list)
    """Settings, such as learning_rate, that may differ from those of the resumed checkpoint. Any other difference that
    decides the result is refused. What shapes the trained tensors (LoRA, optimizer, precision) cannot change."""

    dry_run: bool = False
    """Check settings, files, free space and agreement of the ranks, print the plan of the run and end: nothing is
    trained or written."""
