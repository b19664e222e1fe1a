"""What only sampling does with networks: speed that costs exactness, and weights that visit the GPU block by block.

A replay must repeat a rollout exactly, so training has none of the first: `--enable_compile` is its own.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLHunyuanVideo15, FirstBlockCacheConfig, HunyuanVideo15Transformer3DModel
from diffusers.hooks import apply_group_offloading
from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
from diffusers.models.attention_dispatch import AttentionBackendName, _check_attention_backend_requirements
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15ResnetBlock
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15TransformerBlock
from torch import Tensor, nn

from hyvideo.config.outside import as_value_error
from hyvideo.models.adapter import without_diffusers_logs
from hyvideo.models.parallelize import compile_blocks

FRAMES_AT_ONCE = 8
"""Frames that are normed together where a VAE is offloaded: a norm makes two copies of them in float32."""


def check_backend(name: str) -> None:
    """Refuse, by a ValueError, a backend of diffusers' attention that is unknown or cannot run here.

    Those that download code to run are refused too.
    """
    known = [backend.value for backend in AttentionBackendName if not backend.value.endswith("_hub")]
    if name not in known:
        raise ValueError(f"--attention_backend: expected one of {', '.join(known)}; received {name!r}.")
    with as_value_error(f"--attention_backend {name}", RuntimeError):
        _check_attention_backend_requirements(AttentionBackendName(name))
    if not torch.cuda.is_available() and name not in ("native", "_native_math"):
        raise ValueError(f"--attention_backend {name} needs a GPU; this machine shows none.")


def speed_up(transformer: HunyuanVideo15Transformer3DModel, *, compiled: bool, backend: str | None) -> None:
    """Compile the blocks, and let diffusers attend (`check_backend`); after `install_attention`, before offloading."""
    if backend:
        with without_diffusers_logs():
            transformer.set_attention_backend(backend)
    if compiled:
        compile_blocks(transformer.requires_grad_(False))


def enable_cache(transformer: HunyuanVideo15Transformer3DModel, threshold: float) -> None:
    """In a step in which the first block changes little, leave out the others, and repeat what they added before.

    Little is a mean change below `threshold`, as a share of what the block adds to its tokens. Of the caches that
    diffusers has, this one (`FirstBlockCache`) keeps two tensors instead of one for each block: of a guided 480p video
    of 121 frames 0.8 GB instead of 22. `maybe_free_model_hooks` of the pipeline forgets them.

    Enable it before groups are offloaded: diffusers removes hooks after their first step, and would disable this one.
    """
    about = TransformerBlockMetadata(return_hidden_states_index=0, return_encoder_hidden_states_index=1)
    TransformerBlockRegistry.register(HunyuanVideo15TransformerBlock, about)
    transformer.enable_cache(FirstBlockCacheConfig(threshold))
    transformer.forward = transformer.cache_context("sampling")(transformer.forward)


def offload_blocks(network: nn.Module, device: torch.device, *, pinned: bool = False) -> None:
    """Keep a network in host memory, from where a block visits `device` while the one before it computes.

    The layers around its list of blocks visit together, as does a network without such a list. Blocks that are `pinned`
    are copied while the GPU computes, but take up to twice the room, for PyTorch rounds their sizes up to powers of
    two. Others are brought to a pinned place when they are needed. On a CPU nothing moves.
    """
    apply_group_offloading(
        network, device, num_blocks_per_group=1, use_stream=device.type != "cpu", low_cpu_mem_usage=not pinned
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
