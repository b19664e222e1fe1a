"""The work of generate.py: check what is asked for, load the model, sample and write."""

import argparse
import hashlib
import os
import re
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import cpu_offload_with_hook
from accelerate.hooks import UserCpuOffloadHook
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from hyvideo.checkpoint.trained_policy import check_trained, load_trained_policy
from hyvideo.config.outside import as_value_error, complain, printable
from hyvideo.config.settings import lies_in, parse_size
from hyvideo.data.files import check_output
from hyvideo.data.prompts import Prompt, read_prompts
from hyvideo.data.videos import check_images, read_image, write_video
from hyvideo.distributed.mesh import Layout, Mesh, build_mesh, process_group
from hyvideo.evaluation.jobs import Job, jobs_of_csv, jobs_of_prompt
from hyvideo.evaluation.rewriting import INSTRUCTION, rewritten
from hyvideo.models.adapter import PEFT_SETTINGS, check_lora, load_lora
from hyvideo.models.attention import install_attention
from hyvideo.models.inference import check_backend, enable_cache, offload_blocks, offload_vae, speed_up
from hyvideo.models.loading import load_pipeline, load_transformer, read_vae_config
from hyvideo.models.model_folder import task_of, transformer_folder
from hyvideo.models.reward_models.registry import RewardContext, RewardFailureError
from hyvideo.models.reward_models.remote.exchange import ChatServer, Fault
from hyvideo.models.upsampler import load_upsampler
from hyvideo.models.weight_files import fingerprint
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import (
    Conditioning,
    Guidance,
    HunyuanVideoGRPOPipeline,
    SampleNoise,
    check_task,
    check_video_shape,
)
from hyvideo.pipelines.sampling import sampled, truncated_prompts_warning
from hyvideo.pipelines.sampling_defaults import bucket_size, sampling_defaults
from hyvideo.pipelines.super_resolution import SHIFT, Stage, SuperResolutionPipeline, stage_of
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler, flavour_of

WAIT_SECONDS = 7200
"""How long processes that share videos wait for each other: two hours, more than any of them takes for one video."""

INTERVALS = {
    "num_inference_steps": "[1, inf)",
    "guidance_scale": "[1, inf)",
    "shift": "(0, inf)",
    "video_length": "[1, inf)",
    "sr_num_inference_steps": "[1, inf)",
    "cache": "(0, inf)",
    "fps": "[1, inf)",
    "eta": "[0, inf)",
    "seed": "[0, 9223372036854775808)",
}
"""The interval each number must lie in; a round bracket leaves its end out."""


@dataclass(frozen=True)
class Request:
    """What was asked for, checked before any weight is loaded.

    `settings` are steps, guidance, shift, size and length: what was given, else the model's defaults. `weights` is the
    fingerprint of all that decide a video: base, checkpoint or adapter. `jobs` are this process's share of the videos,
    and `writes` says whether it writes them; of those that share a video, the first does. `stage` says how they are
    sharpened afterwards, if they are.
    """

    arguments: argparse.Namespace
    settings: dict[str, Any]
    weights: str
    jobs: list[Job]
    writes: bool
    stage: Stage | None


def generate(arguments: argparse.Namespace) -> None:
    """Make the videos of a command line that was read by generate.py, this process its share of them.

    A file, number or combination of flags that is wrong is a ValueError before weights are loaded.
    """
    disable_progress_bar()
    with ExitStack() as ranks:
        request = request_of(arguments)
        if arguments.rewrite_prompt:
            request = _with_rewritten_prompt(request)
        sp_size = arguments.sp_size
        if sp_size > 1:
            ranks.enter_context(process_group(WAIT_SECONDS))
        done = dist.new_group(timeout=timedelta(days=365), backend="gloo") if dist.is_initialized() else None
        mesh = build_mesh(
            sp_size=sp_size,
            guided=request.settings["guidance_scale"] != 1.0,
            device_type=_device().type,
            collective_timeout=WAIT_SECONDS,
        )
        jobs = request.jobs  # none where there are more processes than videos
        for folder in {path.parent for job in jobs for path in (job.path, job.note)}:
            folder.mkdir(parents=True, exist_ok=True)  # before minutes of loading and sampling
        if jobs:
            pipeline = _pipeline(request, mesh)
            sharpener = _Sharpener(pipeline, request, mesh) if request.stage else None
            if request.writes and (cut := truncated_prompts_warning(pipeline, [job.prompt for job in jobs])):
                complain(f"generate.py: WARNING: {cut}")
            unguided = request.settings["guidance_scale"] == 1.0
            negative = None if unguided else pipeline.encode([arguments.negative_prompt], glyphs=False)
            for job in tqdm(jobs, desc="videos", unit="video", disable=len(jobs) < 2):
                _generate(pipeline, sharpener, job, request, negative)
        if jobs and request.writes:
            print(printable(_written(request)))
        if done is not None:
            dist.barrier(done)  # the first process may host what the others meet by, who may have hours to go


def _with_rewritten_prompt(request: Request) -> Request:
    """Let the server write the prompt anew; a note that holds its answer already saves asking.

    Raises:
        ValueError: the server does not answer, refuses, or its model does not do as it is asked.
    """
    arguments, (url, model) = request.arguments, request.arguments.rewrite_prompt
    asked, notes = (arguments.prompt, model), [job.read() for job in request.jobs]
    made = [note for note in notes if (note.get("original_prompt"), note.get("rewrite_prompt")) == asked]
    text = next((note["prompt"] for note in made if isinstance(note.get("prompt"), str)), None)
    server = ChatServer(url, model, RewardContext(), "--rewrite_prompt")
    if text is None:
        complain(f"generate.py: asking {model} to rewrite the prompt")
        with as_value_error("--rewrite_prompt", Fault, RewardFailureError):
            text = rewritten(server, INSTRUCTION.read_text(encoding="utf-8"), arguments.prompt)
    print(printable(f"rewritten: {text}"), flush=True)
    return replace(request, jobs=[replace(job, prompt=replace(job.prompt, text=text)) for job in request.jobs])


def _written(request: Request) -> str:
    """Say where the videos of this process lie."""
    first, *others = request.jobs
    if not others:
        return f"wrote {first.path} (and how it was made: {first.note if first.note_apart else first.note.name})"
    notes = "each with a note of how it was made" if not first.note_apart else f"notes on them to {first.note.parent}"
    return f"wrote {len(request.jobs)} videos to {first.path.parent}, {notes}"


def request_of(arguments: argparse.Namespace) -> Request:
    """Check what a command line names, but read no weights; a ValueError says what is wrong."""
    if arguments.offload and not torch.cuda.is_available():
        raise ValueError("--offload moves networks between GPU and host memory; this machine shows no GPU.")
    if arguments.attention_backend:
        check_backend(arguments.attention_backend)
    root = Path(arguments.model_path)
    check_trained(arguments)
    arguments.seed = list(dict.fromkeys(arguments.seed))
    if arguments.prompt is not None:
        prompt = Prompt(arguments.prompt, index=0, seed=None, ref_image_path=arguments.image_path)
        jobs = jobs_of_prompt(arguments.output_path, prompt, arguments.seed)
    else:
        jobs = jobs_of_csv(
            arguments.output_path, read_prompts(arguments.prompts_csv), arguments.seed, arguments.file_names
        )
    for job in jobs:
        check_output(job.path)
        check_output(job.note)
    prompts = [job.prompt for job in jobs]
    task = task_of(root, arguments.transformer_version)
    check_task(prompts, task)
    check_images(prompts)
    defaults = sampling_defaults(root, arguments.transformer_version)
    given = {name: value for name in defaults if (value := getattr(arguments, name)) is not None}
    settings = {**defaults, **given}
    if arguments.negative_prompt and settings["guidance_scale"] == 1:
        raise ValueError(
            f"--negative_prompt {arguments.negative_prompt!r} is what guidance steers away from, and guidance_scale 1 "
            "switches that off: set --guidance_scale above 1, or leave --negative_prompt out."
        )
    _check_numbers(arguments, settings, root)
    stage = stage_of(root, arguments.transformer_version) if arguments.sr else None
    if stage:
        stage.enlarged(parse_size(settings["fixed_size"]))
        arguments.sr_num_inference_steps = arguments.sr_num_inference_steps or stage.num_steps
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    layout = Layout(world_size, arguments.sp_size)
    share = [jobs[i] for i in layout.share_to_sample(len(jobs), rank)]
    folders = [transformer_folder(root, arguments.transformer_version)]
    of_images = ("image_encoder", "vision_encoder") if task == "i2v" else ()
    folders += [root / name for name in ("vae", "text_encoder", "text_encoder_2", *of_images)]
    if trained := arguments.checkpoint_path or arguments.lora_path:
        folders.append(Path(trained))
    folders += stage.folders(root) if stage else []
    if arguments.lora_path:
        folders.append(Path(arguments.lora_path).with_name(PEFT_SETTINGS))
    writes, weights = layout.sp_rank(rank) == 0, fingerprint(folders)
    if arguments.lora_path:  # samples of it might miss its alphas
        with check_lora(arguments.lora_path).open("rb") as file:
            weights += hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return Request(arguments, settings, weights, share, writes, stage)


def _check_numbers(arguments: argparse.Namespace, settings: dict[str, Any], root: Path) -> None:
    """Refuse numbers that no video can be made with; the ValueError names the flag and what it must be."""
    given = vars(arguments) | settings
    for name, interval in INTERVALS.items():
        if name in ("sr_num_inference_steps", "cache") and given[name] is None:
            continue
        for value in given[name] if name == "seed" else [given[name]]:
            if not (isinstance(value, int | float) and lies_in(value, interval)):
                raise ValueError(f"--{name} must be a number in {interval}; received {value!r}.")
    highest = flavour_of(arguments.sde_type).highest_eta
    if arguments.eta > highest:
        raise ValueError(f"--eta must be at most {highest:g} for {arguments.sde_type}; received {arguments.eta}.")
    ratio = arguments.aspect_ratio
    if ratio is not None and not re.fullmatch(r"[1-9]\d*:[1-9]\d*", ratio, re.ASCII):
        raise ValueError(f"--aspect_ratio is WIDTH:HEIGHT in positive whole numbers, as 16:9; received {ratio!r}.")
    vae = read_vae_config(root)
    ratios = {name: vae.get(f"{name}_compression_ratio", usual) for name, usual in (("temporal", 4), ("spatial", 16))}
    check_video_shape(settings["video_length"], parse_size(settings["fixed_size"]), **ratios)


def _device() -> torch.device:
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
    speed_up(pipeline.transformer, compiled=arguments.compile, backend=arguments.attention_backend)
    pipeline.autocast_dtype = dtype
    if arguments.cache is not None:
        enable_cache(pipeline.transformer, arguments.cache)
    place(pipeline, device, arguments.offload)
    return pipeline


def place(pipeline: HunyuanVideoGRPOPipeline, device: torch.device, offload: bool | str) -> None:
    """Put the networks where `--offload` lets them rest: on `device`, or in host memory, whole or in groups."""
    if offload == "group":
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of the streams that blocks are copied on
        offload_blocks(pipeline.transformer, device, pinned=True)  # it computes again and again
        for encoder in pipeline.encoders:
            offload_blocks(encoder, device)
        offload_vae(pipeline.vae, device)
    elif offload:
        pipeline.enable_model_cpu_offload(device=device)
    else:
        pipeline.to(device)


def place_second(
    transformer: HunyuanVideo15Transformer3DModel, device: torch.device, offload: bool | str
) -> UserCpuOffloadHook | None:
    """Put the second transformer where it rests as `place` does the first; a hook that is returned sends it back."""
    if offload == "group":
        offload_blocks(transformer, device, pinned=True)
    elif offload:
        return cpu_offload_with_hook(transformer, device)[1]
    else:
        transformer.to(device)
    return None


class _Sharpener:
    """The second stage of super-resolution: its transformer and upsampler, loaded beside the base model."""

    def __init__(self, base: HunyuanVideoGRPOPipeline, request: Request, mesh: Mesh) -> None:
        arguments, device = request.arguments, _device()
        self.base, self.stage = base, request.stage
        placed = None if arguments.offload else device
        version, dtype = self.stage.version, base.autocast_dtype
        transformer = load_transformer(arguments.model_path, version, dtype=dtype, device=placed)
        install_attention(transformer, mesh.sp_group, None)  # it is not guided, so there are no rows to share
        speed_up(transformer, compiled=arguments.compile, backend=arguments.attention_backend)
        scheduler = FlowMatchDiscreteScheduler(shift=SHIFT)
        scheduler.set_timesteps(arguments.sr_num_inference_steps)
        self.pipeline = SuperResolutionPipeline(
            **{**base.components, "transformer": transformer, "scheduler": scheduler}
        )
        self.pipeline.autocast_dtype = dtype
        self.pipeline.upsampler = load_upsampler(self.stage.folders(Path(arguments.model_path))[1], device=device)
        self.hook = place_second(transformer, device, arguments.offload)

    def __call__(
        self, job: Job, size: tuple[int, int], conditioning: Conditioning, noise: SampleNoise, latents: Tensor
    ) -> Tensor:
        """Return one video `[1, F, H, W, 3]` of `size`, from the base model's last latents."""
        if conditioning.images is not None:
            first_frame = self.base.encode_images([read_image(job.prompt.ref_image_path)], size)
            conditioning = replace(conditioning, images=first_frame)
            self.base.maybe_free_model_hooks()
        noise, steps = replace(noise, stream="super_resolution"), len(self.pipeline.scheduler.timesteps)
        with tqdm(total=steps, desc=f"{job.path.name}, {self.stage.version}", leave=False) as bar:
            sharp = self.pipeline.sharpen(latents, size, conditioning, noise, on_step=lambda index: bar.update())
        if self.hook is not None:
            self.hook.offload()
        return self.base.decode(sharp)


def _generate(
    pipeline: HunyuanVideoGRPOPipeline,
    sharpener: _Sharpener | None,
    job: Job,
    request: Request,
    negative: Conditioning | None,
) -> None:
    """Write one video and a note of how it was made, unless that is done already."""
    arguments, settings = request.arguments, request.settings
    image, size = job.prompt.ref_image_path, parse_size(settings["fixed_size"])
    if not arguments.fixed_size and (arguments.aspect_ratio or image):
        ratio = arguments.aspect_ratio
        width, height = map(int, ratio.split(":")) if ratio else read_image(image).size
        target, factor = pipeline.transformer.config.target_size, pipeline.vae_scale_factor_spatial
        size = bucket_size(target, factor, width=width, height=height)
    note = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    for name in ("offload", "sp_size", "file_names"):  # they change where the video is made, not the video
        del note[name]
    later = ("ema", "sr", "sr_num_inference_steps", "save_pre_sr_video", "compile", "cache", "attention_backend")
    later += ("rewrite_prompt",)
    note = {key: value for key, value in note.items() if key not in later or value}  # as notes were before they existed
    note |= settings | {"prompt": job.prompt.text, "image_path": job.prompt.ref_image_path, "seed": job.seed}
    note |= {"fixed_size": f"{size[0]}x{size[1]}", "output_path": str(job.path), "weights": request.weights}
    note["index"] = job.prompt.noise_index
    if arguments.rewrite_prompt:  # where the server lies is nobody's business, and decides nothing
        note |= {"original_prompt": arguments.prompt, "rewrite_prompt": arguments.rewrite_prompt[1]}
    if sharpener:
        sharp_size = sharpener.stage.enlarged(size)
        note["sr_size"] = f"{sharp_size[0]}x{sharp_size[1]}"
    if job.is_finished(note):
        complain(f"{job.path} is finished already")
        return
    with tqdm(total=settings["num_inference_steps"], desc=job.path.name, leave=False) as bar:
        ((conditioning, noise, rollout),) = sampled(
            pipeline,
            [job.prompt],
            Guidance(settings["guidance_scale"], negative),
            num_frames=settings["video_length"],
            size=size,
            seed=job.seed,
            batch_size=1,
            sde_type=arguments.sde_type,
            eta=arguments.eta,
            decode=not sharpener or arguments.save_pre_sr_video,
            on_step=lambda index: bar.update(),
        )
    pipeline.maybe_free_model_hooks()
    videos = rollout.videos
    if sharpener:
        if videos is not None and request.writes:
            write_video(job.note.with_name(f"{job.path.stem}_before_sr.mp4"), videos[0], arguments.fps)
        videos = sharpener(job, sharp_size, conditioning, noise, rollout.latents[:, -1])
        pipeline.maybe_free_model_hooks()
    if request.writes:
        job.write(videos[0], arguments.fps, note)
