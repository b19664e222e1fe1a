"""Run the benchmarks of this machine, compare them with the committed results of its kind, and write both down.

`make bench` runs all; `python -m benchmarks --only attention parts` some. With a GPU everything runs there.
The exit status is 1 when something became slower.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

from benchmarks import attention, checkpoints, grpo_step, parts
from benchmarks.paired import Result, machine_kind, on_shared_cpu, print_results
from benchmarks.record import read_results, verdict, write_results, write_table

BENCHMARKS: dict[str, Callable[[], list[Result]]] = {
    "attention": attention.measure,
    "parts": parts.measure,
    "checkpoints": checkpoints.measure,
    "grpo_step": grpo_step.measure,
}

WAITING = "checkpoints"
"""A benchmark of waiting, which `--shared` leaves out: it measures CPU seconds, and waiting costs none."""


def main(argv: Sequence[str]) -> int:
    """Run, print, write; returns the exit status."""
    parser = argparse.ArgumentParser("benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), help="some of them")
    parser.add_argument("--shared", action="store_true", help="a CPU that others use: one thread, its CPU seconds")
    arguments = parser.parse_args(argv)
    names = arguments.only
    if arguments.shared:
        on_shared_cpu()
        names = [name for name in names if name != WAITING]
        print(f"{WAITING} is left out: waiting costs no CPU seconds")
    if not names:
        parser.error("none of the benchmarks can run here")
    kind = machine_kind()
    before, results = read_results(kind), []
    for name in names:
        measured = BENCHMARKS[name]()
        print_results(measured)
        path = write_results(kind, measured)  # at once: what follows may fail
        results += measured
    print(f"\nAgainst the committed results of {kind}:")
    verdicts = {result.name: verdict(result, before) for result in results}
    for name, said in verdicts.items():
        print(f"  {name}: {said}")
    write_table(kind, read_results(kind))
    print(f"written: {path} and its table in docs/performance.md")
    return 1 if "slower" in verdicts.values() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
