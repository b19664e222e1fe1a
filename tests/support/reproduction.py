"""Runs of `scripts.paper.reproduce` that were trained and measured, by files as its commands leave them."""

import json
from pathlib import Path

import numpy as np
import torch

from hyvideo.data.videos import write_video
from scripts.paper.reproduce import PaperRun


def planned(out: Path, row: str, seed: int = 1) -> PaperRun:
    return PaperRun(row, seed, out / f"{row}-seed{seed}", [], [], [], "", max_steps=3, metrics=[], keeps=True)


def make_measured(out: Path, row: str, vq: float, *, seed: int = 1, spread: float = 0.0) -> PaperRun:
    """Write a run's curve, 8 videos and their scores: VQ as given with noise that all runs share, MQ and TA 0.

    The last video has no TA. With `spread` the run has noise of its own besides.
    """
    made = planned(out, row, seed)
    noise = np.random.default_rng(0).normal(size=8) + np.random.default_rng(seed).normal(size=8) * spread
    videos, made_of = made.measured / made.name, {"MQ": 0.0, "TA": 0.0}
    write_video(videos / "0000.mp4", torch.full((2, 16, 16, 3), 99, dtype=torch.uint8), 8)
    for n in range(1, 8):
        (videos / f"{n:04d}.mp4").write_bytes((videos / "0000.mp4").read_bytes())
    scores = [{"VQ": vq + noise[n], **made_of} | ({"TA": None} if n == 7 else {}) for n in range(8)]
    rows = [{"video": f"{n:04d}.mp4", "key": "k", "scores": one} for n, one in enumerate(scores)]
    (videos / "evaluation_scores.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (made.measured / "evaluation.json").write_text(json.dumps({"means": {made.name: {}}}))
    made.folder.mkdir()
    curve = [{"step": step, "reward/mean": vq * step} for step in (1, 2, 3)]
    (made.folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in curve))
    return made
