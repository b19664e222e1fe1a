"""Export a trained policy, or convert a base model, for other programs.

Formats:
  diffusers      a whole model in the diffusers layout (LoRA merged)
  original       only the transformer, in the original layout: a new ckpts/transformer/<version> (LoRA merged)
  lora           only the adapter, under diffusers' names
  lora_original  only the adapter, under the original names

Example: `python -m scripts.export --model_path ckpts --transformer_version 480p_t2v
--checkpoint_path outputs/run/checkpoints/step_100 --format original --output_path ckpts/transformer/480p_t2v_sage`
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from hyvideo.config.flags import Parser
from hyvideo.config.outside import complain, say_loading
from hyvideo.models.model_folder import is_diffusers_layout, read_json, transformer_folder

if TYPE_CHECKING:
    import torch

FORMATS = ("diffusers", "original", "lora", "lora_original")
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Name of a dtype here -> in PyTorch."""


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser("export", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model_path", type=Path, required=True, help="folder of the base model, in either layout")
    parser.add_argument("--transformer_version", help="transformer in the original layout; default: the only one there")
    trained = parser.add_mutually_exclusive_group()
    trained.add_argument("--checkpoint_path", help="checkpoint of a run; without one (or a LoRA) the base is converted")
    trained.add_argument("--lora_path", help="folder with pytorch_lora_weights.safetensors, keys of either layout")
    parser.add_argument("--ema", action="store_true", help="the average of the checkpoint's weights (ema_decay)")
    parser.add_argument("--format", required=True, choices=FORMATS)
    parser.add_argument("--output_path", type=Path, required=True, help="a new folder")
    parser.add_argument("--dtype", choices=DTYPES, help="of the transformer; default fp32, or as stored for a base")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Export; returns the exit status (0 done, 2 wrong input)."""
    arguments = parse_arguments(argv)
    say_loading("scripts.export")
    from transformers.utils.logging import disable_progress_bar  # only now, for it takes seconds

    from hyvideo.checkpoint.export import check_new
    from hyvideo.checkpoint.train_state import named_checkpoint
    from hyvideo.checkpoint.trained_policy import check_checkpoint
    from hyvideo.models.adapter import check_lora

    disable_progress_bar()
    try:
        check_new(arguments.output_path)
        for name in ("checkpoint_path", "lora_path"):
            if given := getattr(arguments, name):
                setattr(arguments, name, named_checkpoint(given))
        if arguments.checkpoint_path:
            check_checkpoint(arguments.checkpoint_path, ema=arguments.ema)
        elif arguments.ema:
            raise ValueError("--ema takes the average in a checkpoint: give --checkpoint_path.")
        if arguments.lora_path:
            check_lora(arguments.lora_path)
        if arguments.format == "original":
            _check_name(arguments)
        _export(arguments)
    except (ValueError, OSError, SafetensorError) as error:
        complain(f"scripts.export: {error}")
        return 2
    print(f"wrote {arguments.output_path}")
    return 0


def _export(arguments: argparse.Namespace) -> None:
    """Load, put the trained weights in, and write."""
    from hyvideo.checkpoint.export import export_diffusers, export_lora, export_original
    from hyvideo.models.loading import load_pipeline, load_transformer
    from hyvideo.pipelines.hunyuan_video_grpo_pipeline import HunyuanVideoGRPOPipeline
    from hyvideo.pipelines.sampling_defaults import sampling_defaults
    from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler

    root, version = arguments.model_path, arguments.transformer_version
    if arguments.format == "diffusers":
        defaults = sampling_defaults(root, version)
        pipeline = load_pipeline(
            root,
            version,
            pipeline_class=HunyuanVideoGRPOPipeline,
            scheduler=FlowMatchDiscreteScheduler(shift=defaults["shift"]),
            transformer_dtype=_load_dtype(arguments),
            encoder_dtype=None,
        )
        _finish(pipeline.transformer, arguments)
        export_diffusers(pipeline, arguments.output_path, guidance_scale=defaults["guidance_scale"])
        return
    transformer = load_transformer(root, version, dtype=_load_dtype(arguments))
    _finish(transformer, arguments)
    if arguments.format == "original":
        export_original(transformer, arguments.output_path, _original_config(root, version))
    else:
        export_lora(transformer, arguments.output_path, original_keys=arguments.format == "lora_original")


def _check_name(arguments: argparse.Namespace) -> None:
    """Refuse a name that hides what only the name of an original folder tells.

    Raises:
        ValueError: the base has its guidance in its weights, and the new folder's name does not say so.
    """
    from hyvideo.pipelines.sampling_defaults import sampling_defaults

    root, version = arguments.model_path, arguments.transformer_version
    config = _original_config(root, version) or {}
    distilled = sampling_defaults(root, version)["guidance_scale"] == 1 and not config.get("use_meanflow")
    if distilled and "distilled" not in arguments.output_path.name:
        raise ValueError(
            f"--output_path: the base is distilled and must be sampled without guidance, which in the original layout "
            f"only the folder's name tells: put 'distilled' into '{arguments.output_path.name}'."
        )


def _load_dtype(arguments: argparse.Namespace) -> "torch.dtype | None":
    """Return the dtype to load in: float32 where weights are trained or merged, else as stored."""
    import torch

    return torch.float32 if arguments.checkpoint_path or arguments.lora_path else None


def _finish(transformer: "torch.nn.Module", arguments: argparse.Namespace) -> None:
    """Put the trained weights in, merge an adapter unless it is what is asked for, and round."""
    import torch

    from hyvideo.checkpoint.trained_policy import load_trained_policy
    from hyvideo.models.adapter import load_lora, merge_lora

    if arguments.checkpoint_path:
        load_trained_policy(transformer, arguments.checkpoint_path, ema=arguments.ema)
    if arguments.lora_path:
        load_lora(transformer, arguments.lora_path)
    if not arguments.format.startswith("lora"):
        merge_lora(transformer)
    if arguments.dtype:
        transformer.to(getattr(torch, DTYPES[arguments.dtype]))


def _original_config(root: Path, version: str | None) -> dict[str, Any] | None:
    """Return the base's own config.json where it is in the original layout."""
    return None if is_diffusers_layout(root) else read_json(transformer_folder(root, version) / "config.json")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
