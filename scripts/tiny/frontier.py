"""What a trust region buys: the demo's gain against what it loses, for several anchors and strengths of the KL.

Example: `python -m scripts.tiny.frontier --output_dir outputs/frontier`

Every point is a run of `scripts.tiny.prove_learning` with other settings of the KL, the demo's own over five seeds.
After each it writes a picture and `frontier.json`. Finished runs are kept: started again, the command goes on. Two
commands, one of them with `--backwards`, are faster than one.
"""

import sys
from itertools import cycle
from pathlib import Path

from matplotlib.figure import Figure
from pydantic_core import to_json
from transformers.utils.logging import disable_progress_bar

from hyvideo.config.flags import Parser
from hyvideo.config.outside import complain
from scripts.paper.study import legend_below
from scripts.reports.improvement import HELD_OUT
from scripts.tiny.comparison import FAR
from scripts.tiny.prove_learning import found_in, train_and_compare

MOVING = ("--use_moving_KL", "true", "--update_ref_model_step", "10")
ANCHORS = {
    "no KL": ("none", (0.0,), ()),
    "fixed anchor": ("fixed", (0.005, 0.02, 0.1), ()),
    "moving anchor": ("moving", (0.02, 0.2), (*MOVING, "--use_dual_kl", "false")),
    "dual": ("dual", (0.02, 0.2), MOVING),
}
"""Kind of trust region -> name of its folders, its lambdas, and its flags beside the demo's."""

LOSSES = {
    "moved": f"dark and light backgrounds that moved\nby more than {FAR} of 255 levels, %",
    "drift/saturation_siblings": "change of the spread of saturation\namong a prompt's videos, %",
}
"""What a run may lose -> in words."""

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
            _write(arguments.output_dir)
    except (ValueError, OSError) as error:
        complain(f"frontier: {error}")
        return 2
    return 0


def _write(folder: Path) -> None:
    """Write the numbers of every finished run, and the picture of them."""
    rows = []
    for name, (anchor, weight, seed, flags) in points().items():
        if (folder / name / HELD_OUT).is_file():
            gains, kept = found_in(folder / name)
            gain = gains["reward"].in_base_std
            row = {"anchor": anchor, "kl_weight": weight, "seed": seed, "flags": " ".join(flags), "gain": gain}
            row |= {"hits": kept.hits[1], "moved": kept.moved, **kept.drift.metrics()}
            rows.append(row)
            print(f"{name:14s} gain {gain:+.2f}, moved {kept.moved:.0%}, " + str(kept.drift), flush=True)
    (folder / "frontier.json").write_bytes(to_json(rows, indent=1, inf_nan_mode="constants") + b"\n")
    settings = dict.fromkeys((row["anchor"], row["kl_weight"]) for row in rows)
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    for axes, (name, loss) in zip(figure.subplots(1, len(LOSSES), sharey=True), LOSSES.items(), strict=True):
        for marker, (anchor, weight) in zip(cycle("osv^D<P>"), settings, strict=False):
            own = [row for row in rows if (row["anchor"], row["kl_weight"]) == (anchor, weight)]
            gained, lost = [row["gain"] for row in own], [100 * row[name] for row in own]
            axes.plot(lost, gained, marker, label=f"{anchor}, {weight:g}", alpha=0.8)  # some lie on each other
        axes.set_xlabel(loss)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("gain of the reward, base std")
    figure.axes[0].set_title("What a trust region buys, by anchor and lambda", loc="left")
    legend_below(figure, figure.axes[0], columns=3)
    figure.savefig(folder / "frontier.png", dpi=150)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
