"""Measure a tiny base on ODE samples of held-out prompts: strict hits, and raw scores of the reward.

Example: `python -m scripts.tiny.evaluate --model_path assets/tiny`
"""

import argparse
import sys
from pathlib import Path

from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from hyvideo.config.outside import complain
from hyvideo.config.sizes import parse_size
from hyvideo.data.prompts import Prompt, read_prompts
from hyvideo.models.attention import install_attention
from hyvideo.models.loading import load_pipeline
from hyvideo.models.reward_models.moving_shapes import correct, measure, parse_prompt, raw_scores
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Guidance, HunyuanVideoGRPOPipeline
from hyvideo.pipelines.sampling import sample_prompts
from hyvideo.pipelines.sampling_defaults import sampling_defaults
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler

SEED, BATCH = 42, 32


def main(argv: list[str]) -> int:
    """Sample, measure and print; returns the exit status (0 done, 2 wrong input)."""
    disable_progress_bar()
    parser = argparse.ArgumentParser("tiny.evaluate", description=__doc__)
    parser.add_argument("--model_path", type=Path, default=Path("assets/tiny"), help="its folder; default assets/tiny")
    parser.add_argument("--count", type=int, default=200, help="prompts, the first of its valid.csv; default 200")
    arguments = parser.parse_args(argv)
    try:
        prompts = read_prompts([arguments.model_path / "prompts" / "valid.csv"])[: arguments.count]
        report(sample_videos(arguments.model_path, prompts), [prompt.text for prompt in prompts])
    except ValueError as error:
        complain(f"tiny.evaluate: {error}")
        return 2
    return 0


def sample_videos(root: Path, prompts: list[Prompt]) -> Tensor:
    """Sample one video per prompt, from the noise that `generate.py` takes too: uint8 `[B, F, H, W, 3]`."""
    settings = sampling_defaults(root)
    scheduler = FlowMatchDiscreteScheduler(shift=settings["shift"])
    scheduler.set_timesteps(settings["num_inference_steps"])
    pipeline = load_pipeline(root, pipeline_class=HunyuanVideoGRPOPipeline, scheduler=scheduler)
    install_attention(pipeline.transformer)
    return sample_prompts(
        pipeline,
        prompts,
        Guidance(settings["guidance_scale"]),
        num_frames=settings["video_length"],
        size=parse_size(settings["fixed_size"]),
        seed=SEED,
        batch_size=BATCH,
    )


def report(videos: Tensor, prompts: list[str]) -> None:
    """Print the strict hit rate and each metric's raw mean and spread (what the reward's CALIBRATION holds)."""
    print(f"strict colour and shape: {correct(videos, prompts).float().mean():.3f} of {len(prompts)}")
    for metric, scores in raw_scores(measure(videos), [parse_prompt(prompt) for prompt in prompts]).items():
        print(f"{metric}: mean {scores.mean():.3f} std {scores.std():.3f}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
