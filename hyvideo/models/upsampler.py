"""The latent upsamplers of HunyuanVideo-1.5's super-resolution: what refines latents after they were enlarged.

Neither changes the size of its input. Both are causal in time, and made of the VAE's layers. The folder of the original
layout, `upsampler/<version>`, names the class in its config.json.
"""

from pathlib import Path

import torch
from accelerate import init_empty_weights
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import (
    HunyuanVideo15CausalConv3d,
    HunyuanVideo15ResnetBlock,
    HunyuanVideo15RMS_norm,
)
from torch import Tensor, nn
from torch.nn import functional

from hyvideo.models.conversion import Part
from hyvideo.models.model_folder import check_component, check_values, local_folder, read_json, readable
from hyvideo.models.weight_files import SafetensorsFolder, fill


def enlarge(latents: Tensor, size: tuple[int, int]) -> Tensor:
    """Enlarge every frame of latents `[B, C, F', H', W']` to `size` (height, width), bilinearly."""
    return functional.interpolate(latents, (latents.shape[2], *size), mode="trilinear", align_corners=False)


class SRTo720pUpsampler(nn.Module):
    """Residual blocks without norms, from 480p to 720p; the attributes are named as the files name their tensors."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        hidden_channels: int | None = 64,
        num_blocks: int = 6,
        global_residual: bool = False,
    ) -> None:
        super().__init__()
        hidden = hidden_channels or 64
        self.in_conv = HunyuanVideo15CausalConv3d(in_channels, hidden)
        self.blocks = nn.ModuleList(_Block(hidden) for _ in range(num_blocks))
        self.out_conv = HunyuanVideo15CausalConv3d(hidden, out_channels)
        self.global_residual = global_residual and in_channels == out_channels

    def forward(self, latents: Tensor) -> Tensor:
        """Refine latents `[B, C, F', H', W']` float32."""
        hidden = self.in_conv(latents)
        for block in self.blocks:
            hidden = hidden + block.block(hidden)
        refined = self.out_conv(hidden)
        return refined + latents if self.global_residual else refined


class _Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        first, second, third = (HunyuanVideo15CausalConv3d(channels, channels) for _ in range(3))
        self.block = nn.Sequential(first, nn.SiLU(), second, nn.SiLU(), third)


class SRTo1080pUpsampler(nn.Module):
    """The VAE's residual blocks, from 720p to 1080p; `is_residual` is in the files and has no effect."""

    def __init__(
        self,
        z_channels: int,
        out_channels: int,
        block_out_channels: list[int],
        num_res_blocks: int = 2,
        is_residual: bool = False,
    ) -> None:
        super().__init__()
        width = block_out_channels[0]
        self.repeats = width // z_channels
        self.conv_in = HunyuanVideo15CausalConv3d(z_channels, width)
        self.up = nn.ModuleList()
        for channels in block_out_channels:
            level = nn.Module()
            widths = [width, *[channels] * num_res_blocks]
            level.block = nn.ModuleList(HunyuanVideo15ResnetBlock(entering, channels) for entering in widths)
            self.up.append(level)
            width = channels
        self.norm_out = HunyuanVideo15RMS_norm(width, images=False)
        self.conv_out = HunyuanVideo15CausalConv3d(width, out_channels)

    def forward(self, latents: Tensor) -> Tensor:
        """Refine latents `[B, C, F', H', W']` float32."""
        hidden = self.conv_in(latents) + latents.repeat_interleave(self.repeats, dim=1)
        for level in self.up:
            for block in level.block:
                hidden = block(hidden)
        return self.conv_out(functional.silu(self.norm_out(hidden)))


CLASSES = {one.__name__: one for one in (SRTo720pUpsampler, SRTo1080pUpsampler)}


def load_upsampler(folder: str | Path, *, device: torch.device | None = None) -> nn.Module:
    """Load the upsampler in `folder`, frozen and in float32, onto `device` (None: host memory).

    It maps latents `[B, C, F', H', W']` to refined ones. A folder that is damaged or of another class is a ValueError.
    """
    folder = local_folder(folder, "upsampler")
    check_component(folder)
    path = folder / "config.json"
    config = read_json(path)
    check_values(config, path)
    name = config.get("_class_name")
    if name not in CLASSES:
        raise ValueError(f"'{path}': _class_name must be one of {', '.join(CLASSES)}; received {name!r}.")
    arguments = {key: value for key, value in config.items() if not key.startswith("_")}
    with readable(path, name), init_empty_weights():
        upsampler = CLASSES[name](**arguments)
    fill(
        upsampler,
        SafetensorsFolder(folder),
        lambda ours: Part(ours.replace(".conv_shortcut.", ".nin_shortcut.")),
        dtype=torch.float32,
        device=device,
    )
    return upsampler.eval().requires_grad_(False)
