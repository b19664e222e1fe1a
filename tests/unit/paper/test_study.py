"""A study writes picture, raw numbers and its part of the document; those that are mathematics find theirs again."""

import json
import math

import pytest
from matplotlib.figure import Figure

from scripts.paper import gradient_norms, noise_std
from scripts.paper.study import DOCS, HOLDS, OPEN, Claim, Study, claims_table
from scripts.reports.markdown import replace_part

STUDY = Study(
    "colours",
    "Colours",
    draw=lambda found: Figure(),
    describe=lambda found: f"Seen: {found['seen']}.",
    claims=lambda found: [Claim("red is seen", HOLDS if found["seen"] else OPEN, f"{found['seen']} times")],
)


def test_publishing_writes_everything_and_again_replaces_it(tmp_path):
    (tmp_path / "claims.md").write_text("By hand.\n\n<!-- table -->\n<!-- /table -->\n\nBetween.\n")
    for seen in (1, 2):
        STUDY.publish({"seen": seen}, tmp_path)
    text = (tmp_path / "claims.md").read_text()
    assert text.startswith("By hand.") and "Between." in text
    assert "Seen: 2." in text and "Seen: 1." not in text
    assert text.count("| [red is seen](#colours) | **holds** | 2 times |") == 1
    assert sorted(path.name for path in (tmp_path / "claims").iterdir()) == ["colours.json", "colours.png"]


def test_what_was_published_can_be_described_again_from_its_json(tmp_path):
    STUDY.publish({"seen": 3, "odd": [math.nan, 1 / 3]}, tmp_path)
    found = json.loads((tmp_path / "claims/colours.json").read_text())
    section = STUDY.section(found)
    assert section in (tmp_path / "claims.md").read_text() and section.startswith('<a id="colours"></a>')
    assert "`python -m scripts.paper.colours`" in section and "(claims/colours.json)" in section
    assert found["odd"] == [None, 0.333333]


def test_the_table_has_the_claims_of_every_study_and_backslashes_in_a_part_stay_as_they_are(tmp_path):
    for name in ("b", "a"):
        claims = [{"text": f"claim of {name}", "verdict": OPEN, "evidence": "none"}]
        (tmp_path / f"{name}.json").write_text(json.dumps({"claims": claims}))
    rows = [line.split(" | ")[0] for line in claims_table(tmp_path).splitlines()[2:]]
    assert rows == ["| [claim of a](#a)", "| [claim of b](#b)"]
    before = "<!-- a -->\nold\n<!-- /a -->"
    assert replace_part(before, "a", r"\1 \n") == "<!-- a -->\n\\1 \\n\n<!-- /a -->"


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
