"""What a trust region buys: the demo's gain against what it loses, for several anchors and strengths of the KL.

Example: `python -m scripts.tiny.frontier --output_dir outputs/frontier`

Every point is a run of `scripts.tiny.prove_learning` with other settings of the KL, the demo's own over five seeds. It
writes a picture and `frontier.json`. Finished runs are kept: started again, the command continues where it stopped. Two
commands, one of them with `--backwards`, use two cores better than one.
"""

import sys
from pathlib import Path

from matplotlib.figure import Figure
from pydantic_core import to_json
from transformers.utils.logging import disable_progress_bar

from hyvideo.config.flags import Parser
from hyvideo.config.outside import complain
from scripts.reports.improvement import HELD_OUT
from scripts.tiny.comparison import FAR
from scripts.tiny.prove_learning import found_in, train_and_compare

MOVING = ("--use_moving_KL", "true", "--update_ref_model_step", "10")
ANCHORS = {
    "no KL": ("none", (0.0,), ()),
    "fixed anchor (the demo's)": ("fixed", (0.005, 0.02, 0.1), ()),
    "moving anchor": ("moving", (0.02, 0.2), (*MOVING, "--use_dual_kl", "false")),
    "moving anchor and velocity (dual)": ("dual", (0.02, 0.2), MOVING),
}
"""Kind of trust region -> name of its folders, its lambdas, and its flags beside the demo's."""

SEEDS = (1, 2, 3, 4, 5)
"""Seeds of the chosen point; the others have the first."""

CHOSEN = ("fixed", 0.02)


def points() -> dict[str, tuple[str, float, int, list[str]]]:
    """Return of every run its folder's name, kind of trust region, lambda, seed, and flags beside the demo's."""
    runs = {}
    for kind, (name, weights, own) in ANCHORS.items():
        for weight in weights:
            for seed in SEEDS if (name, weight) == CHOSEN else SEEDS[:1]:
                runs[f"{name}-{weight:g}-{seed}"] = (kind, weight, seed, ["--kl_weight", str(weight), *own])
    return runs


def main(argv: list[str]) -> int:
    """Train what is not trained yet, then write numbers and picture; returns the exit status."""
    disable_progress_bar()
    parser = Parser("frontier", description=__doc__)
    parser.add_argument("--num_held_out", type=int, default=206, help="held-out videos; default 206")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/frontier"), help="folder of the runs")
    parser.add_argument("--backwards", action="store_true", help="begin with the last run, beside another command")
    arguments, flags = parser.parse_known_args(argv)
    runs = points()
    try:
        for name in reversed(runs) if arguments.backwards else runs:
            _, _, seed, own = runs[name]
            train_and_compare(arguments.output_dir / name, seed, arguments.num_held_out, [*own, *flags])
        if all((arguments.output_dir / name / HELD_OUT).is_file() for name in runs):
            _write(arguments.output_dir)
    except (ValueError, OSError) as error:
        complain(f"frontier: {error}")
        return 2
    return 0


def _write(folder: Path) -> None:
    """Write every run's numbers, and the picture of them."""
    rows = []
    for name, (anchor, weight, seed, flags) in points().items():
        gains, kept = found_in(folder / name)
        gain, border = gains["reward"], kept.drift.changes["border"]
        row = {"anchor": anchor, "kl_weight": weight, "seed": seed, "flags": " ".join(flags)}
        row |= {"gain_in_base_std": gain.in_base_std, "moved": kept.moved, "hits": kept.hits[1]}
        rows.append(row | {"border_spread": border.spread, "border_siblings": border.siblings})
        print(f"{name:14s} gain {gain.in_base_std:+.2f}, moved {kept.moved:.0%}, border {border.spread.mean:+.0%}")
    (folder / "frontier.json").write_bytes(to_json(rows, indent=1, inf_nan_mode="constants") + b"\n")
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for anchor in dict.fromkeys(row["anchor"] for row in rows):
        own = [row for row in rows if row["anchor"] == anchor]
        axes.plot([100 * row["moved"] for row in own], [row["gain_in_base_std"] for row in own], "o", label=anchor)
        for row in own:
            where = (100 * row["moved"], row["gain_in_base_std"])
            axes.annotate(f"{row['kl_weight']:g}", where, xytext=(5, -3), textcoords="offset points", fontsize=8)
    axes.set_xlabel(f"dark and light backgrounds that moved by more than {FAR} of 255 levels, %")
    axes.set_ylabel("gain of the reward, base std")
    axes.set_title("What a trust region buys (numbers: lambda)", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(folder / "frontier.png", dpi=150)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
