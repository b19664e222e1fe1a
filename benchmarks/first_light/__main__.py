"""Run the first hour on one GPU: what a run on eight depends on, most doubtful first (1 to 4), then what it left open.

Seven parts of less than ten minutes each; no network and no released weights are needed, but 20 GB of disk. Every stage
is a process of its own with a time limit, so that one that fails or hangs does not take the others with it. Without a
part all run. `--small` tries the program out on a CPU with small sizes.

The findings become <GPU>.json in benchmarks/results/first_light: please send it.

Example: `python -m benchmarks.first_light 1`
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.first_light.stages import LARGE, PLANS, STAGES, Place, plan_gib, run_stage
from benchmarks.paired import machine_kind
from hyvideo.config.flags import Parser
from hyvideo.training.state import code_version
from scripts.reports.markdown import markdown_table

RESULTS = Path(__file__).parents[1] / "results" / "first_light"


def main(argv: Sequence[str]) -> int:
    """Run and write; returns the exit status (0, or 1 where a stage failed)."""
    parser = Parser("first_light", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parts = sorted({str(stage.part) for stage in STAGES.values()})
    parser.add_argument("parts", nargs="*", help=f"{', '.join(parts)} or stages ({', '.join(STAGES)}); default: all")
    parser.add_argument("--plan", action="store_true", help="work out the planned peaks, without a GPU, and end")
    parser.add_argument("--small", action="store_true", help="small sizes on a CPU; nothing is published")
    parser.add_argument("--folder", type=Path, default=Path("outputs/first_light"), help="for runs, models, profiles")
    parser.add_argument("--stage", choices=STAGES, help="only this one, in this process")
    given = parser.parse_args(argv)
    if unknown := set(given.parts).difference(parts, STAGES):
        parser.error(f"no part or stage is called {', '.join(sorted(unknown))}; --help names all")
    if not given.small and not given.plan and not torch.cuda.is_available():
        parser.error("there is no GPU here; --small tries this program out on a CPU")
    given.folder.mkdir(parents=True, exist_ok=True)
    place, findings = Place(given.folder, given.small), given.folder / "findings.jsonl"
    if given.plan:
        planned = {name: plan_gib(place, name) for name in LARGE}
        (given.folder / PLANS).write_text(json.dumps(planned, indent=1) + "\n", encoding="utf-8")
        print("\n".join(f"{name}: {gib:.2f} GiB" for name, gib in planned.items()))
        return 0
    if given.stage:
        run_stage(given.stage, place, findings)
        return 0
    findings.unlink(missing_ok=True)
    ended = {}
    for name, stage in STAGES.items():
        if not given.parts or {name, str(stage.part)}.intersection(given.parts):
            ended[name] = _run(name, stage.seconds, given)
    lines = findings.read_text(encoding="utf-8").splitlines() if findings.is_file() else []
    facts = {line["name"]: line["facts"] for line in map(json.loads, lines)}
    stages = {name: {"ended": how, "code": code_version()} for name, how in ended.items()}
    record = {"machine": machine_kind(), "stages": stages, "findings": facts}
    if given.small:
        (given.folder / "results.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    else:
        publish(record)
    print(table(facts))
    return 0 if all(how == "done" for how in ended.values()) else 1


def _run(name: str, seconds: int, given: argparse.Namespace) -> str:
    """Run a stage in a process of its own, of which nothing is left afterwards; return how it ended."""
    command = [sys.executable, "-m", "benchmarks.first_light", "--stage", name, "--folder", str(given.folder)]
    log, started = given.folder / f"{name}.log", time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [*command, *(["--small"] if given.small else [])],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
            how = "done" if status == 0 else f"failed with status {status}"
        except subprocess.TimeoutExpired:
            how = f"stopped after {seconds} s"
        finally:  # also the programs that it started, which would keep the GPU's memory from the next stage
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    print(f"{name}: {how}, {time.monotonic() - started:.0f} s", flush=True)
    if how != "done":
        print(log.read_text(encoding="utf-8")[-2500:], flush=True)
    return how


def publish(record: dict[str, Any]) -> None:
    """Write the findings of this kind of machine, joined with those of parts that ran earlier."""
    path = RESULTS / f"{record['machine']}.json"
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        for key in ("stages", "findings"):
            record[key] = before[key] | record[key]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def table(findings: Mapping[str, Mapping[str, Any]]) -> str:
    """Lay findings out in Markdown."""
    rows = []
    for name, facts in findings.items():
        shown = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in facts.items())
        rows.append((name, ", ".join(shown)))
    return markdown_table(("finding", "found"), rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
