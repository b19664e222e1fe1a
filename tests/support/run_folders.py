"""Run folders made by hand: logged curves, scored videos and settings, without training."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from hyvideo.config.loading import load_config, save_config
from hyvideo.data.videos import poster_of, write_video
from hyvideo.observability.phase_timer import PHASES
from scripts.reports.gallery import Model, read_models
from tests.support.rewards import moving_square
from tests.support.training import REPOSITORY

HOSTILE_PROMPTS = (
    "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">",
    "quotes \" ' ` and &amp; </video></p><b>bold</b> {{ 7 * 7 }} {% raw %} ${x}",
    "two\nlines\u2028and a\ttab\x0bwith a separator",
    "دائرة حمراء تتحرك إلى اليسار \u202e and back",
    "a very long prompt " * 264,
)
"""HTML, quotes, line ends, right to left, 5,000 characters."""

PROMPTS = tuple(f"a {colour} circle moves to the {side}" for colour in ("red", "green") for side in "abcd")


def contents(folder: Path) -> dict[Path, bytes | None]:
    """Every file below a folder with its content, and every folder there with None."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def square_of(number: int) -> torch.Tensor:
    return moving_square(height=32, width=32, colour=(30 * number, 240 - 30 * number, 40))


@cache
def video_file(number: int) -> bytes:
    """The mp4 of `square_of` a number, made once."""
    with TemporaryDirectory() as folder:
        write_video(Path(folder) / "square.mp4", square_of(number), fps=24)
        return (Path(folder) / "square.mp4").read_bytes()


def write_scored(folder: Path, prompts: Sequence[str], rewards: Sequence[float | None]) -> Path:
    """Write videos with their `scores.jsonl`, as training does."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, (prompt, reward) in enumerate(zip(prompts, rewards, strict=True)):
        name = f"{number:03d}.mp4"
        (folder / name).write_bytes(video_file(number % 8))
        (folder / name).with_suffix(".jpg").write_bytes(poster_of(square_of(number % 8)[0]))
        scores = {"reward": reward, "VQ": reward, "MQ": reward, "TA": reward}
        lines.append(json.dumps({"video": name, "prompt": prompt, **scores}, ensure_ascii=False))
    (folder / "scores.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return folder


def change_rows(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Put what `change` makes of a row in its place, in every row of a file."""
    rows = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def model_of(folder: Path, name: str | None = None) -> Model:
    (model,) = read_models([(name, folder)])
    return model


def row_of(step: int, reward: float) -> dict[str, float]:
    row = {f"reward/{name}": reward / 2 for name in ("VQ", "MQ", "TA")} | {"reward/mean": reward, "reward/std": 0.8}
    row |= {"kl/position": 1e-4 * step, "kl/velocity": 1e-5 * step, "kl/coef": 1e-5, "clip_fraction": 0.1}
    none = "reward/failed reward/groups_without_spread ratio/max_deviation replay/mean_error"
    row |= dict.fromkeys(none.split(), 0.0)
    row |= {"grad_norm": 0.02, "loss/policy": 0.1, "loss/total": 0.1, "lr": 3e-5, "round": float(step - 1)}
    row |= {f"velocity_grad/step_{index:02d}": 1.0 + 0.1 * index for index in range(6)}
    return row | {f"time/{phase}": seconds for phase, seconds in zip(PHASES, (4.0, 0.2, 1.0, 5.0), strict=True)}


def write_run(
    folder: Path,
    *,
    num_updates: int = 30,
    slope: float = 0.02,
    samples: Mapping[int, float] | None = None,
    prompts: Sequence[str] = PROMPTS,
    settings: Sequence[str] = (),
) -> Path:
    """Write a run folder as training leaves it; its logged reward has a `slope` per update.

    `samples` are the mean rewards of validations by update, `prompts` those of them and of the one kept round.
    """
    flags = ["--config", str(REPOSITORY / "configs" / "tiny.yaml"), "--run_name", folder.name]
    folder.mkdir(parents=True)
    save_config(load_config([*flags, "--max_steps", str(num_updates), *settings]), folder / "config.yaml")
    noise = np.random.default_rng(0).normal(0, 0.1, num_updates)
    rows = [{"step": n, **row_of(n, slope * n + one)} for n, one in enumerate(noise.tolist(), start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step, mean in (samples or {}).items():
        spread = np.random.default_rng(1).normal(0, 0.5, len(prompts))  # the prompts' own, the same every time
        write_scored(folder / "samples" / f"step_{step}", prompts, [mean + float(one) for one in spread])
    if samples:
        write_scored(folder / "rollouts" / "step_0", prompts, [0.1 * number for number in range(len(prompts))])
    return folder
