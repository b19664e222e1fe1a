"""The VAE takes batches, and each video comes out as if it had been alone."""

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock

from hyvideo.models.vae import allow_batches


@pytest.fixture(scope="module")
def vae() -> AutoencoderKLHunyuanVideo15:
    torch.manual_seed(0)
    config = {"block_out_channels": (8, 16, 16, 16), "layers_per_block": 0, "latent_channels": 4}
    ratios = {"spatial_compression_ratio": 8, "temporal_compression_ratio": 4}
    return AutoencoderKLHunyuanVideo15(**config, **ratios).eval()


@torch.no_grad()
def test_a_batch_equals_its_videos_one_by_one(vae):
    latents, videos = torch.randn(3, 4, 2, 4, 4), torch.randn(3, 3, 5, 16, 16)
    alone = torch.cat([vae.decode(one).sample for one in latents.split(1)])
    modes = torch.cat([vae.encode(one).latent_dist.mode() for one in videos.split(1)])
    batched = allow_batches(vae)
    torch.testing.assert_close(batched.decode(latents).sample, alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(batched.encode(videos).latent_dist.mode(), modes, atol=1e-5, rtol=1e-5)


def test_the_mask_is_the_stock_mask(vae):
    stock = HunyuanVideo15AttnBlock.prepare_causal_attention_mask(3, 4, torch.float32, "cpu")
    blocks = [module for module in allow_batches(vae).modules() if isinstance(module, HunyuanVideo15AttnBlock)]
    assert blocks
    for block in blocks:
        assert torch.equal(block.prepare_causal_attention_mask(3, 4, torch.float32, "cpu", batch_size=2), stock)
