"""Sample videos from a base model, or from one that a run trained.

Example: `python generate.py --model_path assets/tiny --prompt "a red circle moves slowly left" --output_path red.mp4`

Under torchrun every process makes its share of the videos on its own GPU; with `--sp_size` several share one video.
Settings that are not given are the model's own. Beside every video a JSON note says how it was made; while that note
would be the same, the video is not made again.
"""

import argparse
import os
import re
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from hyvideo.checkpoint.train_state import named_checkpoint
from hyvideo.checkpoint.trained_policy import check_checkpoint, load_trained_policy
from hyvideo.config.flags import Parser
from hyvideo.config.outside import complain, in_words, printable
from hyvideo.config.setting import lies_in
from hyvideo.config.sizes import parse_size
from hyvideo.data.images import check_images, check_task, read_image
from hyvideo.data.prompts import Prompt, read_prompts
from hyvideo.distributed.layout import Layout
from hyvideo.distributed.mesh import Mesh, build_mesh
from hyvideo.distributed.process_group import process_group
from hyvideo.evaluation.generation import FILE_NAMES, Job, jobs_of_csv, jobs_of_prompt
from hyvideo.evaluation.original_command import add_original_flags, boolean, translate
from hyvideo.models.adapter import check_lora, load_lora
from hyvideo.models.attention import install_attention
from hyvideo.models.fingerprint import fingerprint
from hyvideo.models.loading import load_pipeline, read_vae_config
from hyvideo.models.model_folder import check_layout, task_of, transformer_folder
from hyvideo.pipelines.conditioning import Conditioning
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Guidance, HunyuanVideoGRPOPipeline
from hyvideo.pipelines.prompt_lengths import truncated_prompts_warning
from hyvideo.pipelines.resolution import bucket_size, check_video_shape
from hyvideo.pipelines.sampling import sample_prompts
from hyvideo.pipelines.sampling_defaults import sampling_defaults
from hyvideo.schedulers.scheduling_flow_match_discrete import SDE_TYPES, FlowMatchDiscreteScheduler

WAIT_SECONDS = 7200
"""How long processes that share videos wait for each other: two hours, more than any of them takes for one video."""

INTERVALS = {
    "num_inference_steps": "[1, inf)",
    "guidance_scale": "[1, inf)",
    "shift": "(0, inf)",
    "video_length": "[1, inf)",
    "fps": "[1, inf)",
    "eta": "[0, inf)",
    "seed": "[0, 9223372036854775808)",
}
"""The interval each number must lie in; a round bracket leaves its end out."""


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Read the command line; settings that are not given come from the model's own defaults."""
    parser = Parser("generate.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--model_path", required=True, help="folder of the base model, in either layout, e.g. assets/tiny")
    add("--transformer_version", help="transformer in the original layout, e.g. 720p_i2v; default: the only one there")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="one prompt; writes the mp4 --output_path")
    source.add_argument("--prompts_csv", nargs="+", help="CSVs with a 'prompt' column; --output_path is then a folder")
    names = "row: 0000.mp4; vbench: PROMPT-0.mp4, as VBench and VBench-2.0 read them; default row"
    add("--file_names", choices=FILE_NAMES, default="row", help=f"names of a CSV's videos, {names}")
    add("--image_path", type=_or_none, help="image that the video of --prompt starts from (i2v versions)")
    add("--output_path", type=Path, help="FILE.mp4, or a folder with --prompts_csv")
    trained = parser.add_mutually_exclusive_group()
    trained.add_argument(
        "--checkpoint_path", help="RUN/checkpoints/step_N, best or latest, or a checkpoint-N of the original training"
    )
    trained.add_argument("--lora_path", help="folder with an adapter of either layout, or RUN/checkpoints/step_N")
    add("--ema", action="store_true", help="the average of the checkpoint's weights, which runs with ema_decay keep")
    add("--seed", "--seeds", type=int, nargs="+", help="seeds of the noise (overridden by a CSV's); default 42")
    add("--num_inference_steps", type=int, help="denoising steps")
    add("--guidance_scale", type=float, help="classifier-free guidance; 1 is off")
    add("--negative_prompt", default="", help="what guidance steers away from; default empty")
    add("--shift", type=float, help="timestep shift of the schedule")
    add("--fixed_size", type=_or_none, help="HEIGHTxWIDTH in pixels, e.g. 480x848")
    add("--aspect_ratio", help="WIDTH:HEIGHT where --fixed_size is not given; default 16:9, or that of the image")
    add("--video_length", type=int, help="frames, 4 n + 1")
    add("--fps", type=int, default=24, help="frames per second of the file; default 24")
    add("--sde_type", default="ode", choices=sorted(SDE_TYPES), help="denoising step: ode, or one of the rollout's")
    add("--eta", type=float, default=0.5, help="noise level of the other sde types; default 0.5")
    add("--sp_size", type=int, default=1, help="processes that share one video (torchrun); default 1")
    offload = {"type": boolean, "nargs": "?", "const": True, "default": False, "metavar": "BOOL"}
    add("--offload", "--offloading", **offload, help="keep on the GPU only the network that is computing")
    add_original_flags(parser)
    return parser.parse_args(argv)


def _or_none(text: str) -> str | None:
    """Read a value that the word none clears."""
    return None if text.lower() == "none" else text


@dataclass(frozen=True)
class Request:
    """What was asked for, checked before any weight is loaded.

    Attributes:
        arguments: the command line.
        settings: steps, guidance, shift, size and length: what was given, else the model's defaults.
        weights: fingerprint of all that decide a video: base, checkpoint or adapter.
        jobs: this process's share of the videos.
        writes: whether this process writes them; of those that share a video, the first does.
    """

    arguments: argparse.Namespace
    settings: dict[str, Any]
    weights: str
    jobs: list[Job]
    writes: bool


def main(argv: list[str]) -> int:
    """Sample and write; returns the exit status (0 done, 2 wrong input)."""
    disable_progress_bar()
    with ExitStack() as ranks:
        try:
            request = request_of(parse_arguments(argv))
            sp_size = request.arguments.sp_size
            if sp_size > 1:
                ranks.enter_context(process_group(WAIT_SECONDS))
            done = dist.new_group(timeout=timedelta(days=365), backend="gloo") if dist.is_initialized() else None
            mesh = build_mesh(
                sp_size=sp_size,
                guided=request.settings["guidance_scale"] != 1.0,
                device_type=_device().type,
                collective_timeout=WAIT_SECONDS,
            )
            if request.jobs:  # there may be more processes than videos
                _generate_all(request, mesh)
                if request.writes:
                    print(printable(_written(request)))
        except (ValueError, OSError) as error:
            complain(f"generate.py: {in_words(error)}")
            return 2
        if done is not None:
            dist.barrier(done)  # the first process may host what the others meet by, who may have hours to go
    return 0


def _generate_all(request: Request, mesh: Mesh) -> None:
    """Load the model and make this process's share of the videos."""
    for folder in {path.parent for job in request.jobs for path in (job.path, job.note)}:
        folder.mkdir(parents=True, exist_ok=True)  # before minutes of loading and sampling
    pipeline = _pipeline(request, mesh)
    if request.writes and (cut := truncated_prompts_warning(pipeline, [job.prompt for job in request.jobs])):
        complain(f"generate.py: WARNING: {cut}")
    scale = request.settings["guidance_scale"]
    negative = pipeline.encode([request.arguments.negative_prompt], glyphs=False) if scale != 1.0 else None
    for job in tqdm(request.jobs, desc="videos", unit="video", disable=len(request.jobs) < 2):
        _generate(pipeline, job, request, negative)


def _written(request: Request) -> str:
    """Say where the videos of this process lie."""
    first, *others = request.jobs
    if not others:
        return f"wrote {first.path} (and how it was made: {first.note.name})"
    notes = "each with a note of how it was made" if not first.note_apart else f"notes on them to {first.note.parent}"
    return f"wrote {len(request.jobs)} videos to {first.path.parent}, {notes}"


def request_of(arguments: argparse.Namespace) -> Request:
    """Check the command line and read what it names, but no weights; a ValueError says what is wrong."""
    translate(arguments)
    if (arguments.prompt is None) == (arguments.prompts_csv is None):
        raise ValueError("give one of --prompt and --prompts_csv (--help lists all flags).")
    for name in ("prompt", "negative_prompt"):
        try:
            (getattr(arguments, name) or "").encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"--{name}: expected UTF-8; the terminal sent other bytes ({error.reason}).") from error
    if arguments.offload and not torch.cuda.is_available():
        raise ValueError("--offload moves networks between GPU and host memory; this machine shows no GPU.")
    root = check_layout(arguments.model_path, arguments.transformer_version)
    for name in ("checkpoint_path", "lora_path"):
        if given := getattr(arguments, name):
            setattr(arguments, name, str(named_checkpoint(given)))  # what `best` stands for may change
    if arguments.checkpoint_path:
        check_checkpoint(arguments.checkpoint_path, ema=arguments.ema)
    elif arguments.ema:
        raise ValueError("--ema takes the average in a checkpoint: give --checkpoint_path.")
    if arguments.lora_path:
        arguments.lora_path = str(check_lora(arguments.lora_path).parent)
    arguments.seed = list(dict.fromkeys(arguments.seed))
    if arguments.prompt is not None:
        prompt = Prompt(arguments.prompt, index=0, seed=None, ref_image_path=arguments.image_path)
        jobs = jobs_of_prompt(arguments.output_path, prompt, arguments.seed)
    elif arguments.image_path:
        raise ValueError("--image_path goes with --prompt; a CSV names images in its column ref_image_path.")
    else:
        jobs = jobs_of_csv(
            arguments.output_path, read_prompts(arguments.prompts_csv), arguments.seed, arguments.file_names
        )
    prompts = [job.prompt for job in jobs]
    check_task(prompts, task_of(root, arguments.transformer_version))
    check_images(prompts)
    defaults = sampling_defaults(root, arguments.transformer_version)
    given = {name: value for name in defaults if (value := getattr(arguments, name)) is not None}
    settings = {**defaults, **given}
    _check_numbers(arguments, settings, root)
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    layout = Layout(world_size, arguments.sp_size)
    share = [jobs[i] for i in layout.share_to_sample(len(jobs), rank)]
    return Request(arguments, settings, _fingerprint(arguments, root), share, writes=layout.sp_rank(rank) == 0)


def _check_numbers(arguments: argparse.Namespace, settings: dict[str, Any], root: Path) -> None:
    """Refuse numbers that no video can be made with; the ValueError names the flag and what it must be."""
    given = vars(arguments) | settings
    for name, interval in INTERVALS.items():
        for value in given[name] if name == "seed" else [given[name]]:
            if not (isinstance(value, int | float) and lies_in(value, interval)):
                raise ValueError(f"--{name} must be a number in {interval}; received {value!r}.")
    highest = SDE_TYPES[arguments.sde_type].highest_eta
    if arguments.eta > highest:
        raise ValueError(f"--eta must be at most {highest:g} for {arguments.sde_type}; received {arguments.eta}.")
    ratio = arguments.aspect_ratio
    if ratio is not None and not re.fullmatch(r"[1-9]\d*:[1-9]\d*", ratio, re.ASCII):
        raise ValueError(f"--aspect_ratio is WIDTH:HEIGHT in positive whole numbers, as 16:9; received {ratio!r}.")
    vae = read_vae_config(root)
    ratios = {name: vae.get(f"{name}_compression_ratio", usual) for name, usual in (("temporal", 4), ("spatial", 16))}
    try:
        check_video_shape(settings["video_length"], parse_size(settings["fixed_size"]), **ratios)
    except ValueError as error:
        raise ValueError(f"--video_length, --fixed_size: {error}") from error


def _fingerprint(arguments: argparse.Namespace, root: Path) -> str:
    """Return the fingerprint of the weights that decide a video; a path alone does not say what lies there by now."""
    folders = [transformer_folder(root, arguments.transformer_version)]
    of_images = ("image_encoder", "vision_encoder") if task_of(root, arguments.transformer_version) == "i2v" else ()
    folders += [root / name for name in ("vae", "text_encoder", "text_encoder_2", *of_images)]
    trained = arguments.checkpoint_path or arguments.lora_path
    return fingerprint([*folders, Path(trained)] if trained else folders)


def _device() -> torch.device:
    """Return this process's GPU, or the CPU where there is none."""
    return torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu")


def _pipeline(request: Request, mesh: Mesh) -> HunyuanVideoGRPOPipeline:
    """Load the model, with trained weights when asked to, onto this process's device."""
    arguments, device = request.arguments, _device()
    placed = None if arguments.offload else device
    dtype, encoder_dtype = (torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.float32,) * 2
    scheduler = FlowMatchDiscreteScheduler(shift=request.settings["shift"])
    scheduler.set_timesteps(request.settings["num_inference_steps"])
    pipeline = load_pipeline(
        arguments.model_path,
        arguments.transformer_version,
        pipeline_class=HunyuanVideoGRPOPipeline,
        scheduler=scheduler,
        transformer_dtype=dtype,
        encoder_dtype=encoder_dtype,
        device=placed,
        encoders_on=placed,
    )
    if arguments.checkpoint_path:
        load_trained_policy(pipeline.transformer, arguments.checkpoint_path, ema=arguments.ema)
    if arguments.lora_path:
        load_lora(pipeline.transformer, arguments.lora_path)
    install_attention(pipeline.transformer.eval(), mesh.sp_group, mesh.guidance_group)
    pipeline.autocast_dtype = dtype
    if not arguments.offload:
        return pipeline.to(device)
    pipeline.enable_model_cpu_offload(device=device)
    return pipeline


def _generate(pipeline: HunyuanVideoGRPOPipeline, job: Job, request: Request, negative: Conditioning | None) -> None:
    """Write one video and a note of how it was made, unless that is done already."""
    arguments, settings = request.arguments, request.settings
    size = _size(pipeline, job, request)
    note = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    for name in ("offload", "sp_size", "file_names"):  # they change where the video is made, not the video
        del note[name]
    note = {key: value for key, value in note.items() if key != "ema" or value}  # as notes were before it existed
    note |= settings | {"prompt": job.prompt.text, "image_path": job.prompt.ref_image_path, "seed": job.seed}
    note |= {"fixed_size": f"{size[0]}x{size[1]}", "output_path": str(job.path), "weights": request.weights}
    if job.is_finished(note):
        complain(f"{job.path} is finished already")
        return
    with tqdm(total=settings["num_inference_steps"], desc=job.path.name, leave=False) as bar:
        videos = sample_prompts(
            pipeline,
            [job.prompt],
            Guidance(settings["guidance_scale"], negative),
            num_frames=settings["video_length"],
            size=size,
            seed=job.seed,
            batch_size=1,
            sde_type=arguments.sde_type,
            eta=arguments.eta,
            on_step=lambda index: bar.update(),
        )
    pipeline.maybe_free_model_hooks()
    if request.writes:
        job.write(videos[0], arguments.fps, note)


def _size(pipeline: HunyuanVideoGRPOPipeline, job: Job, request: Request) -> tuple[int, int]:
    """Return height and width: those given, else the model's for the ratio given, of the image, or 16:9."""
    arguments, image = request.arguments, job.prompt.ref_image_path
    if arguments.fixed_size or not (arguments.aspect_ratio or image):
        return parse_size(request.settings["fixed_size"])
    if arguments.aspect_ratio:
        width, height = arguments.aspect_ratio.split(":")
    else:
        width, height = read_image(image).size
    target = pipeline.transformer.config.target_size
    return bucket_size(target, pipeline.vae_scale_factor_spatial, width=int(width), height=int(height))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
