"""Rehearse a round of a run as one rank of many, on a GPU that does not exist.

The real code runs at the real sizes; tensors have shapes but no values, so that a laptop is enough. All flags of
post_train.py are accepted too; prompts and weights are not needed. The sizes of the networks come from
--pretrained_model_root if it holds a model, otherwise they are those of the published HunyuanVideo-1.5.

A surprise is what a GPU would punish: a host tensor that meets a device tensor, a value that is read back in the hot
loop, a matrix product in float64, a whole model gathered on one rank.

Example: `python -m scripts.rehearse --world_size 64 --config configs/sage_64gpu.yaml`
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hyvideo.config.flags import TeachingParser
from hyvideo.config.loading import load_config
from hyvideo.config.outside import complain, loading
from hyvideo.data.files import claim_output
from hyvideo.planning.own_process import start_server

if TYPE_CHECKING:
    from hyvideo.planning.rehearsal import Rehearsal


def main(argv: list[str]) -> int:
    """Print what the rank did; returns the exit status (0 no surprise, 1 surprises, 2 wrong input)."""
    parser = TeachingParser(
        "rehearse", description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--world_size", type=int, required=True, help="number of GPUs")
    parser.add_argument("--num_text", type=int, default=300, help="tokens of a prompt; default %(default)s")
    parser.add_argument("--whole", action="store_true", help="all blocks and steps; default: extrapolated from a few")
    parser.add_argument("--json", type=Path, help="file to write all numbers to")
    try:
        arguments, flags = parser.parse_known_args(argv)
        config = load_config(flags)
        if arguments.num_text <= 0:
            raise ValueError(f"--num_text must be above 0; received {arguments.num_text}.")
        if arguments.json:
            claim_output(arguments.json, [flag.rpartition("=")[2] for flag in flags])
        with loading("scripts.rehearse"):
            start_server()
            from hyvideo.planning.networks import read_networks  # only now, for it takes seconds
            from hyvideo.planning.plan import check_plan
            from hyvideo.planning.rehearsal import rehearse

        networks = read_networks(config.model, config.reward)
        check_plan(config, networks, arguments.world_size)
    except (ValueError, OSError) as error:
        complain(f"scripts.rehearse: {error}")
        return 2
    sizes = {"world_size": arguments.world_size, "num_text": arguments.num_text}
    done = rehearse(config, networks, **sizes, whole=arguments.whole)
    print(_table(done))
    if arguments.json:
        arguments.json.write_text(json.dumps(done.as_json(), indent=1) + "\n", encoding="utf-8")
    for surprise in done.surprises:
        complain(f"scripts.rehearse: {surprise}")
    return 1 if done.surprises else 0


def _table(done: "Rehearsal") -> str:
    from hyvideo.planning.rehearsal import PHASES

    blocks, steps = (" and ".join(map(str, numbers)) for numbers in (done.depths, done.steps))
    lines = [f"one rank, one round, from {blocks} blocks and {steps} steps", "phase        peak GiB      TFLOP  sent"]
    for phase in (phase for phase in PHASES if phase in done.peaks):
        of_phase = {(kind, of): count for (place, kind, of), count in done.sent.items() if place == phase}
        sent = [f"{kind} of {of} {count / 1e9:.2f} GB" for (kind, of), count in of_phase.items() if count > 1e6]
        peak, flops = done.peaks[phase] / 2**30, done.flops.get(phase, 0) / 1e12
        lines.append(f"{phase:<12} {peak:8.2f} {flops:10.1f}  {', '.join(sent)}".rstrip())
    lines.append("attention kernels")
    lines += [f"  {phase}: {name} {count:.0f} times" for (phase, name), count in done.kernels.items()]
    lines.append("values read back from the device, each for a reason")
    lines += [f"  {phase}: {count:.0f} times: {reason}" for (phase, reason), count in done.reads.items()]
    lines.append(f"copies to the device that the host waits for, also of indices: {sum(done.uploads.values()):.0f}")
    lines += [f"  {phase}: {count:.0f} times in {place}" for (phase, place), count in done.uploads.items()]
    lines.append(f"copies from pinned memory, for which it does not wait: {sum(done.pinned.values()):.0f}")
    lines.append(f"surprises: {len(done.surprises) or 'none'}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
