"""A comparison as markdown: one row per model in the form of the paper's Table 2, then gains and win rates."""

from collections.abc import Mapping, Sequence

from hyvideo.evaluation.comparison import Comparison
from hyvideo.evaluation.intervals import Interval


def markdown_of(comparison: Comparison) -> str:
    """Write the three tables with a line that says what the intervals are; win rates by the first metric."""
    models = list(comparison.means)
    metrics = list(comparison.means[models[0]])
    failed = sum(count for of_model in comparison.num_failed.values() for count in of_model.values())
    said = f"{failed} scores failed and are left out." if failed else "No score failed."
    parts = [
        f"{comparison.num_prompts} prompts, {comparison.num_videos} videos of each model. Means with 95 % intervals "
        f"(over prompts: bootstrap, below 30 Student's t; win rates Wilson's). {said}",
        _table(["model", *metrics], [[m, *_cells(comparison.means[m])] for m in models]),
    ]
    if len(models) > 1:
        parts += [
            f"Gain over {models[0]}, paired by prompt and seed:",
            _table(["model", *metrics], [[m, *_cells(gains)] for m, gains in comparison.gains.items()]),
            f"How often the row's model scores higher than the column's ({metrics[0]}; 0.5 is even):",
            _table(["", *models], _win_rows(comparison.win_rates[metrics[0]], models)),
        ]
    return "\n\n".join(parts) + "\n"


def _cells(intervals: Mapping[str, Interval]) -> list[str]:
    return [str(interval) for interval in intervals.values()]


def _win_rows(rates: Mapping[str, Mapping[str, Interval]], models: Sequence[str]) -> list[list[str]]:
    """One row per model against every other."""
    return [[m, *("" if m == other else _share(rates[m][other]) for other in models)] for m in models]


def _share(rate: Interval) -> str:
    return str(rate) if rate.num == 0 else f"{rate.mean:.2f} [{rate.low:.2f}, {rate.high:.2f}]"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
