"""What only sampling does with networks: weights that visit the GPU block by block, and steps that are left out."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLHunyuanVideo15
from diffusers.hooks import apply_group_offloading
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15ResnetBlock
from torch import Tensor, nn

FRAMES_AT_ONCE = 8
"""Frames that are normed together where a VAE is offloaded: a norm makes two copies of them in float32."""


def offload_blocks(network: nn.Module, device: torch.device, *, pinned: bool = False) -> None:
    """Keep a network in host memory, from where a block visits `device` while the one before it computes.

    The layers around its list of blocks visit together, as does a network without such a list. Blocks that are `pinned`
    are copied while the GPU computes, but take up to twice the room, for PyTorch rounds their sizes up to powers of
    two. Others are brought to a pinned place when they are needed. On a CPU nothing moves.
    """
    apply_group_offloading(
        network,
        device,
        num_blocks_per_group=1,
        use_stream=device.type != "cpu",
        low_cpu_mem_usage=not pinned,
    )


def offload_vae(vae: AutoencoderKLHunyuanVideo15, device: torch.device) -> None:
    """Offload the blocks of encoder and decoder, and decode the same pixels in two thirds of the memory."""
    for part in (vae.encoder, vae.decoder):
        offload_blocks(part, device)
    norm = vae.decoder.norm_out
    norm.forward = partial(_over_frames, norm.forward)
    for module in vae.decoder.modules():
        if isinstance(module, HunyuanVideo15ResnetBlock):
            module.forward = partial(_resnet, module)


def _over_frames(function: Callable[[Tensor], Tensor], hidden: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute a function of every frame of `[B, C, F, H, W]`, a few at a time, into `out` (None: a new tensor)."""
    out = torch.empty_like(hidden) if out is None else out
    for frames, place in zip(hidden.split(FRAMES_AT_ONCE, dim=2), out.split(FRAMES_AT_ONCE, dim=2), strict=True):
        place.copy_(function(frames))
    return out


def _resnet(block: HunyuanVideo15ResnetBlock, hidden: Tensor) -> Tensor:
    """Return what the stock forward pass does, but write what enters a convolution straight to its padded place."""
    residual = hidden if block.conv_shortcut is None else block.conv_shortcut(hidden)
    for norm, conv in ((block.norm1, block.conv1), (block.norm2, block.conv2)):
        *sides, before, _ = conv.time_causal_padding
        batch, channels, *size = hidden.shape
        padded_size = (before + size[0], size[1] + sum(sides[2:]), size[2] + sum(sides[:2]))
        like = {"dtype": hidden.dtype, "device": hidden.device, "memory_format": torch.channels_last_3d}
        padded = torch.empty(batch, channels, *padded_size, **like)

        def entering(frames: Tensor, norm: nn.Module = norm, sides: Sequence[int] = sides) -> Tensor:
            """Norm and activate frames, and repeat their outermost pixels."""
            return F.pad(block.nonlinearity(norm(frames)), (*sides, 0, 0), mode="replicate")

        _over_frames(entering, hidden, padded[:, :, before:])
        padded[:, :, :before] = padded[:, :, before : before + 1]
        del hidden
        hidden = conv.conv(padded)
        del padded
    return hidden.add_(residual)
