"""Export a trained policy, or convert a base model, for other programs.

Formats:
  diffusers      a whole model in the diffusers layout (LoRA merged)
  original       only the transformer, in the original layout: a new ckpts/transformer/<version> (LoRA merged)
  lora           only the adapter, under diffusers' names
  lora_original  only the adapter, under the original names
  comfyui        only the adapter, as ComfyUI loads it
  musubi         only the adapter, as musubi-tuner loads it

Example: `python -m scripts.export --model_path ckpts --transformer_version 480p_t2v
--checkpoint_path outputs/run/checkpoints/step_100 --format original --output_path ckpts/transformer/480p_t2v_sage`
"""

import argparse
import sys
from pathlib import Path

from safetensors import SafetensorError

from hyvideo.config.flags import Parser
from hyvideo.config.outside import complain, loading

FORMATS = ("diffusers", "original", "lora", "lora_original", "comfyui", "musubi")
DTYPES = ("fp32", "bf16", "fp16")


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser("export", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model_path", type=Path, required=True, help="folder of the base model, in either layout")
    parser.add_argument("--transformer_version", help="transformer in the original layout; default: the only one there")
    trained = parser.add_mutually_exclusive_group()
    trained.add_argument("--checkpoint_path", help="checkpoint of a run; without one (or a LoRA) the base is converted")
    trained.add_argument("--lora_path", help="folder or .safetensors file of an adapter, named as in docs/weights.md")
    parser.add_argument("--ema", action="store_true", help="the average of the checkpoint's weights (ema_decay)")
    parser.add_argument("--format", required=True, choices=FORMATS)
    parser.add_argument("--output_path", type=Path, required=True, help="a new folder")
    parser.add_argument("--dtype", choices=DTYPES, help="of the transformer; default fp32, or as stored for a base")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Export; returns the exit status (0 done, 2 wrong input)."""
    arguments = parse_arguments(argv)
    with loading("scripts.export"):
        from hyvideo.checkpoint.export import export  # only now, for it takes seconds

    try:
        export(arguments)
    except (ValueError, OSError, SafetensorError) as error:
        complain(f"scripts.export: {error}")
        return 2
    print(f"wrote {arguments.output_path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
