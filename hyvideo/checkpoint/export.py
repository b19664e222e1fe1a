"""Write a model for other programs: a diffusers folder, a transformer in the original layout, or a LoRA adapter.

An export appears under its name only when complete, and never replaces anything.
"""

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from diffusers import (
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from huggingface_hub import save_torch_state_dict
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from transformers.utils.logging import disable_progress_bar

from hyvideo.checkpoint.trained_policy import check_trained, load_trained_policy
from hyvideo.models.adapter import ADAPTER, ADAPTER_FILE, load_lora, merge_lora, save_lora, without_diffusers_logs
from hyvideo.models.conversion import original_tensors, original_transformer_config
from hyvideo.models.loading import load_pipeline, load_transformer
from hyvideo.models.lora_keys import adapter_to_kohya, adapter_to_original
from hyvideo.models.model_folder import is_diffusers_layout, read_json, transformer_folder
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import HunyuanVideoGRPOPipeline
from hyvideo.pipelines.sampling_defaults import sampling_defaults
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_SHARD_SIZE = "5GB"


def export(arguments: argparse.Namespace) -> None:
    """Write what a command line of scripts.export asks for; a ValueError if a folder or a flag is wrong."""
    disable_progress_bar()
    _check_new(arguments.output_path)
    check_trained(arguments)
    root, version, original = arguments.model_path, arguments.transformer_version, None
    if not is_diffusers_layout(root):
        original = read_json(transformer_folder(root, version) / "config.json")
    if arguments.format == "original":
        distilled = sampling_defaults(root, version)["guidance_scale"] == 1 and not (original or {}).get("use_meanflow")
        if distilled and "distilled" not in arguments.output_path.name:
            raise ValueError(
                f"--output_path: the base is distilled and must be sampled without guidance, which in the original "
                f"layout only the folder's name tells: put 'distilled' into '{arguments.output_path.name}'."
            )
    merged = arguments.checkpoint_path or arguments.lora_path
    dtype = torch.float32 if merged else None  # as stored, where nothing is computed
    if arguments.format == "diffusers":
        defaults = sampling_defaults(root, version)
        pipeline = load_pipeline(
            root,
            version,
            pipeline_class=HunyuanVideoGRPOPipeline,
            scheduler=FlowMatchDiscreteScheduler(shift=defaults["shift"]),
            transformer_dtype=dtype,
            encoder_dtype=None,
        )
        _finish(pipeline.transformer, arguments)
        export_diffusers(pipeline, arguments.output_path, guidance_scale=defaults["guidance_scale"])
        return
    transformer = load_transformer(root, version, dtype=dtype)
    _finish(transformer, arguments)
    if arguments.format == "original":
        export_original(transformer, arguments.output_path, original)
    else:
        export_lora(transformer, arguments.output_path, arguments.format)


def _finish(transformer: torch.nn.Module, arguments: argparse.Namespace) -> None:
    """Put the trained weights in, merge an adapter unless it is what is asked for, and round."""
    if arguments.checkpoint_path:
        load_trained_policy(transformer, arguments.checkpoint_path, ema=arguments.ema)
    if arguments.lora_path:
        load_lora(transformer, arguments.lora_path)
    if arguments.format in ("diffusers", "original"):
        merge_lora(transformer)
    if arguments.dtype:
        transformer.to(_DTYPES[arguments.dtype])
        if not all(weight.isfinite().all() for weight in transformer.parameters()):
            raise ValueError(f"--dtype {arguments.dtype}: some weights are too large for it. Take bf16 or fp32.")


def export_diffusers(pipeline: HunyuanVideoGRPOPipeline, folder: Path, *, guidance_scale: float) -> None:
    """Write a whole model to a new folder, which plain diffusers loads and samples as this project does.

    An adapter of the transformer must have been merged. The scheduler's shift is kept, and `guidance_scale` is that of
    the classifier-free guidance that diffusers uses by default.
    """
    with without_diffusers_logs():
        components = pipeline.components | {
            "scheduler": FlowMatchEulerDiscreteScheduler(shift=pipeline.scheduler.config.shift),
            "guider": ClassifierFreeGuidance(guidance_scale=guidance_scale),
        }
        stock_class = HunyuanVideo15ImageToVideoPipeline
        if pipeline.task == "t2v":
            stock_class = HunyuanVideo15Pipeline
            components = {name: components[name] for name in components if name not in pipeline._optional_components}
        stock = stock_class(**components)
        with new_folder(folder) as unfinished:
            stock.save_pretrained(unfinished, max_shard_size=MAX_SHARD_SIZE)


def export_original(
    transformer: HunyuanVideo15Transformer3DModel, folder: Path, config: dict[str, Any] | None = None
) -> None:
    """Write a transformer in the original layout, its adapter merged: a new `ckpts/transformer/<version>`.

    `config` is the config.json of the original version it was trained from; None makes one of the transformer's.
    """
    config = config or original_transformer_config(transformer.config)
    with new_folder(folder) as unfinished:
        (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_torch_state_dict(
            {name: tensor.contiguous() for name, tensor in original_tensors(transformer.state_dict())},
            unfinished,
            filename_pattern="diffusion_pytorch_model{suffix}.safetensors",
            max_shard_size=MAX_SHARD_SIZE,
        )


def export_lora(transformer: HunyuanVideo15Transformer3DModel, folder: Path, naming: str) -> None:
    """Write the adapter of `transformer` as `pytorch_lora_weights.safetensors`.

    The modules have the names that diffusers (`lora`) or the original transformer (`lora_original`) gives them, with
    the settings in the file's metadata, or those of `comfyui` or `musubi`, with an alpha for each module.
    """
    if ADAPTER not in getattr(transformer, "peft_config", {}):
        raise ValueError("There is no LoRA adapter to write: the policy was trained whole. Export its weights instead.")
    with new_folder(folder) as unfinished:
        if naming == "lora":
            save_lora(transformer, unfinished)
            return
        adapter, metadata = get_peft_model_state_dict(transformer, adapter_name=ADAPTER), {"format": "pt"}
        settings = transformer.peft_config[ADAPTER].to_dict()
        if naming == "lora_original":
            tensors, settings = adapter_to_original(adapter, settings)
            metadata[LORA_ADAPTER_METADATA_KEY] = json.dumps(settings, indent=2, sort_keys=True)
        else:
            tensors = adapter_to_kohya(adapter, settings, comfyui=naming == "comfyui")
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, unfinished / ADAPTER_FILE, metadata=metadata)


def _check_new(folder: Path) -> None:
    """Raise a ValueError if `folder` exists, be it as a link to nothing."""
    if os.path.lexists(folder):
        raise ValueError(f"'{folder}' exists already; expected the name of a new folder.")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write in, which gets its name when the block succeeds and disappears otherwise."""
    _check_new(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=".export-") as place:
        unfinished = Path(place) / "unfinished"
        unfinished.mkdir()  # with the rights of any new folder, which the one around it has not
        yield unfinished
        os.replace(unfinished, folder)
