"""Which curves a report draws, of one run or of several overlaid."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hyvideo.algorithms.policy import rollout_scheduler
from hyvideo.config.schema import Config
from hyvideo.grpo.gradient_equalizer import equalizer_scales
from hyvideo.observability.metrics import METRIC_MEANINGS
from hyvideo.observability.phase_timer import PHASES
from scripts.reports.charts import ROUND, Chart, Drawing, Line, draw, evenly_spaced, signed, smooth
from scripts.reports.improvement import gains_over_training
from scripts.reports.run_record import RunRecord

Points = tuple[np.ndarray, np.ndarray]

_MIXING = {
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
"""How the metrics share in what a run learns (`mixing/*`): one that decides nothing, or everything, is seen here."""


@dataclass(frozen=True)
class Sampler:
    """The rollout's steps.

    Attributes:
        std: [K] noise added at each step.
        scales: [K] what the equalizer multiplies each step's loss by (paper Eq. 9); ones when it is off.
        left: noise in the finished latents if the velocity were exact and all steps drew noise.
    """

    std: np.ndarray
    scales: np.ndarray
    left: float


def sampler_of(config: Config) -> Sampler:
    """Compute the sampler's tables from the settings of a run."""
    rollout = config.rollout
    scheduler = rollout_scheduler(rollout)
    flavour = {"sde_type": rollout.sde_type, "eta": rollout.eta}
    norms = scheduler.gradient_norms(**flavour, published="cps_equalizer" in rollout.published)
    scales = equalizer_scales(norms).numpy() if config.grpo.use_grad_balancing else np.ones(len(norms))
    return Sampler(scheduler.step_weights(**flavour).std.numpy(), scales, float(scheduler.noise_left(**flavour)[-1]))


def gain_panel(runs: Sequence[RunRecord]) -> Drawing | None:
    """Draw by how much each validation's reward exceeds the first one's, with intervals for a run alone."""
    lines = []
    for number, run in enumerate(runs):
        gains = gains_over_training(run)
        found = [gain.relative for gain in gains.values()]
        edges = [np.array([getattr(gain, edge) for gain in found]) for edge in ("mean", "low", "high")]
        if gains:
            x = np.array(list(gains), dtype=float)
            band = tuple(edges[1:]) if len(runs) == 1 else None
            lines.append(Line(_label(runs, run), x, edges[0], number, band=band, dots=True))
    if not lines:
        return None
    videos = _validation_videos(runs)
    about = "Validation videos against those of the same prompts and noise at the first validation, in base std."
    if len(runs) == 1:
        first = "before training" if not x[0] else "at the first point"
        about = f"{videos.capitalize()} against those of the same prompts and noise {first}, with 95 % interval."
    return draw(Chart("Validated gain", about, lines, words=signed, of=videos))


def reward_panels(runs: Sequence[RunRecord]) -> list[Drawing]:
    """Draw the training reward, its validation, and each of its metrics."""
    alone = len(runs) == 1
    band = " The band is one standard deviation of the round's videos." if alone else ""
    about = (
        "Mean over each round's videos, sampled with noise. Each round has other prompts, so it moves more than the "
        f"validated gain. Faint: as logged; strong: smoothed.{band}"
    )
    mean = _smooth(runs, lambda run: run.per_round("reward/mean"), spread="reward/std" if alone else None)
    charts = [Chart("Training reward", about, mean, of=ROUND)]
    about = (
        "How much more the round's videos score than the base model's of the same prompts and noise (base_interval)."
    )
    over = _lines(runs, lambda run: _finite(*run.per_round("reward/over_base")), dots=True)
    charts.append(Chart("Training reward over the base", about, over, words=signed, of=ROUND))
    about = "The same prompts and seeds each time, sampled without noise."
    videos, validated = _validation_videos(runs), _lines(runs, lambda run: run.validation("reward"), dots=True)
    charts.append(Chart("Validation reward", about, validated, of=videos))
    about = "Mean score of the same videos by the judge of reward_guard, which the policy is not trained on."
    judged = _lines(runs, lambda run: run.validation("judge"), dots=True)
    charts.append(Chart("Validation by the judge", about, judged, of=videos))
    for name in dict.fromkeys(name for run in runs for name in run.metric_names):
        meaning = METRIC_MEANINGS.get(name)
        title = f"{name}: {meaning}" if meaning else name
        lines = _smooth(runs, lambda run, name=name: run.per_round(f"reward/{name}"))
        charts.append(Chart(title, "Mean over each round's videos.", lines, of=ROUND))
    charts.append(
        Chart(
            "Spread of the reward",
            "Standard deviation over a round's videos. Near 0 there is nothing left to compare.",
            _smooth(runs, lambda run: run.per_round("reward/std")),
            of=ROUND,
        )
    )
    for of, (title, about) in _MIXING.items() if alone else ():
        lines = []
        for number, name in enumerate(runs[0].metric_names):
            points = runs[0].per_round(f"mixing/{of}_{name}")
            lines += [replace(line, label=name, colour=number) for line in _smooth(runs, lambda run, xy=points: xy)]
        charts.append(Chart(title, about, lines, of=ROUND))
    return _drawn(charts)


@dataclass(frozen=True)
class _Logged:
    """A metric of `metrics.jsonl` and how it is drawn."""

    name: str
    title: str
    about: str
    logarithmic: bool = False
    smoothed: bool = True

    def chart(self, runs: Sequence[RunRecord]) -> Chart:
        """Draw it over the updates of all runs."""
        lines = (_smooth if self.smoothed else _lines)(runs, lambda run: (run.column("step"), run.column(self.name)))
        return Chart(self.title, self.about, lines, self.logarithmic)


TRUST = (
    _Logged("kl/position", "KL to the anchor", "How far the steps' means have moved from the anchor's.", True),
    _Logged("kl/velocity", "KL within a round", "Old minus new log-probability. 0 at a round's first update."),
    _Logged("nft/old_distance", "Distance to the old policy", "Mean squared difference of velocities.", True),
    _Logged("nft/base_distance", "Distance to the base", "Mean squared difference of velocities.", True),
    _Logged("kl/coef", "KL coefficient", "Weight of the KL term in the loss.", smoothed=False),
    _Logged("clip_fraction", "Clipped share", "Pairs of video and step whose gradient the clip removed."),
    _Logged("ratio/max_deviation", "Ratio before the first update", "Largest |ratio - 1| of the replay. Should be 0."),
    _Logged("replay/mean_error", "Replay error", "Largest deviation of a replayed mean, in units of the noise."),
)
OPTIMIZER = (
    _Logged("grad_norm", "Gradient norm", "Over all trained weights, before clipping.", True),
    _Logged("loss/policy", "Policy loss", "Its level says little, its jumps much."),
    _Logged("lr", "Learning rate", "As used by each update.", smoothed=False),
)


def logged_panels(runs: Sequence[RunRecord], metrics: Sequence[_Logged]) -> list[Drawing]:
    """Draw metrics over the updates: `TRUST`, what keeps the policy near its anchor, or `OPTIMIZER`."""
    return _drawn([metric.chart(runs) for metric in metrics])


def sampler_panels(runs: Sequence[RunRecord]) -> list[Drawing]:
    """Draw, per denoising step, the noise and the measured gradient of the velocity before and after the equalizer."""
    known = {number: sampler_of(run.config) for number, run in enumerate(runs) if run.config}
    pulls = {number: step_gradients(runs[number], len(sampler.scales)) for number, sampler in known.items()}
    unscaled = {number: pull / known[number].scales for number, pull in pulls.items()}
    noise = {number: sampler.std for number, sampler in known.items()}
    about = "How hard each step pulls on the predicted velocity: mean gradient norm over the last tenth of the run"
    about_noise = "Standard deviation of the noise the sampler adds."
    if len(runs) == 1 and known:
        about_noise += f" If the model were exact, the finished latents would hold {known[0].left:.2f}."
    charts = [("Noise of each step", about_noise, _by_step(runs, noise))]
    if len(runs) > 1:
        charts.append(("Pull of each step, not equalized", f"{about}.", _by_step(runs, unscaled)))
        charts.append(("Pull of each step, as trained", f"{about}.", _by_step(runs, pulls)))
    elif known:
        both = [_step_line("not equalized", unscaled[0], 1), _step_line("as trained", pulls[0], 0)]
        charts.append(("Pull of each step", f"{about}, before and after the equalizer.", both))
    return _drawn([Chart(*chart, logarithmic=True, x_label="denoising step") for chart in charts])


def _by_step(runs: Sequence[RunRecord], values: Mapping[int, np.ndarray]) -> list[Line]:
    return [_step_line(_label(runs, runs[number]), y, number) for number, y in values.items()]


def _step_line(label: str, values: np.ndarray, colour: int) -> Line:
    """Make a line over the denoising steps, counted from 1; deterministic steps are gaps."""
    return Line(label, np.arange(len(values)) + 1.0, np.where(values > 0, values, np.nan), colour, dots=True)


def step_gradients(run: RunRecord, num_steps: int) -> np.ndarray:
    """Mean of the last tenth of the logged `velocity_grad/step_NN`, [K]; NaN where none was logged."""
    steps = [run.column(f"velocity_grad/step_{index:02d}") for index in range(num_steps)]
    last = [values[np.isfinite(values)][-max(10, len(values) // 10) :] for values in steps]
    return np.array([values.mean() if len(values) else np.nan for values in last])


def time_panels(runs: Sequence[RunRecord]) -> list[Drawing]:
    """Draw how long an update takes."""
    about = "All phases together; an update that begins a round pays for its rollout."
    return _drawn([Chart("Seconds per update", about, _smooth(runs, lambda run: (run.column("step"), seconds(run))))])


def seconds(run: RunRecord) -> np.ndarray:
    """Seconds of every logged update, [N]."""
    return np.sum([run.column(f"time/{phase}") for phase in PHASES], axis=0)


def clocks(runs: Sequence[RunRecord]) -> str:
    """Return JSON of the hours that were spent until each update, by the label of a run's curves."""
    found = {}
    for run in runs:
        chosen = evenly_spaced(len(run.column("step")), 240)
        hours = np.cumsum(np.nan_to_num(seconds(run))) / 3600
        steps = [0.0, *run.column("step")[chosen].tolist()]
        found[_label(runs, run)] = [steps, [0.0, *hours[chosen].round(5).tolist()]]
    return json.dumps(found, separators=(",", ":"))


def time_split(run: RunRecord) -> dict[str, float]:
    """Mean seconds per update by phase, over the whole run; empty when no time was logged."""
    means = {phase: run.column(f"time/{phase}") for phase in PHASES}
    return {phase: float(np.nanmean(values)) for phase, values in means.items() if np.isfinite(values).any()}


def _smooth(runs: Sequence[RunRecord], points: Callable[[RunRecord], Points], spread: str | None = None) -> list[Line]:
    """Make a smoothed line with its raw values per run."""
    lines = []
    for number, run in enumerate(runs):
        x, y = points(run)
        if np.isfinite(y).any():
            centre, width = smooth(y), smooth(run.per_round(spread)[1]) if spread else None
            band = None if width is None else (centre - width, centre + width)
            lines.append(Line(_label(runs, run), x, centre, number, raw=y, band=band, gaps=run.gaps))
    return lines


def _lines(runs: Sequence[RunRecord], points: Callable[[RunRecord], Points], *, dots: bool = False) -> list[Line]:
    """Make a line of the values as they are per run."""
    found = [(number, run, *points(run)) for number, run in enumerate(runs)]
    return [
        Line(_label(runs, run), x, y, number, dots=dots, gaps=() if dots else run.gaps)
        for number, run, x, y in found
        if np.isfinite(y).any()
    ]


def _finite(x: np.ndarray, y: np.ndarray) -> Points:
    there = np.isfinite(y)
    return x[there], y[there]


def _validation_videos(runs: Sequence[RunRecord]) -> str:
    """Say how many videos a validation has, where it is the same number everywhere."""
    numbers = {len(videos) for run in runs for videos in run.samples.values()}
    return f"{numbers.pop()} validation videos" if len(numbers) == 1 else "validation videos"


def _label(runs: Sequence[RunRecord], run: RunRecord) -> str:
    return run.name if len(runs) > 1 else ""


def _drawn(charts: Sequence[Chart]) -> list[Drawing]:
    return [drawing for chart in charts if chart.lines and (drawing := draw(chart))]
