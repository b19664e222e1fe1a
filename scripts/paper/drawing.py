"""How the studies' pictures look: one size of text, one colour-blind-safe palette, one name and colour per sampler."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

BLUE, ORANGE, GREEN, RED, BLACK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#333333"
"""From Okabe and Ito's palette: distinguishable with any colour vision."""

SAMPLERS = {"sage_grpo": "SAGE", "flow_grpo": "Flow-GRPO", "dance_grpo": "DanceGRPO", "cps": "CPS"}
"""sde_type -> its name in pictures and tables."""

COLOURS = {"sage_grpo": BLUE, "flow_grpo": RED, "dance_grpo": GREEN}
MARKERS = {"sage_grpo": "o", "flow_grpo": "s", "dance_grpo": "^"}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, size in inches, that can be saved without a display."""
    return Figure(figsize=(width, height), layout="constrained")


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
