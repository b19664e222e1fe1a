"""The sampling command of SAGE-GRPO's release, which generate.py takes as it stands."""

import argparse
import os
from datetime import datetime
from pathlib import Path

from hyvideo.config.flags import BOOLEANS
from hyvideo.config.outside import complain

SEED = 930
"""Seed of the release's command where none is given."""

NOT_HERE = {
    "rewrite": "Prompts are sampled as they are written: give rewritten ones.",
    "sparse_attn": "Attention is dense: take --cfg_distilled true, which halves the work.",
    "original_noise_dir": "The noise of a video is drawn from its --seed.",
}
"""Flags that ask for other videos than we can make -> what there is instead."""

SLOWER = {
    "enable_cache": "every step is computed; --cfg_distilled true, or --num_inference_steps, saves time",
    "use_sageattn": "attention is PyTorch's",
    "use_fp8_gemm": "a GPU computes in bfloat16",
    "enable_torch_compile": "sampling is not compiled",
    "group_offloading": "--offload moves whole networks",
}
"""Flags that would only change speed or memory -> what happens instead."""

IGNORED = (
    *("overlap_group_offloading", "save_generation_config", "dtype", "sage_blocks_range"),
    *("cache_type", "no_cache_block_id", "cache_start_step", "cache_end_step", "cache_step_interval", "total_steps"),
    *("quant_type", "include_patterns"),
)
"""Flags that only refine those above, or ask for what always happens."""


def boolean(text: str) -> bool:
    """Read true/false, yes/no, on/off or 1/0; a ValueError for anything else."""
    if text.lower() not in BOOLEANS:
        raise ValueError(text)
    return BOOLEANS[text.lower()]


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
    for name in (*NOT_HERE, *SLOWER, *IGNORED):
        group.add_argument(f"--{name}", nargs="?", const="true", help=argparse.SUPPRESS)


def translate(arguments: argparse.Namespace) -> None:
    """Turn the release's flags into ours, in place, and say on stderr which have no effect.

    A flag that asks for what is not here is a ValueError that says what is there instead.
    """
    theirs = {name: vars(arguments).pop(name) for name in (*NOT_HERE, *SLOWER, *IGNORED)}
    asked = [name for name, value in theirs.items() if value is not None and BOOLEANS.get(value.lower(), True)]
    if refused := [f"--{name} is not here. {NOT_HERE[name]}" for name in asked if name in NOT_HERE]:
        raise ValueError(" ".join(refused))
    resolution, csvs = arguments.resolution, arguments.valid_video_csv or []
    told = [f"--{name} has no effect: {SLOWER[name]}." for name in asked if name in SLOWER]
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
    if os.environ.get("RANK", "0") == "0":
        for line in told:
            complain(f"generate.py: {line}")
    if found:
        arguments.prompts_csv, arguments.prompt = found, None
    if resolution:
        kind = "_step_distilled" if arguments.enable_step_distill else "_distilled" if arguments.cfg_distilled else ""
        task = "i2v" if arguments.image_path else "t2v"
        arguments.transformer_version = arguments.transformer_version or f"{resolution}_{task}{kind}"
    if arguments.output_path is None:
        if not resolution or arguments.prompt is None:
            raise ValueError("give --output_path: FILE.mp4, or a folder with --prompts_csv.")
        name = f"output_{arguments.transformer_version}_{datetime.now():%Y-%m-%d_%H-%M-%S}.mp4"
        arguments.output_path = Path("outputs") / name
    if arguments.checkpoint_path and Path(arguments.checkpoint_path).name == "transformer":
        arguments.checkpoint_path = str(Path(arguments.checkpoint_path).parent)  # the release names the inner folder
    arguments.seed = arguments.seed or [SEED if resolution else 42]
    for name in ("resolution", "cfg_distilled", "enable_step_distill", "valid_video_csv"):
        delattr(arguments, name)
