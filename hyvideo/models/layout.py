"""Which files a weights folder must hold, and what is missing from one."""

from collections.abc import Iterable
from pathlib import Path

DIFFUSERS_COMPONENTS = ("transformer", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
"""Folders of the diffusers layout, which the bundled tiny model shares."""

HOW_TO_GET = (
    "How to get them: checkpoints-download.md. Without any download, the bundled tiny model trains on this machine: "
    "python post_train.py --config configs/tiny.yaml"
)


def original_files(version: str) -> dict[str, tuple[str, ...]]:
    """Return folder -> file patterns of HunyuanVideo-1.5 as its authors publish it, for one transformer version."""
    files = {
        "scheduler": ("scheduler_config.json",),
        f"transformer/{version}": ("config.json", "*.safetensors"),
        "vae": ("config.json", "*.safetensors"),
        "text_encoder/llm": ("config.json", "tokenizer_config.json", "*.safetensors"),
        "text_encoder/byt5-small": ("config.json", "tokenizer_config.json"),
        "text_encoder/Glyph-SDXL-v2": ("assets/color_idx.json", "checkpoints/byt5_model.pt"),
    }
    if "i2v" in version:
        files["vision_encoder/siglip"] = (
            "image_encoder/config.json",
            "image_encoder/*.safetensors",
            "feature_extractor/preprocessor_config.json",
        )
    return files


def is_diffusers_layout(root: Path) -> bool:
    """Whether `root` follows the diffusers layout: one transformer, or an index of components."""
    return (root / "model_index.json").is_file() or (root / "transformer" / "config.json").is_file()


def check_diffusers_layout(root: str | Path, components: Iterable[str] = DIFFUSERS_COMPONENTS) -> Path:
    """Return `root` as a path after checking that it holds `components` in the diffusers layout.

    Raises:
        ValueError: components are missing; the message names each.
    """
    root = Path(root)
    missing = [name for name in components if not any((root / name).glob("*.json"))]
    if missing:
        raise ValueError(
            f"pretrained_model_root: '{root}' lacks {', '.join(missing)}; expected a folder with config files for each "
            f"of {', '.join(components)}. {HOW_TO_GET}"
        )
    return root


def check_layout(root: str | Path, version: str) -> Path:
    """Return `root` as a path after checking that it holds a model this version can load.

    Raises:
        ValueError: files are missing (each is named, with how to get it), or the weights are in the original layout,
            which cannot be loaded yet.
    """
    root = Path(root)
    if is_diffusers_layout(root):
        return check_diffusers_layout(root)
    missing = [
        f"  {root / folder}: {', '.join(absent)}"
        for folder, patterns in original_files(version).items()
        if (absent := [pattern for pattern in patterns if not any((root / folder).glob(pattern))])
    ]
    if missing:
        listed = "\n".join(missing)
        raise ValueError(f"pretrained_model_root: weights are missing for version {version}:\n{listed}\n{HOW_TO_GET}")
    raise ValueError(
        f"pretrained_model_root: '{root}' holds HunyuanVideo-1.5 in its original layout, which this version cannot "
        "load yet; expected the diffusers layout (model_index.json, transformer/, vae/, ...)."
    )
