"""Reproduce assets/tiny from scratch: prompts, VAE, transformer, export in bf16 (an hour and a half on 2 CPU cores).

python -m scripts.tiny.build
"""

import argparse
from pathlib import Path

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel

from hyvideo.config.flags import Parser
from scripts.tiny import train_transformer, train_vae
from scripts.tiny.components import assemble
from scripts.tiny.prompts import write_csv


def export(vae_folder: Path, transformer_folder: Path, assets: Path) -> None:
    """Write the trained networks and the small parts around them in the diffusers layout, weights in bf16."""
    pipeline = assemble(
        HunyuanVideo15Transformer3DModel.from_pretrained(transformer_folder),
        AutoencoderKLHunyuanVideo15.from_pretrained(vae_folder),
    )
    for part in (pipeline.transformer, pipeline.vae):
        part.register_to_config(_name_or_path="")  # no paths of this machine in the published files
    pipeline.to(torch.bfloat16).save_pretrained(assets)


if __name__ == "__main__":
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("outputs/tiny"), help="folder of the full-precision weights")
    parser.add_argument("--assets", type=Path, default=Path("assets/tiny"))
    parser.add_argument("--export_only", action="store_true", help="export what lies in the work folder")
    arguments = parser.parse_args()
    vae, transformer = arguments.work / "vae", arguments.work / "transformer"
    if not arguments.export_only:
        train_vae.train(vae)
        train_transformer.train(vae, transformer)
    write_csv(arguments.assets / "prompts")
    export(vae, transformer, arguments.assets)
