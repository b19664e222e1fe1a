"""Measure a tiny base on ODE samples of held-out prompts: strict hits, raw reward scores, contact sheet."""

import argparse
import csv
from pathlib import Path

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
from matplotlib import image
from torch import Tensor

from hyvideo.models.reward_models.moving_shapes import correct, measure, parse_prompt, raw_scores
from hyvideo.models.vae import allow_batches
from scripts.tiny.components import SHIFT, build_text_encoder, build_tokenizer, encode_prompts
from scripts.tiny.train_transformer import predict_velocity
from scripts.tiny.train_vae import to_videos

LATENT_GRID = (5, 8, 8)
"""Frames, height and width of the latents of a 17-frame 64 x 64 video."""


@torch.no_grad()
def sample_videos(
    transformer: HunyuanVideo15Transformer3DModel,
    vae: AutoencoderKLHunyuanVideo15,
    prompts: list[str],
    num_steps: int,
) -> Tensor:
    """Integrate the flow with `num_steps` Euler steps and no guidance: uint8 videos `[B, F, H, W, 3]`."""
    tokenizer = build_tokenizer()
    text, text_mask = encode_prompts(tokenizer, build_text_encoder(len(tokenizer)), prompts)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(len(prompts), vae.config.latent_channels, *LATENT_GRID, generator=generator)
    linear = torch.linspace(1, 0, num_steps + 1)
    sigmas = SHIFT * linear / (1 + (SHIFT - 1) * linear)
    videos = []
    for sample, words, mask in zip(noise.split(32), text.split(32), text_mask.split(32), strict=True):
        for now, then in zip(sigmas[:-1], sigmas[1:], strict=True):
            velocity = predict_velocity(transformer, sample, now.expand(len(sample)), words, mask)
            sample = sample + (then - now) * velocity
        for latents in (sample / vae.config.scaling_factor).split(8):
            videos.append(to_videos(vae.decode(latents).sample))
    return torch.cat(videos)


def contact_sheet(videos: Tensor, path: Path) -> None:
    """Write five frames of each video side by side as a PNG, two videos to a row."""
    strips = [torch.cat(list(video[:: max(1, (len(video) - 1) // 4)][:5]), dim=1) for video in videos]
    rows = [torch.cat(strips[i : i + 2], dim=1) for i in range(0, len(strips) - 1, 2)]
    image.imsave(path, torch.cat(rows).numpy())


def report(videos: Tensor, prompts: list[str]) -> None:
    """Print the strict hit rate and each metric's raw mean and spread (the reward's CALIBRATION)."""
    seen = measure(videos)
    print(f"strict colour and shape: {correct(videos, prompts).float().mean():.3f} of {len(prompts)}")
    for metric, scores in raw_scores(seen, [parse_prompt(prompt) for prompt in prompts]).items():
        print(f"{metric}: mean {scores.mean():.3f} std {scores.std():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vae", type=Path, default=Path("assets/tiny/vae"))
    parser.add_argument("--transformer", type=Path, default=Path("assets/tiny/transformer"))
    parser.add_argument("--prompts", type=Path, default=Path("assets/tiny/prompts/valid.csv"))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--sheet", type=Path, help="where to write a PNG of the first 24 videos")
    arguments = parser.parse_args()
    with arguments.prompts.open(encoding="utf-8", newline="") as file:
        chosen = [row["prompt"] for row in csv.DictReader(file)][: arguments.count]
    sampled = sample_videos(
        HunyuanVideo15Transformer3DModel.from_pretrained(arguments.transformer),
        allow_batches(AutoencoderKLHunyuanVideo15.from_pretrained(arguments.vae)).eval(),
        chosen,
        arguments.steps,
    )
    report(sampled, chosen)
    if arguments.sheet:
        contact_sheet(sampled[:24], arguments.sheet)
