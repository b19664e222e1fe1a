"""Where the prompts are."""

from dataclasses import dataclass

from hyvideo.config.setting import setting


@dataclass
class DataConfig:
    """Prompts: CSV files with a `prompt` column and optional `index`, `seed` and `ref_image_path`."""

    train_video_csv: list[str] = setting([])
    """CSV files of training prompts."""

    valid_video_csv: list[str] = setting([], decides=False)
    """CSV files of validation prompts. They are required unless validation is off."""

    image_root: str | None = setting(None, decides=False)
    """Folder in which every ref_image_path must lie. Set it for CSVs that you do not trust."""
