"""Studies that are mathematics find again what is committed, and their figures' ingredients have their closed forms."""

import json
import math

import pytest

from scripts.paper import gradient_norms, noise_std
from scripts.paper.study import DOCS


def same(found: object, committed: object) -> bool:
    """Whether two results agree to the digits that are committed."""
    if isinstance(found, dict):
        return found.keys() == committed.keys() and all(same(found[name], committed[name]) for name in found)
    if isinstance(found, list | tuple):
        return len(found) == len(committed) and all(map(same, found, committed))
    return found == pytest.approx(committed, rel=1e-5, abs=1e-12) if isinstance(found, float) else found == committed


def test_the_committed_numbers_are_what_the_code_finds_today():
    committed, found = json.loads((DOCS / "claims" / "noise_std.json").read_text()), noise_std.find()
    assert found.pop("largest_error_of_closed_form") < 1e-10
    assert same(found, {name: committed[name] for name in found})


def test_the_clamped_first_step_of_flow_grpo_is_its_rule_at_the_clamp():
    regimes = noise_std.find()["regimes"]
    start, end = 1 - noise_std.CLAMP, regimes["one schedule"]["flow_grpo"]["sigma"][1]
    expected = noise_std.ETA * math.sqrt((start - end) * start / (1 - start))
    assert regimes["both clamped"]["flow_grpo"]["std"][0] == pytest.approx(expected)
    assert regimes["both clamped"]["flow_grpo"]["std"][1:] == regimes["one schedule"]["flow_grpo"]["std"][1:]


def test_spreads_leave_out_deterministic_steps_and_follow_the_scales():
    values = {"theory": [1.0, 4.0, 0.0], "scale": [2.0, 0.5, 1.0]}
    values |= {"by_velocity": [1.0, 4.4, 9.0], "by_weights": [3.0, 24.0, 9.0]}
    spreads = gradient_norms.spreads([1.0, 0.5, 0.1], values)
    assert spreads["velocity"] == pytest.approx(4.4) and spreads["velocity_equalized"] == pytest.approx(1.1)
    assert spreads["weights"] == pytest.approx(8) and spreads["weights_equalized"] == pytest.approx(2)
    assert spreads["error"] == pytest.approx(0.1)


def test_the_gradients_of_one_video_follow_the_theory(monkeypatch):
    monkeypatch.chdir(DOCS.parent)
    monkeypatch.setattr(gradient_norms, "STEPS", 3)
    found = gradient_norms.find(num_videos=1)
    for values in found["samplers"].values():
        spreads = gradient_norms.spreads(found["sigma"], values)
        assert spreads["error"] < 1e-4 and spreads["velocity_equalized"] == pytest.approx(1, abs=1e-3)
        assert spreads["weights"] > 1
