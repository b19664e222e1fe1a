"""Measure a tiny base on ODE samples of held-out prompts: strict hits, raw scores of the reward, and what is to gain.

With several videos per prompt it says how much of each score's variance lies within prompts, where GRPO looks for it,
and how far the best fifth of the videos and clean rendered clips lie above the mean.

Example: `python -m scripts.tiny.evaluate --model_path assets/tiny --count 231 --per_prompt 4`
"""

import random
import sys
from pathlib import Path

from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from hyvideo.config.flags import Parser
from hyvideo.config.outside import complain
from hyvideo.config.settings import parse_size
from hyvideo.data.prompts import Prompt, read_prompts
from hyvideo.models.attention import install_attention
from hyvideo.models.loading import load_pipeline
from hyvideo.models.reward_models.moving_shapes import correct, measure, parse_prompt, raw_scores
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Guidance, HunyuanVideoGRPOPipeline
from hyvideo.pipelines.sampling import sample_prompts
from hyvideo.pipelines.sampling_defaults import sampling_defaults
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
from scripts.tiny.clips import render, sample_clip

SEED, BATCH = 42, 32


def main(argv: list[str]) -> int:
    """Sample, measure and print; returns the exit status (0 done, 2 wrong input)."""
    disable_progress_bar()
    parser = Parser("tiny.evaluate", description=__doc__)
    parser.add_argument("--model_path", type=Path, default=Path("assets/tiny"), help="its folder; default assets/tiny")
    parser.add_argument("--count", type=int, default=200, help="prompts, the first of its valid.csv; default 200")
    parser.add_argument("--per_prompt", type=int, default=1, help="videos per prompt; default 1")
    arguments = parser.parse_args(argv)
    try:
        texts = [p.text for p in read_prompts([arguments.model_path / "prompts" / "valid.csv"])[: arguments.count]]
        texts *= arguments.per_prompt  # prompt after prompt, and then all again with other noise
        prompts = [Prompt(text, index, None, None) for index, text in enumerate(texts)]
        report(sample_videos(arguments.model_path, prompts), texts, arguments.per_prompt)
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


def report(videos: Tensor, prompts: list[str], per_prompt: int) -> None:
    """Print the strict hit rate, each metric's raw mean and spread (the reward's CALIBRATION), and what is to gain."""
    print(f"strict colour and shape: {correct(videos, prompts).float().mean():.3f} of {len(prompts)}")
    scenes = [parse_prompt(prompt) for prompt in prompts]
    rng = random.Random(SEED)
    clean = raw_scores(measure(render([sample_clip(scene, rng) for scene in scenes])), scenes)
    for metric, scores in raw_scores(measure(videos), scenes).items():
        mean, std = scores.mean(), scores.std()
        best = scores.topk(max(1, len(scores) // 5)).values.mean()
        above = {"the best fifth": best, "clean clips": clean[metric].mean()}
        found = [f"{name} {(level - mean) / std:+.2f} std" for name, level in above.items()]
        if per_prompt > 1:
            found.append(f"{share_within(scores.view(per_prompt, -1).T):.0%} of the variance within prompts")
        print(f"{metric}: mean {mean:.3f} std {std:.3f}; {', '.join(found)}")


def share_within(scores: Tensor) -> float:
    """Return the share of the variance of scores `[prompts, videos]` that lies within prompts, in [0, 1].

    The variance of the prompts' means holds a part of the one within, which is taken off (random effects).
    """
    within = scores.var(1).mean()
    between = (scores.mean(1).var() - within / scores.shape[1]).clamp_min(0)
    return float(within / (within + between))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
