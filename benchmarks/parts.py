"""Parts of a step besides the transformer, each against the plain way: transition, encoding, decoding, scoring, AdamW.

Example: `python -m benchmarks.parts`
"""

import math
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from diffusers import HunyuanVideo15Pipeline
from torch import Tensor
from torch.optim import AdamW

from benchmarks.paired import Result, compare, device, print_results
from hyvideo.data.prompts import read_prompts
from hyvideo.data.videos import read_video, write_video
from hyvideo.models.loading import load_pipeline
from hyvideo.models.reward_models.moving_shapes import MovingShapesReward
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import HunyuanVideoGRPOPipeline
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler

ROOT = Path(__file__).parents[1] / "assets" / "tiny"
LATENT_SHAPE = (32, 21, 44, 78)
"""Of a video of 81 frames of 352x624."""

NUM_VIDEOS = 8
FPS = 24


def measure() -> list[Result]:
    """Measure every part on this machine."""
    stock = HunyuanVideo15Pipeline.from_pretrained(ROOT, torch_dtype=torch.float32).to(device())
    ours = load_pipeline(ROOT, pipeline_class=HunyuanVideoGRPOPipeline, scheduler=FlowMatchDiscreteScheduler())
    ours.to(device())
    latents = torch.randn(NUM_VIDEOS, 8, 5, 8, 8, generator=torch.Generator().manual_seed(0)).to(device())
    videos = ours.decode(latents)
    texts = [prompt.text for prompt in read_prompts([ROOT / "prompts" / "valid.csv"])]
    around = [_encode(stock, ours, texts), _decode(stock, ours, latents), _score(videos, texts)]
    return [_transition(), *around, _adamw(ours)]


def _transition() -> Result:
    """Compare one step and its log-probability with the formulas written out."""
    scheduler = FlowMatchDiscreteScheduler()
    scheduler.set_timesteps(20)
    generator = torch.Generator().manual_seed(0)
    sample, velocity, noise = (torch.randn(1, *LATENT_SHAPE, generator=generator).to(device()) for _ in range(3))
    sigma, sigma_next = scheduler.sigmas[7:9].tolist()
    delta = sigma - sigma_next
    variance = 0.25 * (math.log((1 - sigma_next) / (1 - sigma)) - delta)

    def plain() -> Tensor:
        """x0, score, mean, noise and density as the paper writes them."""
        clean = sample - sigma * velocity
        score = -(sample - (1 - sigma) * clean) / sigma**2
        mean = sample - delta * velocity + 0.5 * variance * score
        following = mean + math.sqrt(variance) * noise
        density = -((following - mean) ** 2) / (2 * variance) - 0.5 * math.log(2 * math.pi * variance)
        return density.mean(dim=tuple(range(1, density.ndim)))

    def ours() -> Tensor:
        """The same through the scheduler."""
        mean, std = scheduler.transition(velocity, sample, 7, sde_type="sage_grpo", eta=0.5)
        following = scheduler.sample_next(mean, std, noise)
        return scheduler.log_prob(following, mean, std, sde_type="sage_grpo")

    facts = {"error": float((plain() - ours()).abs().max())}
    return compare("parts/transition", "formulas written out / three numbers per step", plain, ours, facts=facts)


def _encode(stock: HunyuanVideo15Pipeline, ours: HunyuanVideoGRPOPipeline, texts: list[str]) -> Result:
    """Compare encoding two prompts once with encoding them, padded, for each of eight videos."""
    pair = texts[:2]

    @torch.no_grad()
    def per_video() -> None:
        """Encode as a pipeline call per video does."""
        for text in pair * (NUM_VIDEOS // 2):
            stock.encode_prompt(text, device=device())

    return compare("parts/text_encoding", "per video, padded / per prompt", per_video, lambda: ours.encode(pair))


def _decode(stock: HunyuanVideo15Pipeline, ours: HunyuanVideoGRPOPipeline, latents: Tensor) -> Result:
    """Compare decoding small videos together with decoding them one by one through the stock VAE."""

    @torch.no_grad()
    def one_by_one() -> list[Tensor]:
        """Decode each video alone."""
        return [stock.vae.decode(row[None] / stock.vae.config.scaling_factor).sample for row in latents]

    return compare(
        "parts/vae_decode", f"{NUM_VIDEOS} small videos one by one / together", one_by_one, lambda: ours.decode(latents)
    )


def _score(videos: Tensor, texts: list[str]) -> Result:
    """Compare scoring frames together with writing, reading and scoring each video."""
    reward = MovingShapesReward()
    prompts = texts[: len(videos)]

    def through_files() -> None:
        """Score each video from its mp4."""
        with TemporaryDirectory() as folder:
            for number, (video, prompt) in enumerate(zip(videos, prompts, strict=True)):
                path = Path(folder) / f"{number}.mp4"
                write_video(path, video, FPS)
                reward(read_video(path)[None], [prompt])

    return compare(
        "parts/reward", "one by one through mp4 / frames in memory", through_files, lambda: reward(videos, prompts)
    )


def _adamw(pipeline: HunyuanVideoGRPOPipeline) -> Result:
    """Compare AdamW's fused step with its default."""
    optimizers = []
    for fused in (None, True):
        parameters = [torch.nn.Parameter(p.detach().clone()) for p in pipeline.transformer.parameters()]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizers.append(AdamW(parameters, lr=1e-5, fused=fused))
    default, fused = (optimizer.step for optimizer in optimizers)
    return compare("parts/adamw", "default / fused", default, fused, pairs=15)


if __name__ == "__main__":
    print_results(measure())
