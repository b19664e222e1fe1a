"""Pipelines over the tiny random model, ours and the stock one, and what to feed them."""

from pathlib import Path

from diffusers import HunyuanVideo15Pipeline

from hyvideo.models.attention import install_attention
from hyvideo.models.loading import load_pipeline
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import HunyuanVideoGRPOPipeline, SampleNoise
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
from tests.support.tiny_model import SHIFT

NUM_STEPS = 4
VIDEO = {"num_frames": 5, "size": (32, 32)}
"""The smallest video with more than one latent frame."""

PROMPTS = (
    "a red circle moves slowly to the left",
    'a blue square with the sign "open" drifts quickly downwards past a "shop" that reads "open"',
    "green cross",
)
"""Of three lengths, one with quoted texts."""


def load_tiny_pipeline(root: Path, version: str | None = None) -> HunyuanVideoGRPOPipeline:
    scheduler = FlowMatchDiscreteScheduler(shift=SHIFT)
    scheduler.set_timesteps(NUM_STEPS)
    pipeline = load_pipeline(root, version, pipeline_class=HunyuanVideoGRPOPipeline, scheduler=scheduler)
    install_attention(pipeline.transformer.eval())
    return pipeline


def load_stock_pipeline(root: Path, crop: int) -> HunyuanVideo15Pipeline:
    """Load the pipeline as diffusers ships it; `crop` replaces its hard-coded 108 tokens of the real tokenizer."""
    pipeline = HunyuanVideo15Pipeline.from_pretrained(root)
    pipeline.prompt_template_encode_start_idx = crop
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def noise_of(count: int) -> SampleNoise:
    """Noise of `count` samples, each of its own prompt."""
    return SampleNoise(seeds=[3] * count, stream="test", round=0, prompts=list(range(count)), generations=[0] * count)
