"""Sample videos from a base model, or from one that a run trained.

Example: `python generate.py --model_path assets/tiny --prompt "a red circle moves slowly left" --output_path red.mp4`

The weights of HunyuanVideo-1.5 in ./ckpts need no --model_path. Settings of post_train.py are known by their names too.

Under torchrun every process makes its share of the videos on its own GPU; with `--sp_size` several share one video.
Settings that are not given are the model's own. Beside every video a JSON note says how it was made; while that note
would be the same, the video is not made again.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from hyvideo.config.flags import Parser
from hyvideo.config.outside import complain, in_words, loading
from hyvideo.evaluation.jobs import FILE_NAMES
from hyvideo.evaluation.original_command import (
    THRESHOLD,
    add_original_flags,
    boolean,
    own_names,
    placement,
    translate,
)
from hyvideo.models.model_folder import check_layout


def main(argv: list[str]) -> int:
    """Sample and write; returns the exit status (0 done, 2 wrong input)."""
    if not argv:
        print(f"{__doc__.split('`')[1]}\npython generate.py --help   explains every flag")
        return 2
    try:
        arguments = parse_arguments(argv)
        with loading("generate.py"):
            from hyvideo.evaluation.generate import generate  # only now, for it takes seconds

        generate(arguments)
    except (ValueError, OSError) as error:
        complain(f"generate.py: {in_words(error)}")
        return 2
    return 0


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Read the command line, and check what takes no PyTorch; settings that are not given are the model's own."""
    parser = Parser("generate.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    folder = {"default": "./ckpts"} if Path("ckpts").is_dir() else {"required": True}
    add("--model_path", **folder, help="folder of the base model, in either layout, e.g. assets/tiny; default ./ckpts")
    add("--transformer_version", help="transformer in the original layout, e.g. 720p_i2v; default: the only one there")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="one prompt; writes the mp4 --output_path")
    source.add_argument(
        "--prompts_csv",
        nargs="+",
        help=".txt with a prompt a line, .csv or .jsonl with a 'prompt'; --output_path is a folder",
    )
    names = "row: 0000.mp4; vbench: PROMPT-0.mp4, as VBench and VBench-2.0 read them; default row"
    add("--file_names", choices=FILE_NAMES, default="row", help=f"names of a CSV's videos, {names}")
    rewrite = "let a language model write --prompt in the 60 to 120 words that HunyuanVideo-1.5 is used to: address of "
    rewrite += "an OpenAI-compatible server and the model's name, e.g. http://127.0.0.1:8000/v1 Qwen3-8B"
    add("--rewrite_prompt", nargs=2, metavar=("SERVER", "MODEL"), help=rewrite)
    add("--image_path", type=_or_none, help="image that the video of --prompt starts from (i2v versions)")
    add("--output_path", type=Path, help="FILE.mp4, or a folder with --prompts_csv")
    trained = parser.add_mutually_exclusive_group()
    trained.add_argument("--checkpoint_path", help="RUN/checkpoints/step_N, best or latest")
    trained.add_argument("--lora_path", help="folder or .safetensors file of an adapter, or RUN/checkpoints/step_N")
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
    add("--sde_type", default="ode", help="denoising step: ode, or one of a rollout's (--sde_type of post_train.py)")
    add("--eta", type=float, help="noise level of the other sde types; default 0.5")
    add("--sp_size", type=int, default=1, help="processes that share one video (torchrun); default 1")
    switch = {"type": boolean, "nargs": "?", "const": True, "metavar": "BOOL"}
    add("--sr", **switch, help="sharpen 480p to 720p, or 720p to 1080p, with a second transformer")
    add("--sr_num_inference_steps", type=int, help="its denoising steps; default 6 to 720p, 8 to 1080p")
    add("--save_pre_sr_video", **switch, default=False, help="also write the video before it, NAME_before_sr.mp4")
    placed = {**switch, "type": placement, "metavar": "BOOL|group"}
    moved = "keep on the GPU only the network that is computing; group: only the block that is, and the next one"
    add("--offload", "--offloading", **placed, default=False, help=moved)
    add("--compile", **switch, default=False, help="compile the transformer's blocks, which takes minutes at first")
    less = f"compute the first block alone where it changes by less than a share, by default {THRESHOLD}"
    add("--cache", type=float, nargs="?", const=THRESHOLD, metavar="SHARE", help=less)
    add("--attention_backend", help="attention of another package, e.g. flash, _flash_3 or sage")
    add_original_flags(parser)
    arguments = parser.parse_args(own_names(argv))
    translate(arguments)
    if wrong := list(_contradictions(arguments)):
        raise ValueError(" ".join(wrong))
    arguments.save_pre_sr_video &= arguments.sr  # the release's command gives it with --sr false
    arguments.eta = 0.5 if arguments.eta is None else arguments.eta
    f"{arguments.prompt}{arguments.negative_prompt}".encode()  # a ValueError where the terminal sent other bytes
    check_layout(arguments.model_path, arguments.transformer_version)
    return arguments


def _contradictions(given: argparse.Namespace) -> Iterator[str]:
    """Yield what is missing, and what does not go with the other flags."""
    if (given.prompt is None) == (given.prompts_csv is None):
        yield "give one of --prompt and --prompts_csv (--help lists all flags)."
    elif given.image_path and given.prompt is None:
        yield "--image_path goes with --prompt; a CSV names images in its column ref_image_path."
    if given.output_path is None:
        yield "give --output_path: FILE.mp4, or a folder with --prompts_csv."
    if given.eta is not None and given.sde_type == "ode":
        yield "--eta is the noise of another --sde_type than ode: give one, or leave --eta out."
    if given.sr_num_inference_steps is not None and not given.sr:
        yield "--sr_num_inference_steps goes with --sr true."
    if given.cache is not None and (given.sde_type != "ode" or given.sp_size > 1):
        yield (
            "--cache leaves blocks out, which a rollout never does, and processes that share a video may not all do: "
            "give it without --sde_type and --sp_size."
        )
    if given.rewrite_prompt and (given.prompt is None or int(os.environ.get("WORLD_SIZE", "1")) > 1):
        yield (
            "--rewrite_prompt goes with --prompt and one process: rewrite a CSV once, by scripts.rewrite_prompts, and "
            "all processes sample the same texts."
        )
    if given.rewrite_prompt and given.image_path:
        yield "--rewrite_prompt would describe another image than --image_path, which it does not see."


def _or_none(text: str) -> str | None:
    """Read a value that the word none clears."""
    return None if text.lower() == "none" else text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
