"""The VAE takes batches, and each video comes out as if it had been alone."""

import torch
from diffusers import AutoencoderKLHunyuanVideo15

from hyvideo.models.loading import allow_batches


@torch.no_grad()
def test_a_batch_equals_its_videos_one_by_one_in_the_stock_vae():
    torch.manual_seed(0)
    config = {"block_out_channels": (8, 16, 16, 16), "layers_per_block": 0, "latent_channels": 4}
    ratios = {"spatial_compression_ratio": 8, "temporal_compression_ratio": 4}
    vae = AutoencoderKLHunyuanVideo15(**config, **ratios).eval()
    latents, videos = torch.randn(3, 4, 2, 4, 4), torch.randn(3, 3, 5, 16, 16)
    alone = torch.cat([vae.decode(one).sample for one in latents.split(1)])
    modes = torch.cat([vae.encode(one).latent_dist.mode() for one in videos.split(1)])
    batched = allow_batches(vae)
    torch.testing.assert_close(batched.decode(latents).sample, alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(batched.encode(videos).latent_dist.mode(), modes, atol=1e-5, rtol=1e-5)
