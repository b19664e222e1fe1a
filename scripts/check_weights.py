"""Check downloaded weights without loading them: every file is there, whole, and fits its config.json.

Example: `python -m scripts.check_weights --model_path ckpts --transformer_version 480p_t2v`
"""

import argparse
import sys
from pathlib import Path

from hyvideo.config.flags import Parser
from hyvideo.config.outside import complain
from hyvideo.models.loading import open_transformer, open_vae
from hyvideo.models.model_folder import check_layout, is_diffusers_layout, original_files
from hyvideo.models.weight_files import SafetensorsFolder, check_fit


def main(argv: list[str]) -> int:
    """Check and print the size of every component; returns the exit status (0 all well, 2 something is wrong)."""
    parser = Parser("check_weights", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model_path", type=Path, default=Path("ckpts"), help="model folder; default ckpts")
    parser.add_argument("--transformer_version", help="of the original layout; default: the only one there")
    arguments = parser.parse_args(argv)
    try:
        root = check_layout(arguments.model_path, arguments.transformer_version)
        for folder in _folders(root, arguments.transformer_version):
            print(f"{sum(path.stat().st_size for path in folder.glob('*') if path.is_file()):>16,} bytes  {folder}")
    except ValueError as error:
        complain(f"check_weights: {error}")
        return 2
    return 0


def _folders(root: Path, version: str | None) -> list[Path]:
    """Return the folders with weights, each after its files were found whole and fitting."""
    transformer, source, naming = open_transformer(root, version)
    check_fit(transformer, source, naming)
    vae, vae_source, vae_naming = open_vae(root)
    check_fit(vae, vae_source, vae_naming)
    checked = [Path(source.where), Path(vae_source.where)]
    if is_diffusers_layout(root):
        others = [root / name for name in ("text_encoder", "text_encoder_2", "image_encoder")]
    else:
        files = original_files(checked[0].name)
        others = [root / folder for folder in files if folder.startswith(("text_encoder", "vision_encoder"))]
        others = [path for folder in others for path in (folder, folder / "image_encoder", folder / "checkpoints")]
    for folder in others:
        if any(folder.glob("*.safetensors")):
            SafetensorsFolder(folder)
            checked.append(folder)
        elif any(folder.glob("*.pt")):
            checked.append(folder)
    return checked


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
