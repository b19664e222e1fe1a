"""The frontier shows the runs that are finished, each with what it gained and lost."""

import json

import pytest
from pydantic_core import to_json

from hyvideo.data.prompts import Prompt
from hyvideo.evaluation.drift import LOOKS
from hyvideo.evaluation.paired import paired_gain
from scripts.reports.improvement import HeldOutGains, write_held_out
from scripts.tiny.comparison import kept
from scripts.tiny.frontier import _write, points
from scripts.tiny.prove_learning import KEPT


def test_finished_runs_are_drawn_and_written_with_gain_and_losses(tmp_path):
    prompts = [Prompt(f"prompt {number // 2}", number, None, None) for number in range(8)]
    before = [dict.fromkeys(LOOKS, number / 10) | {"hits": 0.0} for number in range(8)]
    after = [looks | {"border": 0.4, "hits": 1.0} for looks in before]
    finished = list(points())[2]
    (tmp_path / finished).mkdir()
    (tmp_path / finished / KEPT).write_bytes(to_json(kept(before, after, prompts)))
    gain = paired_gain([looks["border"] for looks in before], [1 + looks["border"] for looks in before])
    write_held_out(tmp_path / finished, HeldOutGains(80, {"reward": gain}))
    _write(tmp_path)
    (row,) = json.loads((tmp_path / "frontier.json").read_text())
    assert (row["kl_weight"], row["seed"], row["hits"]) == (0.02, 1, 1.0)
    assert row["gain"] == pytest.approx(gain.in_base_std) and row["drift/border_spread"] == pytest.approx(-1, abs=0.01)
    assert row["moved"] == 0.8  # of 0, 0.1, 0.2, 0.3 and 0.7, which are dark or light, 0.3 is near 0.4
    assert row["drift/saturation_siblings"] == 0
    assert (tmp_path / "frontier.png").stat().st_size > 10_000
