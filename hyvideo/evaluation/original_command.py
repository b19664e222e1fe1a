"""The sampling command of SAGE-GRPO's release, which generate.py takes as it stands."""

import argparse
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from hyvideo.config.flags import BOOLEANS
from hyvideo.config.outside import complain

SEED = 930
"""Seed of the release's command where none is given."""

NOT_HERE = {
    "rewrite": "Name the server and its model: --rewrite_prompt http://127.0.0.1:8000/v1 MODEL.",
    "sparse_attn": "Attention is dense: take --cfg_distilled true, which halves the work.",
    "original_noise_dir": "The noise of a video is drawn from its --seed.",
}
"""Flags that ask for other videos than we can make -> what there is instead."""

THRESHOLD = 0.1
"""Of `--cache` where none is given."""

OURS = {
    "enable_cache": ("cache", THRESHOLD),
    "use_sageattn": ("attention_backend", "sage"),
    "enable_torch_compile": ("compile", True),
    "group_offloading": ("offload", "group"),
}
"""Flags that switch on what one of ours does -> that flag and its value."""

IGNORED = (
    *("overlap_group_offloading", "save_generation_config", "dtype", "sage_blocks_range"),
    *("cache_type", "no_cache_block_id", "cache_start_step", "cache_end_step", "cache_step_interval", "total_steps"),
    *("use_fp8_gemm", "quant_type", "include_patterns"),
)
"""Flags that only refine those above, change the speed alone, or ask for what always happens."""

OF_TRAINING = {
    "pretrained_model_root": "model_path",
    "pretrained_transformer_version": "transformer_version",
    "pretrained_lora_path": "lora_path",
    "cfg_scale": "guidance_scale",
    "grpo_sampling_steps": "num_inference_steps",
    "validation_num_inference_steps": "num_inference_steps",
    "infer_flow_shift_video": "shift",
    "validation_timestep_shift": "shift",
    "rollout_size": "fixed_size",
    "validation_fixed_size": "fixed_size",
    "sample_n_frames": "video_length",
    "validate_video_length": "video_length",
    "video_fps": "fps",
    "validation_global_seed": "seed",
}
"""Settings of post_train.py -> the flags of generate.py that they are."""


def own_names(argv: Sequence[str]) -> list[str]:
    """Return a command line with settings of post_train.py by the names that they have here.

    Two names for one flag are a ValueError.
    """
    words, given = [], {}
    for word in argv:
        name, equals, value = word.partition("=")
        own = f"--{OF_TRAINING[name[2:]]}" if name[:2] == "--" and name[2:] in OF_TRAINING else name
        if name[:2] == "--" and given.setdefault(own, name) != name:
            raise ValueError(f"{given[own]} and {name} are one flag here: keep one.")
        words.append(f"{own}{equals}{value}")
    return words


def boolean(text: str) -> bool:
    """Read true/false, yes/no, on/off or 1/0; a ValueError for anything else."""
    if text.lower() not in BOOLEANS:
        raise ValueError(text)
    return BOOLEANS[text.lower()]


def placement(text: str) -> bool | str:
    """Read what rests in host memory: `group`, or a boolean."""
    return "group" if text == "group" else boolean(text)


def add_original_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only the release has; `translate` turns them into ours."""
    about = (
        f"with --resolution the default seed is {SEED}, the default --output_path a new file in outputs, and "
        "--fixed_size wins over --aspect_ratio"
    )
    group = parser.add_argument_group("the command of SAGE-GRPO's release", about)
    group.add_argument("--resolution", choices=["480p", "720p"], help="with the task and the next two, the version")
    for name in ("cfg_distilled", "enable_step_distill"):
        group.add_argument(f"--{name}", type=boolean, nargs="?", const=True, default=False, metavar="BOOL")
    group.add_argument("--valid_video_csv", nargs="+", metavar="CSV", help="as --prompts_csv; wins over --prompt")
    for name in (*NOT_HERE, *OURS, *IGNORED):
        group.add_argument(f"--{name}", nargs="?", const="true", help=argparse.SUPPRESS)


def translate(arguments: argparse.Namespace) -> None:
    """Turn the release's flags into ours, in place, and say on stderr which have no effect.

    Flags that ask for what is not here, or contradict each other, are a ValueError that says what is there instead.
    """
    theirs = {name: vars(arguments).pop(name) for name in (*NOT_HERE, *OURS, *IGNORED)}
    asked = [name for name, value in theirs.items() if value is not None and BOOLEANS.get(value.lower(), True)]
    resolution, csvs = arguments.resolution, arguments.valid_video_csv or []
    wrong = [f"--{name} is not here. {NOT_HERE[name]}" for name in asked if name in NOT_HERE]
    for name in ("cfg_distilled", "enable_step_distill"):
        if vars(arguments)[name] and (arguments.transformer_version or not resolution):
            mend = "give --resolution, or --transformer_version alone"
            wrong.append(f"--{name} helps to name a version with --resolution, which nothing reads here: {mend}.")
    for name, (flag, value) in OURS.items():
        if theirs[name] is not None and theirs[name].lower() not in BOOLEANS:
            wrong.append(f"--{name}: expected true or false; received {theirs[name]!r}.")
        elif name in asked and getattr(arguments, flag) not in (None, False, value):
            wrong.append(f"--{name} means --{flag} {value}, but --{flag} is {getattr(arguments, flag)}: keep one.")
        elif name in asked:
            setattr(arguments, flag, value)
    if wrong:
        raise ValueError(" ".join(wrong))
    told = ["--use_fp8_gemm has no effect: a GPU computes in bfloat16."] if "use_fp8_gemm" in asked else []
    if theirs["dtype"] not in (None, "bf16"):
        told.append("--dtype has no effect: a GPU computes in bfloat16, a CPU in float32.")
    if resolution and arguments.sr is None:
        told.append("The release sharpens videos by default (super-resolution), and here only --sr true does.")
    arguments.sr = bool(arguments.sr)
    found = [path for path in csvs if Path(path).is_file()]
    starter = "skipped; starter prompts are in assets/prompts/valid.csv"
    told += [f"--valid_video_csv: there is no file '{path}', {starter}." for path in csvs if path not in found]
    output = arguments.output_path
    if csvs and not found and arguments.prompt is not None and output and output.suffix != ".mp4":
        arguments.output_path = output.with_name(f"{output.name}.mp4")  # which was to be a folder of the CSV's videos
        told.append(f"The video of --prompt is '{arguments.output_path}'.")
    for line in told:
        complain(f"generate.py: {line}", once=True)
    if found:
        arguments.prompts_csv, arguments.prompt = found, None
    if resolution:
        kind = "_step_distilled" if arguments.enable_step_distill else "_distilled" if arguments.cfg_distilled else ""
        task = "i2v" if arguments.image_path else "t2v"
        arguments.transformer_version = arguments.transformer_version or f"{resolution}_{task}{kind}"
    if arguments.output_path is None and resolution and arguments.prompt is not None:
        name = f"output_{arguments.transformer_version}_{datetime.now():%Y-%m-%d_%H-%M-%S}.mp4"
        arguments.output_path = Path("outputs") / name
    if arguments.checkpoint_path and Path(arguments.checkpoint_path).name == "transformer":
        arguments.checkpoint_path = str(Path(arguments.checkpoint_path).parent)  # the release names the inner folder
    arguments.seed = arguments.seed or [SEED if resolution else 42]
    for name in ("resolution", "cfg_distilled", "enable_step_distill", "valid_video_csv"):
        delattr(arguments, name)
