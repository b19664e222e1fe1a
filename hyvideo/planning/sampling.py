"""What sampling one video takes of a GPU, rehearsed as `hyvideo.planning.rehearsal` rehearses training.

The code of generate.py encodes a prompt, denoises and decodes at the real sizes. Tensors have no values.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from peft import LoraConfig
from PIL import Image
from torch import Tensor, nn
from torch._C import TensorBase
from torch._subclasses.fake_tensor import FakeTensor
from transformers.modeling_utils import local_torch_dtype

from hyvideo.config.schema import Config
from hyvideo.config.settings import parse_size
from hyvideo.data.prompts import Prompt
from hyvideo.evaluation.generate import place, place_second
from hyvideo.models.adapter import configured_adapter, without_diffusers_logs
from hyvideo.models.attention import install_attention
from hyvideo.models.loading import open_transformer
from hyvideo.models.model_folder import versions_in
from hyvideo.models.upsampler import SRTo720pUpsampler
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Guidance, SampleNoise
from hyvideo.pipelines.super_resolution import STAGES, Stage, SuperResolutionPipeline
from hyvideo.planning.networks import Networks
from hyvideo.planning.own_process import in_own_processes
from hyvideo.planning.pretend_device import PretendDevice
from hyvideo.planning.rehearsal import build_pipeline, give_memory
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler

STEPS = 3
"""Denoising steps that are rehearsed: diffusers finds the order of the groups in the first, and all later are alike."""


class Sampling(NamedTuple):
    """What one video takes, by phase: `encode`, `denoise`, `sharpen` (super-resolution) and `decode`.

    Attributes:
        peaks: the most bytes on the GPU.
        flops: operations of all steps.
    """

    peaks: dict[str, float]
    flops: dict[str, float]


def rehearse_sampling(
    config: Config, networks: Networks, offload: bool | str, num_text: int = 300, *, sr: bool = False
) -> Sampling:
    """Rehearse one video in bfloat16.

    The model, its adapter, and size, length and steps of the video are those of a validation by `config`, with guidance
    where its rollouts have it; `offload` and `sr` are as in generate.py. The second transformer of `sr` is as large as
    the first where its folder is not there. A version or size that cannot be sharpened is a ValueError.
    """
    stage = None
    if sr:
        version = config.model.pretrained_transformer_version.partition("_")[0]
        if version not in STAGES:
            raise ValueError(f"--sr: only versions of {' and '.join(STAGES)} are sharpened; received {version!r}.")
        stage = STAGES[version]
        stage.enlarged(parse_size(config.validation.validation_fixed_size))
    (sampling,) = in_own_processes(_rehearse, [(config, networks, offload, num_text, stage)])
    return sampling


def _second(config: Config, networks: Networks, stage: Stage) -> dict[str, Any]:
    """Return the config of the second transformer: its folder's, or the first's with the channels that it needs."""
    root = Path(config.model.pretrained_model_root)
    if stage.version in versions_in(root):
        return dict(open_transformer(root, stage.version)[0].config)
    first = {name: value for name, value in networks.transformer.items() if name != "_use_default_values"}
    return first | {"in_channels": 3 * first["out_channels"] + 2}


def _resting(config: Mapping[str, Any], adapter: LoraConfig | None = None) -> HunyuanVideo15Transformer3DModel:
    """Make a transformer in bfloat16 that rests in pretended host memory."""
    with local_torch_dtype(torch.bfloat16), without_diffusers_logs(), torch.device("meta"):
        transformer = HunyuanVideo15Transformer3DModel.from_config(dict(config))
        if adapter:
            transformer.add_adapter(adapter)
    give_memory(transformer.eval().requires_grad_(False), "cpu")
    return install_attention(transformer)


def _rehearse(config: Config, networks: Networks, offload: bool | str, num_text: int, stage: Stage | None) -> Sampling:
    validation, adapter = config.validation, configured_adapter(config.model)
    config = replace(config, parallel=replace(config.parallel, offload=["encoders"]))  # until all are placed
    size, scheduler = parse_size(validation.validation_fixed_size), FlowMatchDiscreteScheduler(shift=1.0)
    scheduler.set_timesteps(STEPS)
    moved = patch.object(torch.Tensor, "data", property(TensorBase.data.__get__, _set_data), create=True)
    with TemporaryDirectory() as folder, PretendDevice() as device, torch.no_grad(), moved:
        image = f"{folder}/first.png" if networks.transformer["task_type"] == "i2v" else None
        if image:
            Image.new("RGB", (64, 64)).save(image)
        prompt = Prompt(" a" * num_text, 0, None, image)
        pipeline = build_pipeline(config, networks, _resting(networks.transformer, adapter), vae_on="cpu")
        pipeline.scheduler, pipeline.encoder_offload = scheduler, False
        pipeline.autocast_dtype = torch.bfloat16
        place(pipeline, device.device, offload)
        if stage:
            second = _resting(_second(config, networks, stage))
            hook = place_second(second, device.device, offload)
            components = {**pipeline.components, "transformer": second, "scheduler": scheduler}
            sharpener = SuperResolutionPipeline(**components)
            sharpener.autocast_dtype = torch.bfloat16
            with torch.device(device.device):
                sharpener.upsampler = SRTo720pUpsampler(*[networks.transformer["out_channels"]] * 2)
        device.forget()
        with device.during("encode"):
            guidance = Guidance(config.rollout.cfg_scale, pipeline.encode([""], glyphs=False))
            conditioning = pipeline.encode_prompts([prompt], size)
            pipeline.maybe_free_model_hooks()
        with device.during("denoise"):
            how: dict[str, Any] = {"sde_type": "ode", "eta": 0.0, "only_last": True, "decode": False}
            frames, noise = validation.validate_video_length, SampleNoise([0], "sample", 0, [0], [0])
            made = pipeline.rollout(conditioning, noise, guidance, num_frames=frames, size=size, **how)
            latents = made.latents[:, -1]
            pipeline.maybe_free_model_hooks()
        if stage:
            with device.during("sharpen"):
                latents = sharpener.sharpen(latents, stage.enlarged(size), conditioning, noise)
                if hook:
                    hook.offload()
        with device.during("decode"):
            pipeline.decode(latents)
        steps = {"denoise": validation.validation_num_inference_steps, "sharpen": stage.num_steps if stage else 0}
        phases = ("encode", "denoise", *["sharpen"] * bool(stage), "decode")
        flops = {phase: device.flops[phase] * steps.get(phase, STEPS) / STEPS for phase in phases}
        return Sampling({phase: device.peaks[phase] for phase in phases}, flops)


def _set_data(tensor: Tensor, other: Tensor) -> None:
    """Do what `tensor.data = other` does, also where one of them has no values, to which PyTorch would not agree."""
    if FakeTensor not in (type(tensor), type(other)):
        TensorBase.data.__set__(tensor, other)
        return
    view = other.detach()
    torch.utils.swap_tensors(tensor, nn.Parameter(view, False) if isinstance(tensor, nn.Parameter) else view)
