"""First light runs at small sizes, stage by stage, though one fails; what benchmarks leave, and call slower."""

import json
from functools import partial
from pathlib import Path

import pytest

from benchmarks.__main__ import verdict, write_table
from benchmarks.first_light import __main__ as first_light
from benchmarks.first_light.stages import LARGE, PLANS, STAGES, Place, Stage, large_run, planned_gib, run_stage
from benchmarks.paired import Result, Spread, compare
from hyvideo.training.checks import check_config

pytestmark = pytest.mark.usefixtures("at_the_root")


def findings_of(stage: str, folder: Path) -> dict[str, dict]:
    run_stage(stage, Place(folder, small=True), folder / "findings.jsonl")
    return {line["name"]: line["facts"] for line in map(json.loads, (folder / "findings.jsonl").open())}


@pytest.mark.parametrize("stage", ["versions", "attention", "decoder", "frozen", "matrices", "copies", "stock"])
def test_a_stage_without_training_finds_finite_values(stage: str, tmp_path: Path):
    findings = findings_of(stage, tmp_path)
    assert findings
    assert all(value for facts in findings.values() for value in facts.values() if isinstance(value, bool))


def test_an_adapter_is_trained_over_a_random_model_saved_and_loaded(tmp_path: Path):
    findings = findings_of("adapter", tmp_path)
    assert findings["adapter/built"]["planned_peak_gib"] > 0
    assert [findings[f"adapter/round {number}"]["ratio/max_deviation"] for number in (0, 1)] == [0, 0]
    assert findings["adapter/saved and loaded"]["step"] == 2


def test_one_pass_is_compared_with_two(tmp_path: Path):
    findings = findings_of("one_pass", tmp_path)
    assert findings["one_pass/grpo/round 0"]["grad_norm"] > 0
    assert findings["one_pass/gradient"]["relative_difference"] < 1e-4


@pytest.mark.parametrize("name", LARGE)
def test_a_run_accepts_the_full_size(name: str, tmp_path: Path):
    config = large_run(Place(tmp_path, small=False), name)
    check_config(config, 8 if config.parallel.enable_fsdp else 1, files=False)


@pytest.mark.slow
def test_a_stage_reads_the_peaks_that_were_planned_without_a_gpu(tmp_path: Path):
    place, plans = Place(tmp_path, small=True), tmp_path / PLANS
    plans.write_text('{"rank_full": 12.5}')
    assert planned_gib(place, "rank_full") == 12.5
    assert first_light.main(["--plan", "--small", "--folder", str(tmp_path)]) == 0  # always anew
    planned = json.loads(plans.read_text())
    assert list(planned) == list(LARGE) and planned_gib(place, "rank_full") == planned["rank_full"] < 1


def test_a_stage_that_nobody_knows_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        first_light.main(["rank_ful", "--small"])
    assert "no part or stage is called rank_ful" in capsys.readouterr().err


def test_a_stage_that_fails_or_hangs_is_told_and_the_others_run(tmp_path, monkeypatch, capsys):
    """Stages are found by name in their own process, so one that hangs is one whose time is over at once."""
    chosen = {"versions": STAGES["versions"], "attention": Stage(1, 0, STAGES["attention"].run)}
    monkeypatch.setattr(first_light, "STAGES", chosen)
    assert first_light.main(["1", "--small", "--folder", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "versions: done" in told and "attention: stopped after 0 s" in told
    assert "| versions | torch 2." in told
    record = json.loads((tmp_path / "results.json").read_text())
    ended = {name: stage["ended"] for name, stage in record["stages"].items()}
    assert ended == {"versions": "done", "attention": "stopped after 0 s"}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["1", "2", "3", "4", "5", "6", "7"])
def test_every_part_runs_whole_at_small_sizes(part: str, tmp_path: Path):
    assert first_light.main([part, "--small", "--folder", str(tmp_path)]) == 0


def result(median: float, low: float, high: float, name: str = "a/b") -> Result:
    return Result(name, "old / new", Spread(median, low, high, 7), {"seconds": 0.123456})


def test_a_verdict_needs_a_difference_and_ranges_that_part():
    before = {"a/b": result(2.0, 1.9, 2.1).as_json()}
    for overlapping_or_within_a_tenth in ((2.0, 1.9, 2.1), (1.7, 1.6, 1.95), (1.85, 1.84, 1.86)):
        assert verdict(result(*overlapping_or_within_a_tenth), before) == "as before"
    found = (result(1.7, 1.6, 1.75), result(2.4, 2.3, 2.5), result(2.0, 1.9, 2.1, name="c"))
    assert [verdict(one, before) for one in found] == ["slower", "faster", "new"]


def test_the_table_of_a_machine_replaces_its_own_and_leaves_the_rest(tmp_path: Path):
    document = tmp_path / "performance.md"
    document.write_text("# Speed\n\nText.\n")
    for median in (2.0, 3.0):
        write_table("cpu", {"a/b": result(median, 1.0, 4.0).as_json()}, document)
    write_table("gpu", {"c": result(1.0, 0.5, 1.5, name="c").as_json()}, document)
    text = document.read_text()
    assert text.startswith("# Speed\n\nText.\n") and text.index("### cpu") < text.index("### gpu")
    assert text.count("| a/b |") == 1 and "| a/b | old / new | **3.00** (1.00 - 4.00) |" in text


def test_both_ways_are_run_in_turns_and_settled_after_each():
    order = []
    b, c, settle = (partial(order.append, letter) for letter in "bc.")
    compared = compare("a", "b / c", b, c, pairs=3, settle=settle)
    assert "".join(order) == "b.c." + "c.b." + "b.c." + "c.b." and compared.ratio.pairs == 3
    assert compared.ratio.low <= compared.ratio.median <= compared.ratio.high
