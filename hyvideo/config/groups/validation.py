"""When and how fixed prompts are sampled and scored during training."""

from dataclasses import dataclass

from hyvideo.config.setting import setting


@dataclass
class ValidationConfig:
    """Validation: deterministic sampling of fixed prompts and seeds, scored by the training reward."""

    validation_interval: int = setting(100, within="[0, inf)", unit="updates", decides=False)
    """Time between validations. 0 switches them off."""

    validate_at_step0: bool = setting(False, decides=False)
    """Validate once before training, so that curves start at the base model."""

    validation_num_videos: int = setting(32, within="[1, inf)", decides=False)
    """Videos per validation, from the first prompts of the CSVs."""

    validate_video_length: int = setting(81, within="[1, inf)", decides=False, frees=("validation",))
    """Frames of a validation video, 4n + 1."""

    validation_fixed_size: str = setting("480x864", decides=False, frees=("validation",))
    """HEIGHTxWIDTH of validation videos in pixels."""

    validation_num_inference_steps: int = setting(40, within="[1, 10000]", decides=False)
    """Denoising steps of a validation video."""

    validation_timestep_shift: float = setting(5.0, within="(0, inf)", decides=False)
    """Timestep shift of validation."""

    validation_global_seed: int = setting(930, within="[0, 9223372036854775808)", decides=False)
    """Seed of the noise for prompts without one in the CSV."""

    @property
    def is_on(self) -> bool:
        """Whether there is any validation."""
        return self.validation_interval > 0 or self.validate_at_step0
