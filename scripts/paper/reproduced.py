"""What runs of `scripts.paper.reproduce` found, beside what the paper says: tables, claims, curves, studies, page."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from pydantic_core import to_json

from hyvideo.config.outside import complain
from hyvideo.data.files import remove, replace_synced
from hyvideo.evaluation.comparison import OVERALL
from hyvideo.evaluation.intervals import Interval, bootstrap_interval, seed_interval
from hyvideo.evaluation.scored_files import SCORES
from hyvideo.observability.metrics import read_rows
from scripts.paper.study import BLACK, BLUE, GREEN, OPEN, RED, legend_below, tidy, verdict
from scripts.reports.gallery import read_models, write_study
from scripts.reports.markdown import markdown_table
from scripts.reports.page import data_url, write_page
from scripts.reports.win_rates import CRITERIA, read_votes, win_rates

if TYPE_CHECKING:
    from scripts.paper.reproduce import PaperRun

COLOURS = (BLUE, RED, GREEN, BLACK)

Scores = Mapping[str, Mapping[int, Mapping[str, np.ndarray]]]
"""Row -> seed -> metric -> [N] scores of its videos, of the same N prompts and noises for all."""


def read_scores(runs: "Sequence[PaperRun]") -> dict[str, dict[int, dict[str, np.ndarray]]]:
    """Read what `scripts.evaluate` noted of the finished runs."""
    found: dict[str, dict[int, dict[str, np.ndarray]]] = {}
    for run in (run for run in runs if run.is_finished):
        of_videos: dict[str, dict[str, float | None]] = {}
        for line in (run.measured / run.name / SCORES).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            of_videos.setdefault(row["video"], {}).update(row["scores"])
        videos = [of_videos[name] for name in sorted(of_videos)]
        metrics = {name: np.array([video.get(name) for video in videos], dtype=float) for name in videos[0]}
        if {"VQ", "MQ", "TA"} <= set(metrics):
            metrics = {OVERALL: metrics["VQ"] + metrics["MQ"] + metrics["TA"], **metrics}
        found.setdefault(run.row, {})[run.seed] = metrics
    return found


def _unscored(scores: Scores) -> dict[str, tuple[int, int]]:
    """Return row -> (videos without a score by some metric, videos) for the rows that have such."""
    counts = {}
    for row, seeds in scores.items():
        missing = [np.isnan(np.stack([*metrics.values()])).any(0) for metrics in seeds.values()]
        if number := int(np.concatenate(missing).sum()):
            counts[row] = (number, sum(map(len, missing)))
    return counts


def mean_of(scores: Scores, row: str, metric: str) -> Interval | None:
    """Mean of a row with its interval, over seeds where there are several, else over prompts; None: not measured."""
    return _interval([of[metric] for of in scores.get(row, {}).values() if metric in of])


def difference(scores: Scores, row: str, other: str, metric: str) -> Interval | None:
    """Mean difference of two rows, paired by prompt and noise and, where both were trained several times, by seed."""
    own, theirs = scores.get(row, {}), scores.get(other, {})
    pairs = [(seed, seed) for seed in own if seed in theirs]
    if other == "base":
        pairs = [(seed, next(iter(theirs))) for seed in own if theirs]
    return _interval([own[a][metric] - theirs[b][metric] for a, b in pairs if metric in own[a] and metric in theirs[b]])


def _interval(of_seeds: Sequence[np.ndarray]) -> Interval | None:
    of_seeds = [values for values in of_seeds if not np.isnan(values).all()]
    if not of_seeds:
        return None
    if len(of_seeds) > 1:
        return seed_interval([float(np.nanmean(values)) for values in of_seeds])
    (values,) = of_seeds
    return bootstrap_interval(values)


def agreement(gain: Interval | None, published: float) -> str:
    """Say whether a gain over the base model agrees with the paper's.

    It agrees if its interval holds the published gain and not 0, and differs if it does not hold it. An interval that
    holds both could not have shown that the row does nothing, so it tells nothing.
    """
    if gain is None or math.isnan(gain.low):
        return OPEN
    if not gain.low <= published <= gain.high:
        return "differs"
    return OPEN if gain.low <= 0 <= gain.high else "agrees"


def publish(paper: Mapping[str, Any], out: Path, runs: "Sequence[PaperRun]", *, scale: str) -> Path:
    """Write tables, results, studies and the page below `out`; return the page's path."""
    scores = read_scores(runs)
    metrics = [
        name for name in paper["columns"] if any(name in of for seeds in scores.values() for of in seeds.values())
    ]
    rows = ["base", *dict.fromkeys(run.row for run in runs if run.row != "base")]
    without = _unscored(scores)
    for row, (missing, videos) in without.items():
        complain(f"WARNING: {row}: {missing} of {videos} videos have no score by some metric; its mean is of the rest.")
    table = [_row(paper, scores, row, metrics, scale) | {"unscored": without.get(row)} for row in rows]
    claims = [_claim(scores, claim, metrics) for claim in paper["claims"]]
    rates = _studies(paper, out, runs)
    found = {
        "scale": scale,
        "rows": table,
        "claims": claims,
        "table3": rates,
        "finished": sum(run.is_finished for run in runs),
        "runs": len(runs),
    }
    replace_synced(out / "results.json", to_json(found, indent=1, inf_nan_mode="null") + b"\n")
    replace_synced(out / "table2.md", _table2(table, metrics).encode())
    replace_synced(out / "table3.md", _table3(rates).encode())
    return write_page(
        out / "index.html",
        "reproduction.html",
        **found,
        metrics=metrics,
        left_out=[name for name in paper["columns"] if name not in metrics],
        figures=list(_figures(paper, runs)),
        criteria={name: title for name, (title, _) in CRITERIA.items()},
    )


def label_of(paper: Mapping[str, Any], row: str) -> tuple[str, str, str]:
    """Return a row's method, KL strategy and reward setting in words."""
    if row == "base":
        return "HunyuanVideo-1.5", "not trained", ""
    name, _, setting = row.rpartition("-")
    about = paper["rows"][name]
    strategy = {"none": "without KL", "dual": "dual moving KL"}.get(about["kl"], f"{about['kl']} KL")
    return paper["methods"][about["method"]], ", ".join(filter(None, [strategy, about.get("label")])), setting.upper()


def _row(paper: Mapping[str, Any], scores: Scores, row: str, metrics: Sequence[str], scale: str) -> dict[str, Any]:
    method, strategy, setting = label_of(paper, row)
    if row == "base" and scale == "tiny":
        method = "the bundled model"
    published = dict(zip(paper["columns"], paper["table2"].get(row, []), strict=False))
    base = dict(zip(paper["columns"], paper["table2"]["base"], strict=True))
    cells = {}
    for name in metrics:
        gain = None if row == "base" else difference(scores, row, "base", name)
        said = published.get(name)
        cells[name] = {
            "ours": mean_of(scores, row, name),
            "paper": said,
            "gain": gain,
            "paper_gain": None if said is None or row == "base" else said - base[name],
            # the tiny model's rewards have other units, so that only signs and orders can be compared
            "verdict": agreement(gain, said - base[name]) if said is not None and scale == "full" and gain else "",
        }
    return {
        "row": row,
        "method": method,
        "kl": strategy,
        "setting": setting,
        "seeds": len(scores.get(row, {})),
        "cells": cells,
    }


def _claim(scores: Scores, claim: Mapping[str, Any], metrics: Sequence[str]) -> dict[str, Any]:
    parts = []
    for metric in claim["metrics"]:
        if metric not in metrics:
            parts.append({"metric": metric, "verdict": "not measured", "evidence": ""})
            continue
        ahead = {other: difference(scores, claim["first"], other, metric) for other in claim["others"]}
        listed = "; ".join(f"{other} {interval or 'not there yet'}" for other, interval in ahead.items())
        parts.append({"metric": metric, "verdict": verdict(list(ahead.values())), "evidence": listed})
    return {"text": claim["text"], "first": claim["first"], "parts": parts}


def _studies(paper: Mapping[str, Any], out: Path, runs: "Sequence[PaperRun]") -> list[dict[str, Any]]:
    """Write a blind study per baseline, once both are measured, and count the votes that lie beside it."""
    first = {}
    for run in runs:
        if run.is_finished:
            first.setdefault(run.row, run)
    found = []
    for baseline, published in paper["table3"].items():
        rates: dict[str, Any] = {}
        study = out / "studies" / f"sage_vs_{baseline.partition('-')[0]}"
        votes = study.with_name(f"{study.name}.votes")
        if paper["shown"] in first and baseline in first:
            named = [(row, first[row].measured / first[row].name) for row in (paper["shown"], baseline)]
            key = study.with_name(f"{study.name}.key.json")
            if not (key.is_file() and (study / "index.html").is_file()):  # one that was interrupted is begun again
                remove(study)
                key.unlink(missing_ok=True)
                models = read_models(named)
                write_study(study, models, num_pairs=min(32, len(models[0].videos)))
                votes.mkdir(exist_ok=True)
            try:
                counted = win_rates(key, read_votes(files)) if (files := sorted(votes.glob("*.json"))) else []
            except ValueError as error:
                complain(f"reproduce: the votes in '{votes}' are left out: {error}")
                counted = []
            for rate in counted:
                is_first = rate.first == paper["shown"]
                low, high = (rate.low, rate.high) if is_first else (1 - rate.high, 1 - rate.low)
                rates[rate.criterion] = Interval(rate.rate if is_first else 1 - rate.rate, low, high, rate.num_pairs)
        method, strategy, _ = label_of(paper, baseline)
        found.append(
            {
                "baseline": f"{method}, {strategy}",
                "paper": published,
                "ours": rates,
                "study": study.name if study.exists() else "",
            }
        )
    return found


def _table2(table: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> str:
    parts, head = [], ["method", "KL", *metrics]
    for setting in sorted({row["setting"] for row in table if row["setting"]}):
        lines, gains = [], []
        for row in table:
            if row["setting"] in ("", setting):
                of_row, cells = [row["method"], row["kl"]], row["cells"].values()
                lines.append(of_row + [f"{c['ours'] or '-'} ({_said(c['paper'])})" for c in cells])
                gained = [f"{c['gain'] or '-'} ({_said(c['paper_gain'])}) {c['verdict']}".strip() for c in cells]
                gains += [of_row + gained] if row["row"] != "base" else []
        parts += [f"## Setting {setting}", "Ours with 95 % intervals, and the paper's number in brackets."]
        parts += [markdown_table(head, lines), "Gain over the base model, likewise.", markdown_table(head, gains)]
    return "\n\n".join(["# Table 2", *parts]) + "\n"


def _table3(rates: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for rate in rates:
        cells = []
        for name in CRITERIA:
            ours = rate["ours"].get(name)
            own = f"{ours.mean:.1%} [{ours.low:.1%}, {ours.high:.1%}]" if ours else "no votes"
            cells.append(f"{own} ({rate['paper'][name]:.1%})")
        lines.append([rate["baseline"], *cells])
    head = ["SAGE-GRPO preferred over", *(title for title, _ in CRITERIA.values())]
    return f"# Table 3\n\nOurs, and the paper's number in brackets.\n\n{markdown_table(head, lines)}\n"


def _said(number: float | None) -> str:
    return "-" if number is None else f"{number:+.3f}"


def _figures(paper: Mapping[str, Any], runs: "Sequence[PaperRun]") -> list[dict[str, str]]:
    """Draw the mean reward of every round over the updates, a panel per method and a line per row."""
    of_rows: dict[str, list[dict[int, float]]] = {}
    for run in runs:
        path = run.folder / "metrics.jsonl"
        rows = read_rows(path)[0] if path.is_file() else []
        curve = {int(row["step"]): row["reward/mean"] for row in rows if "reward/mean" in row}
        if curve:
            of_rows.setdefault(run.row, []).append(curve)
    drawn = []
    for title, panels in paper["figures"].items():
        panels = {name: rows for name, rows in panels.items() if any(row in of_rows for row in rows)}
        if not panels:
            continue
        width = 3.4 * len(panels) if len(panels) > 1 else 6.8
        figure = Figure(figsize=(width, 3.0), layout="constrained")
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (name, rows) in zip(all_axes, panels.items(), strict=True):
            for colour, row in zip(COLOURS, rows, strict=False):
                curves = of_rows.get(row, [])
                steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
                means = [float(np.mean([curve[step] for curve in curves])) for step in steps]
                axes.plot(steps, means, color=colour, label=label_of(paper, row)[1], linewidth=1.3)
            tidy(axes, title=name if len(panels) > 1 else "", xlabel="update", ylabel="training reward")
        legend_below(figure, all_axes[0], columns=4)
        picture = io.BytesIO()
        figure.savefig(picture, format="svg")
        drawn.append({"title": title, "picture": data_url("image/svg+xml", picture.getvalue())})
    return drawn
