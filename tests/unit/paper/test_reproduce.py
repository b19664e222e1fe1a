"""The paper repeated: its rows, what is said of them, and the commands that train and measure them."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from hyvideo.evaluation.intervals import Interval
from scripts.paper.reproduce import PAPER, PaperRun, main
from scripts.paper.reproduced import agreement, difference, mean_of, publish, read_scores
from tests.support.reproduction import make_measured, planned
from tests.support.training import PROMPTS, write_prompts


@pytest.fixture
def measured(tmp_path: Path) -> Callable[..., PaperRun]:
    return partial(make_measured, tmp_path)


def test_the_papers_table_adds_up_and_every_row_and_claim_is_there():
    assert all(sum(row[1:4]) == pytest.approx(row[0], abs=2e-4) for row in PAPER["table2"].values())
    trained = {f"{row}-{setting.lower()}" for row, about in PAPER["rows"].items() for setting in about["under"]}
    assert len(trained) == 26 and {*PAPER["table2"]} <= trained | {"base"}
    named = {row for claim in PAPER["claims"] for row in (claim["first"], *claim["others"])} - {"base"}
    drawn = {row for panels in PAPER["figures"].values() for rows in panels.values() for row in rows}
    assert named | drawn | {*PAPER["table3"], PAPER["shown"]} <= trained


def test_means_and_differences_are_paired_by_prompt_and_over_seeds(measured):
    runs = [measured("base", 0.0, seed=0), measured("sage-dual-b", 1.0), measured("cps-none-b", 0.2, spread=0.1)]
    scores = read_scores(runs)
    assert mean_of(scores, "sage-dual-b", "Overall").num == 7  # the failed one is left out
    gain = difference(scores, "sage-dual-b", "base", "VQ")
    assert (gain.low, gain.mean, gain.high) == pytest.approx((1.0, 1.0, 1.0))  # the shared noise cancels out
    assert difference(scores, "sage-dual-b", "flow-none-b", "VQ") is None
    several = read_scores([*runs, measured("sage-dual-b", 1.4, seed=2), measured("cps-none-b", 0.2, seed=2)])
    assert mean_of(several, "sage-dual-b", "VQ").num == 2
    assert difference(several, "sage-dual-b", "cps-none-b", "VQ").num == 2


def test_a_gain_agrees_with_the_papers_only_where_it_could_have_disagreed():
    assert agreement(Interval(0.7, 0.5, 0.9, 8), 0.74) == "agrees"
    for differs in (Interval(0.3, 0.1, 0.5, 8), Interval(-0.3, -0.5, -0.1, 8)):
        assert agreement(differs, 0.74) == "differs"
    for unsure in (Interval(0.3, -0.2, 0.8, 8), Interval(0.7, math.nan, math.nan, 1), None):
        assert agreement(unsure, 0.74) == "cannot tell"  # the first could not have shown that nothing was gained


def test_what_was_found_stands_beside_the_papers_numbers(measured, tmp_path):
    write_prompts(tmp_path / "prompts.csv", [*PROMPTS, *(f"{prompt} again" for prompt in PROMPTS)])
    values = {"base": 0.0, "sage-dual-b": 0.7, "dance-fixed-b": 0.1, "sage-fixed-b": 0.9, "cps-none-b": 0.5}
    runs = [measured(row, value) for row, value in (values | {"cps-plain-b": 0.2}).items()]
    runs += [planned(tmp_path, "flow-none-b")]
    page = publish(PAPER, tmp_path, runs, scale="full")
    found = json.loads((tmp_path / "results.json").read_text())
    assert (found["finished"], found["runs"]) == (6, 7)
    rows = {row["row"]: row["cells"] for row in found["rows"]}
    assert rows["sage-dual-b"]["VQ"]["gain"]["mean"] == pytest.approx(0.7)
    assert rows["sage-dual-b"]["VQ"]["paper_gain"] == pytest.approx(-0.4765 + 0.7539)
    assert rows["sage-dual-b"]["VQ"]["verdict"] == "differs" and rows["flow-none-b"]["VQ"]["ours"] is None
    parts = [(claim["text"].partition(" (")[0], part) for claim in found["claims"] for part in claim["parts"]]
    said = {(text, part["metric"]): part["verdict"] for text, part in parts}
    assert said["SAGE-GRPO improves on the base model", "VQ"] == "holds"
    beats = "SAGE-GRPO with dual moving KL beats SAGE-GRPO without KL and with a fixed one"
    assert said[beats, "Overall"] == "does not hold" and said["the equalizer helps CPS", "Overall"] == "holds"
    assert said["SAGE-GRPO beats every baseline, with either KL", "VQ"] == "cannot tell"  # some are not there
    assert said["SAGE-GRPO beats every baseline, with either KL", "PickScore"] == "not measured"
    table, html = (tmp_path / "table2.md").read_text(), page.read_text()
    assert "| SAGE-GRPO | dual moving KL |" in table and "(-0.476)" in table and "Setting A" not in table
    pairs = json.loads((tmp_path / "studies" / "sage_vs_dance.key.json").read_text())["pairs"]
    assert len(pairs) == 8 and (tmp_path / "studies" / "sage_vs_dance" / "index.html").is_file()
    assert "no votes (85.9%)" in (tmp_path / "table3.md").read_text()
    assert "6 of 7 runs" in html and "Not measured: CLIPScore, PickScore" in html
    assert html.count("data:image/svg+xml") == 3


def test_every_row_is_checked_and_its_commands_are_printed(tmp_path, capsys):
    asked = f"--scale full --dry_run --output_dir {tmp_path} --seeds 1 2".split()
    assert main([*asked, "--launch", "echo go"]) == 0
    told = capsys.readouterr().out
    trainings = [line for line in told.splitlines() if line.startswith("echo go --config")]
    assert len(trainings) == 52 and "26 rows were loaded and checked for 64 GPU(s)" in told
    assert sum("configs/reward/a.yaml" in line for line in trainings) == 18
    assert sum("--use_grad_balancing False" in line for line in trainings) == 8
    assert "left out: clip_score=ckpts/clip" in told and not (tmp_path / "base").exists()
    assert not (tmp_path / "asked.json").exists()  # other flags may follow


def test_a_row_that_cannot_be_trained_is_named_before_the_first_one_begins(tmp_path, capsys):
    for flags, told in (
        ("--rows cps-none --setting B --batch_size 3", "cps-none-b: "),
        ("--rows cps-none --setting B --sampling shift", "expected FLAG=VALUE"),
        ("--rows sage-other", "there is no row 'sage-other'"),
        ("--rows sage-step --setting A", "of setting B alone"),
    ):
        assert main(f"--scale tiny --output_dir {tmp_path} {flags}".split()) == 2
        assert told in capsys.readouterr().err


SMALL = "--max_steps 2 --save_interval 2 --sample_n_frames 5 --rollout_size 32x32 --batch_size 2 "
SMALL += "--grpo_sampling_steps 3 --num_generations 2 --mini_batch_size_per_update 2"


def test_a_row_is_trained_measured_and_never_made_twice(tmp_path, capsys):
    write_prompts(tmp_path / "held_out.csv", PROMPTS[:2])
    out = tmp_path / "out"
    command = f"--scale tiny --output_dir {out} --rows sage-dual --setting B {SMALL}".split()
    command += f"--prompts_csv {tmp_path / 'held_out.csv'} --sampling num_inference_steps=1 video_length=5".split()
    assert main(command) == 0, [path.read_text()[-2000:] for path in out.glob("*.log")]
    told = capsys.readouterr().out
    assert told.count("finished: ") == 2 and "index.html" in told
    cells = {row["row"]: row["cells"] for row in json.loads((out / "results.json").read_text())["rows"]}
    assert cells["sage-dual-b"]["Overall"]["gain"]["num"] == 2 and cells["base"]["VQ"]["ours"]["num"] == 2
    assert (out / "sage-dual-b-seed42" / "metrics.jsonl").is_file()
    assert not (out / "sage-dual-b-seed42" / "checkpoints").exists()
    videos = out / "evaluation"
    made = {path: path.stat().st_mtime_ns for path in videos.rglob("*.mp4")}
    assert len(made) == 4 and main(command) == 0
    assert "finished: " not in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in videos.rglob("*.mp4")} == made
    (out / "evaluation" / "sage-dual-b-seed42" / "evaluation.json").unlink()
    assert main([*command, "--minutes", "0"]) == 0
    assert "1 of 2 runs are not finished: start the same command again" in capsys.readouterr().out
    assert main([*command, "--learning_rate", "1e-3"]) == 2
    assert "holds runs with other flags, which would stand in one table" in capsys.readouterr().err
