"""Sampling a list of prompts, for validation, comparison and `generate.py`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hyvideo.data.prompts import Prompt
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Guidance, HunyuanVideoGRPOPipeline
from hyvideo.pipelines.noise import SampleNoise


def sample_prompts(
    pipeline: HunyuanVideoGRPOPipeline,
    prompts: Sequence[Prompt],
    guidance: Guidance,
    *,
    num_frames: int,
    size: tuple[int, int],
    seed: int,
    batch_size: int,
    sde_type: str = "ode",
    eta: float = 0.0,
    on_step: Callable[[int], None] = lambda index: None,
) -> Tensor:
    """Sample one video per prompt, with the ODE unless told otherwise: `[N, F, H, W, 3]` uint8 on the CPU.

    A prompt with its own seed starts from the noise of that seed only; the others from that of `seed` and their index.
    The videos depend on `batch_size` only by rounding.

    Args:
        pipeline: its scheduler's steps set.
        prompts: N prompts.
        guidance: scale and negative conditioning.
        num_frames: frames per video, 4 n + 1.
        size: height and width in pixels.
        seed: base seed.
        batch_size: videos denoised together.
        sde_type: `ode`, or a rollout's transition to look at, see `HunyuanVideoGRPOPipeline.denoise_step`.
        eta: noise level of the SDE.
        on_step: called with the index of every finished denoising step of every batch.
    """
    videos = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        noise = SampleNoise(
            seeds=[seed if prompt.seed is None else prompt.seed for prompt in batch],
            stream="sample",
            round=0,
            prompts=[prompt.noise_index for prompt in batch],
            generations=[0] * len(batch),
        )
        conditioning = pipeline.encode_prompts(batch, size)
        pipeline.maybe_free_model_hooks()  # offloaded encoders leave the GPU: each would wait for the next one
        how = {"num_frames": num_frames, "size": size, "sde_type": sde_type, "eta": eta, "on_step": on_step}
        videos.append(pipeline.rollout(conditioning, noise, guidance, **how, only_last=True).videos)
    return torch.cat(videos)
