"""Levels of proof: what has been run of every recipe, by evidence that is committed to docs/proof.

1 checked: its settings load and go together. 2 rehearsed: a round of the real code, as one rank of many on a GPU that
does not exist, had no surprise. 3 run: at real size with random weights on a GPU. 4 trained: with the released weights.
5 published: with the curve of its reward.

Named runs are rehearsed, which writes their evidence; without a name only the table in docs/planning.md is written. A
run proves every file of its --config. A file says its level in a comment (`# Proof: rehearsed`).

Example: `python -m scripts.proof sage_8gpu`
"""

import argparse
import hashlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hyvideo.config.loading import load_config
from hyvideo.planning.networks import read_networks
from hyvideo.planning.rehearsal import rehearse, rehearse_extrapolated
from hyvideo.reports.markdown import markdown_table, write_part

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "planning.md"
LEVELS = ("none", "checked", "rehearsed", "run", "trained", "published")
NEEDED = {2: "surprises", 3: "gpu", 4: "gpu", 5: "reward_curve"}
"""What the evidence of a level must tell."""

BASE, FEW = "--world_size 8 --config configs/sage_8gpu.yaml", "--grpo_sampling_steps 3"
RUNS = {
    "sage_8gpu": BASE,
    "sage_64gpu": "--world_size 64 --config configs/sage_64gpu.yaml",
    "lora": f"{BASE} configs/lora.yaml configs/kl/dual.yaml {FEW}",
    "sage": f"{BASE} configs/method/sage.yaml configs/kl/step.yaml {FEW}",
    "dance": f"{BASE} configs/method/dance.yaml configs/kl/fixed.yaml {FEW}",
    "flow": f"{BASE} configs/method/flow.yaml configs/kl/moving.yaml {FEW}",
    "cps": f"{BASE} configs/method/cps.yaml configs/kl/none.yaml {FEW}",
    "nft": f"{BASE} configs/method/nft.yaml {FEW}",
    "one_gpu_24gb": f"--world_size 1 --config configs/one_gpu_24gb.yaml {FEW}",
    "one_gpu_48gb": f"--world_size 1 --config configs/one_gpu_48gb.yaml {FEW}",
    "image_to_video": f"{BASE} --pretrained_transformer_version 480p_i2v {FEW}",
}
"""What is rehearsed: the first two with all denoising steps, the others with three, which show what they change."""

WHOLE = ("sage_8gpu", "sage_64gpu", "one_gpu_24gb", "one_gpu_48gb")
"""Runs whose numbers are extrapolated to all blocks. Of the others only two blocks are rehearsed."""

SHOWN = ("blocks", "peak_gib", "operations_1e15", "sent_gb", "reads")
"""Numbers of the table."""


@dataclass(frozen=True)
class Evidence:
    """One run, as docs/proof has it.

    Attributes:
        level: index in `LEVELS`.
        command: what was typed.
        date, commit: when, and of which code.
        configs: the files of its --config, and the hash of what each says.
        numbers: what was found.
    """

    level: int
    command: str
    date: str
    commit: str
    configs: dict[str, str]
    numbers: dict[str, Any]


def main(argv: list[str]) -> int:
    """Rehearse and write; returns the exit status (0, or 1 where a rehearsal had surprises)."""
    parser = argparse.ArgumentParser("proof", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="NAME", help=f"of {', '.join(RUNS)}")
    surprised = False
    for name in parser.parse_args(argv).runs:
        if name not in RUNS:
            parser.error(f"there is no run {name!r}; expected one of {', '.join(RUNS)}")
        found = _rehearse(name)
        folder = ROOT / "docs" / "proof"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(vars(found), indent=1) + "\n", encoding="utf-8")
        surprised |= bool(found.numbers["surprises"])
    write_part(DOCUMENT, "proof", table())
    return int(surprised)


def _rehearse(name: str) -> Evidence:
    words = shlex.split(RUNS[name])
    world_size, flags = int(words[1]), words[2:]
    config = load_config(flags)
    networks = read_networks(config.model, config.reward)
    if name in WHOLE:
        done = rehearse_extrapolated(config, networks, world_size=world_size)
    else:
        done = rehearse(config, networks, num_layers=2, world_size=world_size)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return Evidence(
        level=LEVELS.index("rehearsed"),
        command=f"python -m scripts.rehearse {RUNS[name]}",
        date=date.today().isoformat(),
        commit=commit.stdout.strip(),
        configs={word: digest_of(ROOT / word) for word in flags if word.startswith("configs/")},
        numbers={
            "blocks": done.extrapolated_to,
            "peak_gib": round(max(done.peaks.values()) / 2**30, 2),
            "operations_1e15": round(sum(done.flops.values()) / 1e15, 2),
            "sent_gb": round(sum(done.sent.values()) / 1e9, 1),
            "reads": round(sum(done.reads.values())),
            "surprises": list(done.surprises),
        },
    )


def digest_of(config: Path) -> str:
    """Return a hash of what a file says, comments left out."""
    content = OmegaConf.to_container(OmegaConf.load(config))
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def all_evidence(root: Path = ROOT) -> dict[str, Evidence]:
    """Return by its name the evidence that holds."""
    paths = sorted((root / "docs" / "proof").glob("*.json"))
    read = {path.stem: Evidence(**json.loads(path.read_text(encoding="utf-8"))) for path in paths}

    def holds(found: Evidence) -> bool:
        """Whether the run went well, and its files still say what they said."""
        paths = {root / config: digest for config, digest in found.configs.items()}
        same = all(path.is_file() and digest == digest_of(path) for path, digest in paths.items())
        return same and NEEDED[found.level] in found.numbers and not found.numbers.get("surprises")

    return {name: found for name, found in read.items() if holds(found)}


def overclaims(root: Path = ROOT) -> Iterator[str]:
    """Yield a sentence for every file of configs/ that does not say its level, or says more than its evidence.

    All but the two that `make demo` runs in full. That settings load and go together, the first level,
    is what `tests/architecture/test_configs_load.py` checks.
    """
    evidence = all_evidence(root).values()
    for path in sorted((root / "configs").rglob("*.yaml")):
        if path.stem in ("tiny", "demo"):
            continue
        config = str(path.relative_to(root))
        claimed = re.search(r"^# Proof: (\w+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        proven = max((found.level for found in evidence if config in found.configs), default=1)
        if claimed is None or claimed[1] not in LEVELS:
            yield f"{config} must say its level in a line `# Proof: {LEVELS[proven]}`"
        elif LEVELS.index(claimed[1]) > proven:
            yield f"{config} says {claimed[1]}, but its evidence shows it {LEVELS[proven]}: run scripts.proof"


def table() -> str:
    """Lay out the evidence in Markdown, one row for each run."""
    header = ("run", "files", "level", "date, commit", "blocks", "GiB", "1e15 operations", "GB sent", "reads")
    rows = []
    for name, found in all_evidence().items():
        files = " ".join(f"`{Path(config).relative_to('configs')}`" for config in found.configs)
        level = f"{found.level} {LEVELS[found.level]}"
        rows.append(
            (name, files, level, f"{found.date}, {found.commit}", *(str(found.numbers.get(key, "")) for key in SHOWN))
        )
    return markdown_table(header, rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
