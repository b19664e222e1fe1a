"""Pictures of a run for a README: before and after side by side, and the reward over the updates."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image, ImageDraw, ImageFont

from hyvideo.data.files import replacing
from hyvideo.data.videos import write_video
from hyvideo.evaluation.paired import Gain
from hyvideo.observability.metrics import METRIC_MEANINGS, read_metrics
from scripts.reports.charts import smooth
from scripts.reports.run_record import column_of

BEFORE_AFTER = "before_after.mp4"
"""What the demo writes to its run folder."""
_SHOWN_SIZE = 192  # a video smaller than this is enlarged by a whole factor
_GAP, _HEADER_HEIGHT, _PAPER, _FPS = 12, 54, 228, 24


def side_by_side(before: torch.Tensor, after: torch.Tensor, captions: Sequence[str], path: Path) -> Path:
    """Write a grid of captioned video pairs to `path` (mp4), and frames spread over each video to a png beside it.

    `before` and `after` are uint8 [N, F, H, W, 3], of N prompts and seeds; captions are cut where they do not fit. The
    contact sheet, whose path is returned, has one pair per row.
    """
    factor = max(1, _SHOWN_SIZE // max(before.shape[2:4]))  # tiny frames grow without being smoothed
    both = [v.cpu().repeat_interleave(factor, dim=2).repeat_interleave(factor, dim=3) for v in (before, after)]
    pairs = _in_a_row(both, _GAP)
    columns = max(1, round(math.sqrt(len(pairs) * (pairs.shape[2] + _HEADER_HEIGHT) / pairs.shape[3])))
    write_video(Path(path), _grid(pairs, captions, columns), _FPS)
    moments = torch.linspace(0, before.shape[1] - 1, min(5, before.shape[1])).round().long().tolist()
    strips = [_in_a_row([videos[:, m : m + 1] for m in moments], 2) for videos in both]
    with replacing(Path(path).with_suffix(".png")) as temporary:
        Image.fromarray(_grid(_in_a_row(strips, _GAP), captions, columns=1)[0].numpy()).save(temporary)
    return Path(path).with_suffix(".png")


def _in_a_row(videos: Sequence[torch.Tensor], gap: int) -> torch.Tensor:
    """Join [N, F, H, W, 3] stacks along the width with a gap of paper between them."""
    paper = torch.full_like(videos[0][:, :, :, :gap], _PAPER)
    return torch.cat([part for stack in videos for part in (paper, stack)][1:], dim=3)


def _grid(videos: torch.Tensor, captions: Sequence[str], columns: int) -> torch.Tensor:
    """Lay [N, F, H, W, 3] out row by row under their captions: uint8 [F, H', W', 3] with even H' and W'."""
    height, width = videos.shape[2:4]
    cell_height, cell_width = _HEADER_HEIGHT + height + _GAP, width + _GAP
    size = (columns * cell_width + _GAP, math.ceil(len(videos) / columns) * cell_height + _GAP)
    canvas = Image.new("RGB", tuple(side + side % 2 for side in size), (_PAPER,) * 3)
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(size=14)
    corners = [(_GAP + n % columns * cell_width, _GAP + n // columns * cell_height) for n in range(len(videos))]
    for (left, top), caption in zip(corners, captions, strict=True):
        lines = textwrap.wrap(caption, max(1, width // 8), max_lines=2, placeholder=" …")
        draw.text((left, top), "\n".join(lines), fill=(20, 20, 20), font=font)
        for title, start in (("before", left), ("after", left + (width + _GAP) // 2)):
            draw.text((start, top + 36), title, fill=(110, 110, 110), font=font)
    frames = torch.from_numpy(np.array(canvas)).repeat(videos.shape[1], 1, 1, 1)
    for (left, top), video in zip(corners, videos, strict=True):
        frames[:, top + _HEADER_HEIGHT : top + _HEADER_HEIGHT + height, left : left + width] = video
    return frames


def plot_reward_curve(metrics: Path, png: Path, *, held_out: Mapping[str, Gain]) -> None:
    """Draw the reward over the base model's where that was logged twice, else `reward/mean`, and beside it VQ, MQ, TA.

    Faint lines are the values as logged, strong lines smoothed over a tenth of the run, as in the report. The band of
    `reward/mean` is one `reward/std`. `held_out` gains from before the first update to after the last are drawn over
    the curves of their names.

    Raises:
        ValueError: the file holds no reward.
    """
    rows = read_metrics(metrics)
    steps, mean, over = (column_of(rows, name) for name in ("step", "reward/mean", "reward/over_base"))
    if not np.isfinite(mean).any():
        raise ValueError(f"{metrics} holds no 'reward/mean' in its {len(rows)} rows: nothing to draw.")
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    panels = figure.subplot_mosaic([["reward", name] for name in METRIC_MEANINGS], width_ratios=(2.2, 1))
    drawn = {name: column_of(rows, f"reward/{name}") for name in METRIC_MEANINGS}
    compared = np.isfinite(over) & (np.diff(column_of(rows, "round"), prepend=-1) != 0)
    if compared.sum() > 1:
        label = "training videos, less the base model's of the same prompts and noise"
        panels["reward"].plot(steps[compared], over[compared], "o-", markersize=4, label=label)
        panels["reward"].set_title("Reward over the base model's")
        if gain := held_out.get("reward"):
            held_out = {**held_out, "reward": replace(gain, before=0.0, after=gain.mean)}
    else:
        centre, width = smooth(mean), smooth(column_of(rows, "reward/std"))
        panels["reward"].fill_between(steps, centre - width, centre + width, alpha=0.12, linewidth=0)
        panels["reward"].set_title("Reward during training")
        drawn["reward"] = mean
    for name, values in drawn.items():
        panels[name].plot(steps, values, color="C0", alpha=0.3, linewidth=0.8)
        label = "training videos (mean, band: one std)"
        panels[name].plot(steps, smooth(values), color="C0", linewidth=2, label=label)
    for name in panels.keys() & held_out:
        gain, last = held_out[name], steps[-1]
        label = f"{gain.num_pairs} held-out videos before and after (bar: 95 % interval of the gain)"
        panels[name].plot([0, last], [gain.before, gain.after], "D--", color="0.15", markersize=4, label=label)
        panels[name].plot([last] * 2, [gain.before + gain.low, gain.before + gain.high], color="0.15", linewidth=2.5)
    for name, axes in panels.items():
        axes.grid(axis="y", alpha=0.25)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if name in METRIC_MEANINGS:
            axes.set_title(f"{name}: {METRIC_MEANINGS[name]}", fontsize=10, loc="left")
    panels["reward"].set(ylabel="reward", xlabel="optimizer update")
    panels["reward"].margins(y=0.12)  # room for the legend
    panels["reward"].legend(frameon=False, fontsize=8, loc="upper left")
    with replacing(Path(png)) as temporary:
        figure.savefig(temporary, dpi=150)
