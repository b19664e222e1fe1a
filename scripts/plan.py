"""Plan a run without its hardware: layout, memory, operations, bytes sent and time, by rehearsing a round of its code.

All flags of post_train.py are accepted too; prompts and weights are not needed. The sizes of the networks come from
--pretrained_model_root if it holds a model, otherwise they are those of the published HunyuanVideo-1.5.

With --sampling it plans one video of generate.py instead. Its size, length and steps are those of a validation.

Example: `python -m scripts.plan --world_size 64 --gpu H100 --config configs/sage_64gpu.yaml --rollout_size 480x864`
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hyvideo.config.flags import TeachingParser
from hyvideo.config.loading import load_config
from hyvideo.config.outside import complain, loading
from hyvideo.config.schema import Config
from hyvideo.data.files import claim_output
from hyvideo.distributed.gpus import GPUS, Gpu, find_gpu
from hyvideo.evaluation.original_command import placement
from hyvideo.planning.assumptions import Assumptions
from hyvideo.planning.own_process import start_server

if TYPE_CHECKING:
    from hyvideo.planning.plan import Plan, Search

SEARCH = "also the nearest settings that fit, and the cheapest sp_size; a plan for each"
GPU_HELP = f"one of {', '.join(gpu.name for gpu in GPUS)}; or any, with the next two; default: no time, no fit"
NOTHING_FITS = "no change of its settings that was tried fits: use more GPUs, larger ones, or use_lora"


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Read the planner's own flags; returns them and those of post_train.py."""
    given = Assumptions()
    parser = TeachingParser(
        "plan", description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--world_size", type=int, required=True, help="number of GPUs")
    parser.add_argument("--gpu", help=GPU_HELP)
    parser.add_argument("--gpu_memory", type=float, help="GiB that it has, if other than known")
    parser.add_argument("--gpu_tflops", type=float, help="its dense bf16 peak, if other than known")
    parser.add_argument("--price_per_gpu_hour", type=float, help="in any currency: what the whole run costs")
    parser.add_argument("--gpus_per_node", type=int, default=given.gpus_per_node, help="default %(default)s")
    parser.add_argument("--network", type=float, default=given.network, help="GB/s of a GPU to others; %(default)s")
    parser.add_argument("--utilisation", type=float, default=given.utilisation, help="share of peak; %(default)s")
    parser.add_argument("--num_text", type=int, default=given.num_text, help="tokens of a prompt; %(default)s")
    parser.add_argument("--reserve", type=float, help="GiB not rehearsed; default 1 + a quarter of the peak, at most 8")
    parser.add_argument("--whole", action="store_true", help="rehearse every block and step (many minutes)")
    parser.add_argument("--search", action="store_true", help=SEARCH)
    sampling = "plan one video of generate.py with this --offload instead of a run"
    parser.add_argument("--sampling", type=placement, metavar="BOOL|group", help=sampling)
    parser.add_argument("--sr", action="store_true", help="plan its super-resolution too; goes with --sampling")
    parser.add_argument("--json", type=Path, help="file to write all numbers to")
    return parser.parse_known_args(argv)


def main(argv: list[str]) -> int:
    """Print the plan; returns the exit status (0 it fits, 1 it does not, 2 wrong input)."""
    try:
        arguments, flags = parse_arguments(argv)
        config = load_config(flags)
        gpu = _gpu(arguments)
        if arguments.search and gpu is None:
            raise ValueError("--search: name the GPU that is to hold the run (--gpu).")
        if arguments.json:
            claim_output(arguments.json, [flag.rpartition("=")[2] for flag in flags])
        if arguments.sr and arguments.sampling is None:
            raise ValueError("--sr goes with --sampling: a run's validation is never sharpened.")
        assumptions = _assumptions(arguments)
        with loading("scripts.plan"):
            start_server()
            from hyvideo.planning.plan import Search, make_plan, misfit, plan_table  # only now, for it takes seconds
        if arguments.sampling is not None:
            return _plan_sampling(config, arguments, gpu, assumptions)
        sizes = {"world_size": arguments.world_size, "gpu": gpu, "assumptions": assumptions}
        plan = make_plan(config, **sizes, whole=arguments.whole)
    except (ValueError, OSError) as error:
        complain(f"scripts.plan: {error}")
        return 2
    said = [line for line in (_verdict(plan), plan.whole_run) if line]
    print("\n".join([*said, "", plan_table(plan)]), flush=True)
    numbers = plan.as_json()
    if arguments.search:
        search = Search(config, **sizes, tell=lambda line: complain(f"scripts.plan: {line}"))
        numbers["search"] = _print_search(search, fits=plan.fits)
    if arguments.json:
        arguments.json.write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    if plan.fits:
        return 0
    complain(f"scripts.plan: {misfit(plan)}{'' if arguments.search else ' --search looks for settings that fit.'}")
    return 1


def _gpu(arguments: argparse.Namespace) -> Gpu | None:
    """Return the GPU to plan for, with what is given of it; None where none is named."""
    given = {"memory": arguments.gpu_memory, "teraflops": arguments.gpu_tflops}
    given = {name: value for name, value in given.items() if value is not None}
    if any(not 0 < value < math.inf for value in given.values()):
        raise ValueError(f"--gpu_memory and --gpu_tflops must be above 0; received {given}.")
    return find_gpu(arguments.gpu or "your GPU", **given) if arguments.gpu or given else None


def _assumptions(arguments: argparse.Namespace) -> Assumptions:
    for name in ("world_size", "gpus_per_node", "network", "utilisation", "num_text"):
        if getattr(arguments, name) <= 0:
            raise ValueError(f"--{name} must be above 0; received {getattr(arguments, name)}.")
    if arguments.utilisation > 1:
        raise ValueError(f"--utilisation is a share of the GPU's peak, at most 1; received {arguments.utilisation}.")
    for name in ("reserve", "price_per_gpu_hour"):
        if (value := getattr(arguments, name)) is not None and not value >= 0:
            raise ValueError(f"--{name} must not be below 0; received {value}.")
    names = ("num_text", "utilisation", "gpus_per_node", "network", "reserve", "price_per_gpu_hour")
    return Assumptions(**{name: getattr(arguments, name) for name in names})


def _plan_sampling(config: Config, arguments: argparse.Namespace, gpu: Gpu | None, assumptions: Assumptions) -> int:
    """Print what sampling one video takes of a GPU; returns the exit status."""
    from hyvideo.planning.networks import read_networks
    from hyvideo.planning.sampling import rehearse_sampling

    networks = read_networks(config.model, config.reward)
    sampling = rehearse_sampling(config, networks, arguments.sampling, assumptions.num_text, sr=arguments.sr)
    gib = {phase: peak / 2**30 for phase, peak in sampling.peaks.items()}
    needed = max(gib.values()) + assumptions.reserved(max(gib.values()))
    fits = gpu is None or needed <= gpu.memory
    of_gpu = f" of {gpu.memory:g} GiB: it {'fits' if fits else 'does not fit'}" if gpu else " GiB"
    print(f"one video from {networks.source}: {', '.join(f'{phase} {peak:.1f}' for phase, peak in gib.items())} GiB")
    print(f"with the reserve {needed:.1f}{of_gpu}")
    if gpu and gpu.teraflops:
        rate = gpu.teraflops * 1e12 * assumptions.utilisation
        seconds = {phase: count / rate for phase, count in sampling.flops.items()}
        told = ", ".join(f"{phase} {value:.0f}" for phase, value in seconds.items())
        print(f"{sum(seconds.values()):.0f} s at {assumptions.utilisation:.0%} of its peak: {told}; copies not counted")
    return 0 if fits else 1


def _verdict(plan: "Plan") -> str:
    """Say in one line whether the run fits, how long an update takes, and what it needs of a GPU's memory."""
    if plan.gpu is None:
        return f"NEEDS {plan.needed:.1f} GiB per GPU | name the --gpu, for its time and whether the run fits"
    parts = ["FITS" if plan.fits else "DOES NOT FIT"]
    if plan.seconds is not None:
        parts.append(f"{sum(plan.seconds.values()) / plan.updates:.0f} s per update")
    return " | ".join([*parts, f"{plan.needed:.1f} of {plan.gpu.memory:g} GiB"])


def _print_search(search: "Search", *, fits: bool) -> dict:
    """Print the nearest that fits, and which `sp_size` costs least; returns them."""
    from hyvideo.planning.plan import flags_of

    found = {}
    if not fits:
        nearest = search.nearest_that_fits()
        said = f"the nearest that fits, with {nearest[1]:.1f} GiB: {flags_of(nearest[0])}" if nearest else NOTHING_FITS
        print(said, flush=True)
        found["nearest"] = nearest and nearest[0]
    plans = search.sp_sizes()
    print("ranks per video")
    for plan in plans:
        print(
            f"  sp_size {plan.sp_size}: {plan.videos} videos per round, {plan.needed:.1f} GiB "
            f"({'fits' if plan.fits else 'does not fit'}), {plan.gpu_seconds_per_video:.0f} GPU-seconds per video"
        )
    fitting = [plan for plan in plans if plan.fits]
    cheapest = min(fitting, key=lambda plan: plan.gpu_seconds_per_video, default=None)
    print(f"  cheapest that fits: sp_size {cheapest.sp_size}" if cheapest else "  none of them fits")
    return found | {
        "cheapest_sp_size": cheapest and cheapest.sp_size,
        "sp_sizes": {plan.sp_size: plan.as_json() for plan in plans},
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
