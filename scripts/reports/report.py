"""The report of a run, or of several side by side: one HTML file that needs no network."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hyvideo.config.schema import Config
from hyvideo.config.settings import SETTINGS, value_of
from hyvideo.evaluation.drift import LOOKS, drift_of
from hyvideo.evaluation.paired import PairedComparison
from hyvideo.observability.metrics import METRIC_MEANINGS, stretches_in_words
from hyvideo.observability.scored_videos import ScoredVideo, last_common_step
from scripts.reports.charts import charts_of, evenly_spaced, gain_chart, line_style, time_split
from scripts.reports.improvement import (
    against,
    common_range,
    improvement,
    verdict_of,
    verdict_of_runs,
    verdict_without_pairs,
    worst_median_best,
)
from scripts.reports.page import place_video, relative_url, write_page
from scripts.reports.pictures import BEFORE_AFTER
from scripts.reports.run_record import RunRecord, read_run
from scripts.reports.words import decimals_for, fixed, in_words, signed

_MAX_MOMENTS = 6
_MAX_PROMPTS = 32
_MAX_OF_GROUP = 8
_MAX_WARNINGS = 50
_CHANGED = ("most changed,", "second most,", "third most,")

Shown = dict[str, Any]
"""What a template shows of one thing, by the names that it uses."""


def report_runs(folders: Sequence[Path], path: Path, names: Sequence[str | None] = (), *, embed: bool = False) -> Path:
    """Write the report of one run folder, or the comparison of several.

    The runs may be finished, in progress, or killed. A name that is None, or no names, takes that of the folder. With
    `embed` the videos are put into the file instead of being linked.

    Raises:
        ValueError: a folder is not a run folder, or two runs have the same name.
    """
    runs = [read_run(folder, name) for folder, name in zip(folders, names or [None] * len(folders), strict=True)]
    taken = [run.name for run in runs]
    doubled = sorted({name for name in taken if taken.count(name) > 1})
    if doubled:
        raise ValueError(
            f"Two runs are called {', '.join(doubled)}: {', '.join(str(run.folder) for run in runs)}. "
            "Name them, as in `sage=outputs/a dance=outputs/b`."
        )
    settings = _settings([run.config for run in runs])
    context = {
        "runs": runs,
        "title": runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared",
        "written": datetime.now(),
        "sections": charts_of(runs),
        "splits": [time_split(run) for run in runs],
        "settings": settings,
        "headline": gain_chart(runs),
        "in_progress": any(_in_progress(run) for run in runs),
        "decimals": decimals_for([video.reward for run in runs for videos in run.samples.values() for video in videos]),
        "troubles": [_troubles(run) for run in runs],
    }
    if len(runs) == 1:
        return write_page(path, "report.html", **context, **_of_one(path, runs[0], embed))
    return write_page(path, "comparison.html", **context, **_of_several(path, runs, settings, embed))


def _of_several(path: Path, runs: Sequence[RunRecord], settings: Sequence[Shown], embed: bool) -> Shown:
    """Compare runs, which may differ in length, as they were after the last update that all of them validated."""
    common = last_common_step(run.samples for run in runs)
    until = min(run.num_updates for run in runs) if common is None else common
    cut = [run.until(until) for run in runs]
    gains = [None if common is None else improvement(run, held_out=False) for run in cut]
    others = [None if common is None else against(cut[0], run) for run in cut[1:]]
    known = [run for run in runs if run.config]
    notable = [setting for setting in settings if setting["notable"] and setting["decides"]]
    differences = [  # as one would type them
        [f"{setting['name']} {setting['values'][known.index(run)]}" for setting in notable] if run.config else []
        for run in runs
    ]
    return {
        "until": until,
        "rows": [*zip(runs, gains, [None, *others], map(_facts, cut), differences, strict=True)],
        "verdict": verdict_of_runs({run.name: run.num_updates for run in runs}, gains, common),
        "scale": common_range([found.gains["reward"].relative for found in (*gains, *others) if found]),
        "run_legend": [(run.name, *line_style(number)) for number, run in enumerate(runs)],
        "strips": _strips(path, [(run.name, run.samples[common]) for run in runs if common in run.samples], embed),
    }


def _of_one(path: Path, run: RunRecord, embed: bool) -> Shown:
    """Collect what only the report of one run shows."""
    gain = improvement(run)
    total = run.config.run.max_steps if run.config else run.num_updates
    rewards = run.per_round("reward/mean")[1]
    rewards = rewards[np.isfinite(rewards)]
    tenth = max(1, len(rewards) // 10)
    steps = list(run.samples)
    shown = [steps[i] for i in evenly_spaced(len(steps), _MAX_MOMENTS)]
    columns = [(f"update {step}" if step else "before training", run.samples[step]) for step in shown]
    ends = [float(part.mean()) if len(part) else math.nan for part in (rewards[:tenth], rewards[-tenth:])]
    film = run.folder / BEFORE_AFTER
    drifted = drift_of(gain.pairs) if gain else None
    rewards = [[pair[side].reward for pair in gain.pairs] for side in (0, 1)] if gain else [[], []]
    most = dict(zip(_CHANGED, drifted.most_changed, strict=False)) if drifted else {}
    return {
        "run": run,
        "state": f"{run.num_updates} of {total} updates, {'not ' if run.num_updates < total else ''}finished",
        "verdict": verdict_of(gain) if gain else verdict_without_pairs(*ends, _next_validation(run)),
        "gain": gain,
        "scale": common_range([each.relative for each in gain.gains.values()] if gain else []),
        "meanings": METRIC_MEANINGS,
        "facts": _facts(run),
        "shown_pairs": _shown_pairs(path, gain, worst_median_best(*rewards), embed) if gain else [],
        "all_pairs": sorted(
            ((old.prompt, old.reward, new.reward) for old, new in (gain.pairs if gain else ())),
            key=lambda pair: pair[1] - pair[2],
        ),
        "drift": drifted,
        "looks": LOOKS,
        "drift_scale": common_range([change.shift for change in drifted.changes.values()] if drifted else []),
        "changed_pairs": _shown_pairs(path, gain, most, embed) if drifted else [],
        "film": relative_url(film, path) if film.is_file() else "",
        "strips": _strips(path, columns, embed),
        "moments": steps,
        "groups": _groups(path, run, embed),
        "gaps": stretches_in_words(run.gaps),
    }


def _shown_pairs(path: Path, gain: PairedComparison, places: Mapping[str, int], embed: bool) -> list[Shown]:
    """Show pairs by their places, each with its gain in base std, or in the reward's own unit."""
    unit = gain.gains["reward"].base_std
    shown = []
    for place, number in places.items():
        before, after = gain.pairs[number]
        relative = (after.reward - before.reward) / (unit if math.isfinite(unit) else 1.0)
        videos = [place_video(v, path, embed=embed, label=label) for label, v in (("before", before), ("after", after))]
        shown.append({"place": place, "gain": relative, "videos": videos})
    return shown


def _groups(path: Path, run: RunRecord, embed: bool) -> list[Shown]:
    """Show a prompt's videos of the first and of the last kept round, best first: that whose rewards differ most."""
    shown = []
    for step in dict.fromkeys([*run.rounds][:1] + [*run.rounds][-1:]):
        videos = [video for video in run.rounds[step] if math.isfinite(video.reward)]
        groups = [[video for video in videos if video.prompt == prompt] for prompt in {v.prompt: None for v in videos}]
        group = max(groups, key=lambda group: float(np.std([video.reward for video in group])), default=[])
        group = sorted(group, key=lambda video: -video.reward)
        ends = group if len(group) <= _MAX_OF_GROUP else group[: _MAX_OF_GROUP // 2] + group[-_MAX_OF_GROUP // 2 :]
        labels = [f"advantage {signed(v.advantage)}" if math.isfinite(v.advantage) else "" for v in ends]
        placed = [place_video(v, path, embed=embed, label=label) for v, label in zip(ends, labels, strict=True)]
        if len(placed) > 1:
            shown.append({"step": step, "number": len(group), "prompt": group[0].prompt, "videos": placed})
    return shown


def _in_progress(run: RunRecord) -> bool:
    """Whether a run may still log something: it has updates to go, and logged one in the last day."""
    young = run.updated is None or datetime.now() - run.updated < timedelta(days=1)
    return run.config is not None and run.num_updates < run.config.run.max_steps and young


def _next_validation(run: RunRecord) -> str:
    """Say when two validations can be compared."""
    config = run.config
    if config is None or config.validation.validation_interval < 1 or not config.data.valid_video_csv:
        return "validation is off (validation_interval, valid_video_csv)"
    interval = config.validation.validation_interval
    step = (run.num_updates // interval + 1) * interval
    if step > config.run.max_steps:
        return "two validations of the same prompts are needed (validate_at_step0)"
    return f"next validation at update {step}" + ("" if run.samples else ", to be compared with the one after it")


def _facts(run: RunRecord) -> dict[str, Shown]:
    """Collect the numbers of the run's last tenth, its last validation, and its failures, and what they are of."""

    def fact(value: str, about: str, *, alarming: bool = False) -> Shown:
        """Return a number in words, with what it is of, as the template shows it."""
        return {"value": value, "about": about, "alarming": alarming}

    def recent(values: np.ndarray, unit: str, words: Callable[[float], str]) -> Shown:
        """Mean of the last tenth of the values there are: one per update, or one per round."""
        last = (finite := values[np.isfinite(values)])[-max(1, len(finite) // 10) :]
        of = f"last {unit}" if len(last) < 2 else f"mean of the last {len(last)} {unit}s"
        return fact(words(float(last.mean())) if len(last) else "–", of)

    times, validations = run.column("seconds"), run.validation("reward")
    seconds = float(np.nanmean(times)) if np.isfinite(times).any() else math.nan
    rewards, failed = run.per_round("reward/mean")[1], float(np.nansum(run.per_round("reward/failed")[1]))
    words = partial(fixed, decimals=decimals_for(rewards))
    step, last = (int(validations[0][-1]), float(validations[1][-1])) if len(validations[0]) else (0, math.nan)
    videos = f"{len(run.samples[step])} videos" if step in run.samples else "mean"
    return {
        "training reward": recent(rewards, "round", words),
        "validation reward": fact(words(last), f"{videos} after update {step}" if math.isfinite(last) else "none yet"),
        "KL to the anchor": recent(run.column("kl/position"), "update", in_words),
        "clipped share": recent(run.column("clip_fraction"), "update", lambda share: f"{fixed(100 * share, 1)} %"),
        "seconds per update": fact(fixed(seconds, 1), "mean of the run"),
        "failed scores": fact(f"{failed:.0f}", "videos of the whole run", alarming=failed > 0),
    }


def _troubles(run: RunRecord) -> list[tuple[str, str]]:
    """List what went wrong: (what, how much or where)."""
    listed = []
    failed = run.per_round("reward/failed")[1]
    if number := np.nansum(failed):
        rounds = int((failed > 0).sum())
        listed.append(("Scores that failed", f"{number:.0f} videos in {rounds} rounds; left out, not counted as 0"))
    if without := np.nansum(run.per_round("reward/groups_without_spread")[1]):
        about = f"{without:.0f}: all videos of a prompt scored alike, nothing to learn"
        listed.append(("Groups without spread", about))
    if run.gaps:
        listed.append(("Updates without a row", f"{stretches_in_words(run.gaps)}; lost from metrics.jsonl"))
    if run.num_discarded:
        listed.append(("Updates made again after a resume", f"{run.num_discarded} rows in metrics.discarded.jsonl"))
    listed += [("File", problem) for problem in run.problems]
    left_out = len(run.warnings) - _MAX_WARNINGS
    if left_out > 0:
        listed.append(("Warning", f"{left_out} earlier warnings are in console.log"))
    return listed + [("Warning", line) for line in run.warnings[-_MAX_WARNINGS:]]


def _strips(path: Path, columns: Sequence[tuple[str, Sequence[ScoredVideo]]], embed: bool) -> list[Shown]:
    """Put videos of one prompt and number side by side."""
    by_key = [(label, {(video.path.name, video.prompt): video for video in videos}) for label, videos in columns]
    keys = list(dict.fromkeys(key for _, videos in by_key for key in videos))[:_MAX_PROMPTS]
    strips = []
    for key in keys:
        videos = [place_video(v[key], path, embed=embed, label=label) for label, v in by_key if key in v]
        strips.append({"prompt": key[1], "videos": videos})
    return strips


def _settings(configs: Sequence[Config | None]) -> list[Shown]:
    """List every known setting as one would type it; notable is one that is no default, or differs between runs."""
    known = [config for config in configs if config]
    listed: list[Shown] = []
    for setting in SETTINGS.values() if known else ():
        values = [value_of(config, setting.name) for config in known]
        notable = values[0] != setting.default if len(known) == 1 else any(value != values[0] for value in values)
        about = {"group": setting.group, "name": setting.name, "about": setting.doc, "decides": setting.decides}
        written = [v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in (*values, setting.default)]
        listed.append(about | {"values": written[:-1], "default": written[-1], "notable": notable})
    return listed
