"""The stock VAE made to take several videos at once, as fast as the machine's convolutions allow."""

import torch
from diffusers import AutoencoderKLHunyuanVideo15
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock
from torch import Tensor, nn


def allow_batches(vae: AutoencoderKLHunyuanVideo15) -> AutoencoderKLHunyuanVideo15:
    """Make the attention mask broadcast over a batch (as shipped it raises for more than one video), in place.

    Conv3d weights become channels-last: on a CPU two small videos decode together in less time than one alone.
    """
    for module in vae.modules():
        if isinstance(module, nn.Conv3d):
            module.to(memory_format=torch.channels_last_3d)
        if isinstance(module, HunyuanVideo15AttnBlock):
            module.prepare_causal_attention_mask = _causal_mask
    return vae


def _causal_mask(
    num_frames: int, tokens_per_frame: int, dtype: torch.dtype, device: torch.device, batch_size: int | None = None
) -> Tensor:
    """Additive mask `[N, N]`, N tokens in frame order: a token sees its own frame and those before it."""
    frame = torch.arange(num_frames, device=device).repeat_interleave(tokens_per_frame)
    later = frame[None, :] > frame[:, None]
    return torch.zeros(later.shape, dtype=dtype, device=device).masked_fill(later, -torch.inf)
