"""A study: one figure or table of the paper, how it is drawn, and how it gets into docs/claims.md with its raw numbers.

The pictures have one size of text, one colour-blind-safe palette, and one name and colour per sampler.
"""

import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from hyvideo.evaluation.intervals import Interval
from scripts.reports.markdown import replace_part

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot tell"
DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = "claims.md"

BLUE, ORANGE, GREEN, RED, BLACK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#333333"
"""From Okabe and Ito's palette: distinguishable with any colour vision."""

SAMPLERS = {"sage_grpo": "SAGE", "flow_grpo": "Flow-GRPO", "dance_grpo": "DanceGRPO", "cps": "CPS"}
"""sde_type -> its name in pictures and tables."""

COLOURS = {"sage_grpo": BLUE, "flow_grpo": RED, "dance_grpo": GREEN}
MARKERS = {"sage_grpo": "o", "flow_grpo": "s", "dance_grpo": "^"}


@dataclass(frozen=True)
class Claim:
    """A claim of the paper and its verdict.

    Attributes:
        text: the claim.
        verdict: HOLDS, FAILS or OPEN.
        evidence: the numbers behind the verdict, in a few words.
    """

    text: str
    verdict: str
    evidence: str


@dataclass(frozen=True)
class Study:
    """One figure or table.

    What a study finds is a mapping of plain numbers and names; picture, paragraph and claims depend on nothing else, so
    they can be made again from the committed JSON.

    Attributes:
        name: of its module, its files and its section.
        title: heading of its section.
        describe: markdown that says what is seen and how it was made.
        claims: the claims it tests.
        draw: the picture of what was found.
    """

    name: str
    title: str
    describe: Callable[[Mapping[str, Any]], str]
    claims: Callable[[Mapping[str, Any]], Sequence[Claim]]
    draw: Callable[[Mapping[str, Any]], Figure]

    def section(self, found: Mapping[str, Any]) -> str:
        """The markdown of its section of the document; its verdicts are in the table of all claims."""
        source = f"`python -m scripts.paper.{self.name}` ([raw numbers](claims/{self.name}.json))"
        picture = f"![{self.title}](claims/{self.name}.png)"
        heading = f'<a id="{self.name}"></a>\n\n## {self.title}'
        return "\n\n".join([heading, picture, self.describe(found), source])

    def publish(self, found: Mapping[str, Any], docs: Path = DOCS) -> None:
        """Write picture, raw numbers, section and the table of claims below `docs`, and print the paragraph."""
        rounded = _rounded({**found, "claims": [asdict(claim) for claim in self.claims(_rounded(found))]})
        folder = docs / "claims"
        folder.mkdir(parents=True, exist_ok=True)
        self.draw(rounded).savefig(folder / f"{self.name}.png", dpi=110)
        text = json.dumps(rounded, indent=1, allow_nan=False)  # then the innermost lists and mappings on one line each
        text = re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda match: re.sub(r"\s+", " ", match.group()), text)
        (folder / f"{self.name}.json").write_text(text + "\n", encoding="utf-8")
        document = docs / DOCUMENT
        text = document.read_text(encoding="utf-8") if document.exists() else ""
        text = replace_part(text, self.name, self.section(rounded))
        document.write_text(replace_part(text, "table", claims_table(folder)), encoding="utf-8")
        print(self.section(rounded))


def verdict(differences: Sequence[Interval | None]) -> str:
    """The verdict on "better than each of these": it holds if all intervals lie above 0, and fails if one lies below.

    Anything else is open, including an arm that is missing or has a single seed.
    """
    if any(interval is not None and interval.high < 0 for interval in differences):
        return FAILS
    return HOLDS if differences and all(d is not None and d.low > 0 for d in differences) else OPEN


def paragraph(text: str) -> str:
    """Wrap a text, however it is broken in the code, to the document's lines."""
    return textwrap.fill(" ".join(text.split()), width=120, break_long_words=False, break_on_hyphens=False)


def claims_table(folder: Path) -> str:
    """One row per claim of every study whose raw numbers lie in `folder`, with a link to its section."""
    rows = ["| claim | verdict | evidence |", "|---|---|---|"]
    for path in sorted(folder.glob("*.json")):
        rows += [
            f"| [{claim['text']}](#{path.stem}) | **{claim['verdict']}** | {claim['evidence']} |"
            for claim in json.loads(path.read_text(encoding="utf-8"))["claims"]
        ]
    return "\n".join(rows)


def _rounded(found: Mapping[str, Any]) -> dict[str, Any]:
    """Floats to six digits, NaN and infinities to None, as they are read back from JSON."""
    text = json.dumps(found)
    return json.loads(text, parse_float=lambda number: float(f"{float(number):.6g}"), parse_constant=lambda name: None)


def tidy(axes: Axes, *, title: str = "", xlabel: str = "", ylabel: str = "") -> None:
    """Give axes their labels, a light grid and no box."""
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(xlabel, fontsize=9)
    axes.set_ylabel(ylabel, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            axis.set_minor_formatter(NullFormatter())


def legend_below(figure: Figure, axes: Axes, columns: int) -> None:
    """One legend for all panels, below them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
