"""Sample videos from a base model, or from what a run trained of it.

Example: `python generate.py --model_path assets/tiny --prompt "a red circle moves slowly left" --output_path red.mp4`
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from hyvideo.checkpoint.policy import load_trained_policy
from hyvideo.config.sizes import parse_size
from hyvideo.data.prompts import Prompt, read_prompts
from hyvideo.data.videos import write_video
from hyvideo.evaluation.sampling import sample_prompts
from hyvideo.models.attention import install_attention
from hyvideo.models.loading import load_pipeline
from hyvideo.models.parallelize import load_lora
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Guidance, HunyuanVideoGRPOPipeline
from hyvideo.pipelines.sampling_defaults import sampling_defaults
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Read the command line; settings that are not given come from the model's own defaults."""
    parser = argparse.ArgumentParser("generate.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model_path", required=True, help="folder of the base model, e.g. assets/tiny")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="one prompt; writes the mp4 --output_path")
    source.add_argument("--prompts_csv", help="CSV with a 'prompt' column; --output_path is then a folder")
    parser.add_argument("--output_path", type=Path, required=True, help="FILE.mp4, or a folder with --prompts_csv")
    trained = parser.add_mutually_exclusive_group()
    trained.add_argument("--checkpoint_path", help="checkpoint of a run: RUN/checkpoints/step_N")
    trained.add_argument("--lora_path", help="folder with pytorch_lora_weights.safetensors")
    parser.add_argument("--seed", type=int, default=42, help="seed of the noise (a CSV's own seeds win); default 42")
    parser.add_argument("--num_inference_steps", type=int, help="denoising steps")
    parser.add_argument("--guidance_scale", type=float, help="classifier-free guidance; 1 is off")
    parser.add_argument("--negative_prompt", default="", help="what guidance leads away from; default empty")
    parser.add_argument("--shift", type=float, help="timestep shift of the schedule")
    parser.add_argument("--fixed_size", help="HEIGHTxWIDTH in pixels, e.g. 480x832")
    parser.add_argument("--video_length", type=int, help="frames, 4 n + 1")
    parser.add_argument("--fps", type=int, default=24, help="frames per second of the file; default 24")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Sample and write; returns the exit status (0 done, 2 wrong input)."""
    disable_progress_bar()
    arguments = parse_arguments(argv)
    try:
        jobs = _jobs(arguments)
        settings = _settings(arguments)
        pipeline = _pipeline(arguments, settings)
        for path, prompt in tqdm(jobs, desc="videos", unit="video", disable=len(jobs) == 1):
            _generate(pipeline, prompt, path, arguments, settings)
    except ValueError as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 2
    return 0


def _jobs(arguments: argparse.Namespace) -> list[tuple[Path, Prompt]]:
    """Pair every prompt with the file to write."""
    path = arguments.output_path
    if arguments.prompt is not None:
        if path.suffix != ".mp4":
            raise ValueError(f"--output_path: expected a file ending in .mp4 for one prompt; received '{path}'.")
        return [(path, Prompt(text=arguments.prompt, index=0, seed=arguments.seed, ref_image_path=None))]
    prompts = read_prompts([arguments.prompts_csv])
    return [(path / f"{i:04d}.mp4", prompt) for i, prompt in enumerate(prompts)]


def _settings(arguments: argparse.Namespace) -> dict:
    """Return the sampling settings: what was given, else the model's defaults."""
    defaults = sampling_defaults(arguments.model_path)
    given = {name: value for name in defaults if (value := getattr(arguments, name)) is not None}
    return {**defaults, **given}


def _pipeline(arguments: argparse.Namespace, settings: dict) -> HunyuanVideoGRPOPipeline:
    """Load the model, with trained weights when asked to, onto the GPU if there is one."""
    on_gpu = torch.cuda.is_available()
    scheduler = FlowMatchDiscreteScheduler(shift=settings["shift"])
    scheduler.set_timesteps(settings["num_inference_steps"])
    pipeline = load_pipeline(
        arguments.model_path,
        pipeline_class=HunyuanVideoGRPOPipeline,
        scheduler=scheduler,
        transformer_dtype=torch.bfloat16 if on_gpu else torch.float32,
        encoder_dtype=torch.float16 if on_gpu else torch.float32,
    )
    if arguments.checkpoint_path:
        load_trained_policy(pipeline.transformer, arguments.checkpoint_path)
    if arguments.lora_path:
        load_lora(pipeline.transformer, arguments.lora_path)
    install_attention(pipeline.transformer.eval())
    pipeline.autocast_dtype = torch.bfloat16 if on_gpu else torch.float32
    return pipeline.to("cuda" if on_gpu else "cpu")


def _generate(
    pipeline: HunyuanVideoGRPOPipeline, prompt: Prompt, path: Path, arguments: argparse.Namespace, settings: dict
) -> None:
    """Write one video, and beside it how it was made."""
    scale = settings["guidance_scale"]
    negative = pipeline.encode([arguments.negative_prompt], glyphs=False) if scale != 1.0 else None
    with tqdm(total=settings["num_inference_steps"], desc=path.name, leave=False) as bar:
        videos = sample_prompts(
            pipeline,
            [prompt],
            Guidance(scale, negative),
            num_frames=settings["video_length"],
            size=parse_size(settings["fixed_size"]),
            seed=arguments.seed,
            batch_size=1,
            on_step=lambda index: bar.update(),
        )
    write_video(path, videos[0], arguments.fps)
    made_by = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    made_by |= settings | {"prompt": prompt.text, "seed": arguments.seed if prompt.seed is None else prompt.seed}
    path.with_suffix(".json").write_text(json.dumps(made_by, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
