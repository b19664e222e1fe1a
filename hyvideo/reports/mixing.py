"""How several metrics share in what a run learns: one that decides nothing, or everything, is seen here."""

import numpy as np

from hyvideo.observability.run_record import RunRecord
from hyvideo.reports.charts import ROUND, Chart, Line, smooth

_CHARTS = {
    "share": (
        "Share of each metric in the advantage",
        "All shares add up to 1. Near 0 a metric decides nothing, near 1 everything; below 0 it is overruled.",
    ),
    "spread": (
        "Spread of each metric within a prompt",
        "Standard deviation, in the metric's unit. The sum follows the metric whose spread times weight is largest.",
    ),
    "correlation": (
        "Correlation of each metric with the others",
        "Within prompts, with the others' weighted sum. Near 1 it adds little; below 0 it contradicts them.",
    ),
}


def mixing_charts(run: RunRecord) -> list[Chart]:
    """Chart the parts of a run's advantages (`mixing/*`), a line per metric; nothing for a run with one metric."""
    charts = []
    for of, (title, about) in _CHARTS.items():
        lines = []
        for number, name in enumerate(run.metric_names):
            x, y = run.per_round(f"mixing/{of}_{name}")
            if np.isfinite(y).any():
                lines.append(Line(name, x, smooth(y), number, raw=y, gaps=run.gaps))
        charts.append(Chart(title, about, lines, of=ROUND))
    return charts
