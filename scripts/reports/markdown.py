"""Comparisons as markdown tables, and documents in which programs write a part."""

import re
from collections.abc import Iterable, Mapping, Sequence

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
        markdown_table(["model", *metrics], [[m, *_cells(comparison.means[m])] for m in models]),
    ]

    def share(model: str, other: str) -> str:
        """Write how often one model wins against another; nothing for a model against itself."""
        if model == other:
            return ""
        rate = comparison.win_rates[metrics[0]][model][other]
        return str(rate) if rate.num == 0 else f"{rate.mean:.2f} [{rate.low:.2f}, {rate.high:.2f}]"

    if len(models) > 1:
        parts += [
            f"Gain over {models[0]}, paired by prompt and seed:",
            markdown_table(["model", *metrics], [[m, *_cells(gains)] for m, gains in comparison.gains.items()]),
            f"How often the row's model scores higher than the column's ({metrics[0]}; 0.5 is even):",
            markdown_table(["", *models], [[m, *(share(m, other) for other in models)] for m in models]),
        ]
    return "\n\n".join(parts) + "\n"


def _cells(intervals: Mapping[str, Interval]) -> list[str]:
    return [str(interval) for interval in intervals.values()]


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are written already."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def replace_part(text: str, name: str, content: str) -> str:
    """Put `content` between the document's markers `<!-- name -->` and `<!-- /name -->`, at its end if it has none."""
    part = f"<!-- {name} -->\n{content}\n<!-- /{name} -->"
    pattern = re.compile(rf"<!-- {re.escape(name)} -->\n.*?<!-- /{re.escape(name)} -->", re.DOTALL)
    if pattern.search(text):
        return pattern.sub(lambda match: part, text)
    return f"{text.rstrip()}\n\n{part}\n"
