"""Train the tiny VAE on rendered clips, then set its scaling factor so that latents have unit spread."""

import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLHunyuanVideo15

from hyvideo.models.loading import allow_batches
from hyvideo.models.reward_models.moving_shapes import Scene
from scripts.tiny.clips import SIZE, render, sample_mixed_clip, sample_varied_clip
from scripts.tiny.prompts import TRAIN_SCENES, VALID_SCENES

CONFIG = {
    "block_out_channels": (8, 32, 64, 64),
    "layers_per_block": 0,
    "latent_channels": 8,
    "spatial_compression_ratio": 8,
    "temporal_compression_ratio": 4,
    "scaling_factor": 1.0,
}
MEAN_WEIGHT = 1e-3
"""Weight of the squared latents against the reconstruction error on [-1, 1]: keeps them near zero mean, unit scale."""

SHAPE_WEIGHT = 4.0
"""Extra weight of pixels that differ from the clip's corner: shapes cover a twentieth of the frame."""

LATENT_NOISE = 0.1
"""Std of the posterior, held fixed: neighbouring latents must decode alike, and a larger scale is no way out."""


@dataclass(frozen=True)
class Stage:
    """A stretch of the training: until `until` (share of the whole), on clips of this length, size and variety."""

    until: float
    batch: int
    num_frames: int
    size: int
    varied: float


STAGES = (
    Stage(0.4, batch=16, num_frames=5, size=32, varied=0.0),
    Stage(0.5, batch=8, num_frames=9, size=48, varied=0.25),
    Stage(0.75, batch=8, num_frames=17, size=32, varied=0.15),
    Stage(1.0, batch=4, num_frames=17, size=SIZE, varied=0.25),
)
"""Small, short crops first: cheap steps in which the shape fills a quarter of the frame."""

NUM_STEPS = 4500
"""About 25 minutes on 2 CPU cores that multiply bf16 in hardware, several times as long on others."""

LEARNING_RATE = 1.5e-3
"""Of AdamW after 50 steps; it falls along half a cosine to 0."""


def to_network(videos: torch.Tensor) -> torch.Tensor:
    """Uint8 [B, F, H, W, 3] -> float [B, 3, F, H, W] in [-1, 1]."""
    return videos.permute(0, 4, 1, 2, 3).float().div(127.5).sub(1).contiguous(memory_format=torch.channels_last_3d)


def training_batch(rng: random.Random, scenes: list[Scene], stage: Stage) -> torch.Tensor:
    """Clips cropped around their shape, as uint8 [B, F, H, W, 3]; `stage.varied` of them leave the vocabulary."""
    varied = round(stage.batch * stage.varied)
    clips = [sample_mixed_clip(rng.choice(scenes), rng) for _ in range(stage.batch - varied)]
    clips += [sample_varied_clip(rng) for _ in range(varied)]
    videos = render(clips, stage.num_frames)
    if stage.size == SIZE:
        return videos
    crops = []
    for clip, video in zip(clips, videos, strict=True):
        y, x = (round(clip.start[axis] + rng.uniform(-12, 12) - stage.size / 2) for axis in (1, 0))
        y, x = (min(max(corner, 0), SIZE - stage.size) for corner in (y, x))
        crops.append(video[:, y : y + stage.size, x : x + stage.size])
    return torch.stack(crops)


@torch.no_grad()
def held_out_psnr(vae: AutoencoderKLHunyuanVideo15, num_clips: int = 32) -> tuple[float, torch.Tensor]:
    """Mean PSNR in dB of reconstructed held-out scenes (from the posterior mode), and their latents."""
    rng = random.Random(1)
    videos = render([sample_mixed_clip(rng.choice(VALID_SCENES), rng) for _ in range(num_clips)])
    latents = torch.cat([vae.encode(to_network(part)).latent_dist.mode() for part in videos.split(8)])
    decoded = torch.cat([vae.decode(part).sample.float() for part in latents.split(8)]).permute(0, 2, 3, 4, 1)
    error = (decoded.add(1).mul(127.5).round().clamp(0, 255) - videos.float()).square().flatten(1).mean(1)
    return (10 * torch.log10(255.0**2 / error)).mean().item(), latents


def loss_of(vae: AutoencoderKLHunyuanVideo15, frames: torch.Tensor) -> torch.Tensor:
    """Reconstruction error from noisy latents, plus penalties that keep the posterior near unit scale."""
    with torch.autocast("cpu", torch.bfloat16):
        mean, logvar = vae.encoder(frames).float().chunk(2, dim=1)
        decoded = vae.decoder(mean + LATENT_NOISE * torch.randn_like(mean))
    error = decoded.float() - frames
    weight = 1 + SHAPE_WEIGHT * (frames - frames[..., :1, :1]).abs().amax(1, keepdim=True).gt(0.05)
    spread = (logvar - 2 * math.log(LATENT_NOISE)).square().mean()
    return (weight * (error.abs() + error.square())).mean() + MEAN_WEIGHT * mean.square().mean() + 1e-4 * spread


def train(output: Path) -> None:
    """Train a new VAE by STAGES and save it to `output`."""
    torch.manual_seed(0)
    rng = random.Random(0)
    vae = allow_batches(AutoencoderKLHunyuanVideo15(**CONFIG))
    optimizer = torch.optim.AdamW(vae.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=1e-4)
    begin = time.monotonic()
    for step in range(1, NUM_STEPS + 1):
        progress = (step - 1) / NUM_STEPS
        stage = next(stage for stage in STAGES if progress < stage.until)
        frames = to_network(training_batch(rng, TRAIN_SCENES, stage))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, step / 50) * 0.5 * (1 + math.cos(math.pi * progress))
        loss = loss_of(vae, frames)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f} elapsed {time.monotonic() - begin:.0f}s", flush=True)
        if step % 500 == 0:
            psnr, latents = held_out_psnr(vae)
            print(f"step {step} psnr {psnr:.2f} latents {latents.mean():.3f} +- {latents.std():.3f}", flush=True)
    psnr, latents = held_out_psnr(vae)
    vae.register_to_config(scaling_factor=round(1 / latents.std().item(), 5))
    vae.save_pretrained(output)
    print(f"done: {NUM_STEPS} steps, held-out PSNR {psnr:.2f} dB, latent mean {latents.mean():.3f}", flush=True)
