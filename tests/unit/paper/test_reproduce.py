"""The paper repeated: its rows, what is said of them, and the commands that train and measure them."""

import json
import math
from functools import partial
from pathlib import Path

import pytest

from hyvideo.evaluation.intervals import Interval
from scripts.paper.reproduce import PAPER, main
from scripts.paper.reproduced import agreement, difference, mean_of, publish, read_scores
from scripts.paper.runs import REPOSITORY
from tests.support.reproduction import make_measured, planned
from tests.support.training import PROMPTS, write_prompts

SMALL = "--max_steps 2 --save_interval 2 --sample_n_frames 5 --rollout_size 32x32 --batch_size 2 ".split()
SMALL += "--grpo_sampling_steps 3 --num_generations 2 --mini_batch_size_per_update 2".split()


@pytest.fixture
def measured(tmp_path: Path):
    """Write a run that was measured, with this VQ."""
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
    for gain, said in (
        (Interval(0.7, 0.5, 0.9, 8), "agrees"),
        (Interval(0.3, 0.1, 0.5, 8), "differs"),
        (Interval(0.3, -0.2, 0.8, 8), "cannot tell"),  # it could not have shown that nothing was gained
        (Interval(-0.3, -0.5, -0.1, 8), "differs"),
        (Interval(0.7, math.nan, math.nan, 1), "cannot tell"),
        (None, "cannot tell"),
    ):
        assert agreement(gain, 0.74) == said


def test_what_was_found_stands_beside_the_papers_numbers(measured, tmp_path):
    write_prompts(tmp_path / "prompts.csv", [*PROMPTS, *(f"{prompt} again" for prompt in PROMPTS)])
    values = {"base": 0.0, "sage-dual-b": 0.7, "dance-fixed-b": 0.1, "sage-fixed-b": 0.9}
    values |= {"cps-none-b": 0.5, "cps-plain-b": 0.2}
    runs = [*(measured(row, value) for row, value in values.items()), planned(tmp_path, "flow-none-b")]
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
    dual = "SAGE-GRPO with dual moving KL beats SAGE-GRPO without KL and with a fixed one"
    assert said[dual, "Overall"] == "does not hold" and said["the equalizer helps CPS", "Overall"] == "holds"
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
    command = f"--scale full --dry_run --output_dir {tmp_path} --launch env --seeds 1 2 1"
    assert main(command.split()) == 0
    told = capsys.readouterr().out
    start = f"env CONFIG={REPOSITORY}/configs/sage_64gpu.yaml env --config"  # the launcher would begin with another
    trainings = [line for line in told.splitlines() if line.startswith(start)]
    assert len(trainings) == 52 and "26 rows were loaded and checked for 64 GPU(s)" in told
    assert sum("configs/reward/a.yaml" in line for line in trainings) == 18
    assert sum("--use_grad_balancing False" in line for line in trainings) == 8
    assert "left out: clip_score=ckpts/clip" in told and not (tmp_path / "base").exists()
    assert not (tmp_path / "asked.json").exists()  # other flags may follow
    assert main([*command.split(), "--setting", "A", "--rows", "sage-step", "sage-dual"]) == 0
    assert "left out: sage-step, which the paper has under setting B alone" in capsys.readouterr().out


def test_a_row_that_cannot_be_trained_is_named_before_the_first_one_begins(tmp_path, capsys):
    command = ["--scale", "tiny", "--output_dir", str(tmp_path), "--rows", "cps-none", "--setting", "B"]
    assert main([*command, "--batch_size", "3"]) == 2
    assert "cps-none-b: " in (told := capsys.readouterr().err) and "num_generations" in told
    assert main([*command, "--sampling", "shift"]) == 2 and "expected FLAG=VALUE" in capsys.readouterr().err
    for changed, said in (
        ("--rows sage-other", "there is no row 'sage-other'"),
        ("--rows sage-step --setting A", "of setting B alone"),
        ("--sde_type cps", "--sde_type is what the rows differ in"),
        ("--kl_weight=1", "--kl_weight is what the rows differ in"),
        ("--seed 7", "--seed is what the rows differ in, or this program sets"),
        ("--jobs -1", "--jobs: expected at least 1"),
        ("--launch ./nowhere.sh", "there is no program './nowhere.sh'"),
        ("--launch 'sbatch", "--launch: No closing quotation in"),
        (f"--output_dir {__file__}", "is a file; expected a folder"),
        ("--sampling output_path=a", "output_path is set by this program"),
        ("--rewards moving_shape", "Nearest: moving_shapes"),
        (f"--prompts_csv {write_prompts(tmp_path / 'one.csv', PROMPTS[:1])}", "must be at least 2"),
    ):
        assert main([*command, *changed.split()]) == 2 and said in (told := capsys.readouterr().err), told
    assert not (tmp_path / "asked.json").exists()
    (tmp_path / "asked.json").write_text("{")
    assert main([*command, "--minutes", "0"]) == 2 and "asked.json' is damaged" in capsys.readouterr().err


def test_a_refused_command_changes_no_file_that_running_trainings_read(tmp_path, capsys):
    command = ["--output_dir", str(tmp_path), "--rows", "cps-none", "--setting", "B", "--minutes", "0"]
    assert main(["--scale", "tiny", *command]) == 0
    before = (tmp_path / "scale.yaml").read_bytes()
    assert main(["--scale", "full", "--dry_run", *command]) == 2
    assert "holds runs with other --config" in capsys.readouterr().err
    assert (tmp_path / "scale.yaml").read_bytes() == before


def test_a_measurement_that_fails_costs_no_training_and_may_be_mended(tmp_path, capsys):
    command = ["--scale", "tiny", "--output_dir", str(tmp_path), "--rows", "cps-none", "--setting", "B", *SMALL]
    command += ["--prompts_csv", str(write_prompts(tmp_path / "two.csv", PROMPTS[:2])), "--sampling"]
    assert main([*command, "steps=1"]) == 1
    assert "failed: base: status 2" in (told := capsys.readouterr().out) and "2 of 2 runs are not finished" in told
    assert not (tmp_path / "cps-none-b-seed42").exists() and not (tmp_path / "asked.json").exists()


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"means": null}'])
def test_a_damaged_measurement_is_none(measured, content):
    run = measured("base", 0.0)
    assert run.is_finished
    (run.measured / "evaluation.json").write_text(content)
    assert not run.is_finished


def test_votes_that_cannot_be_counted_and_videos_without_a_score_are_told(measured, tmp_path, capsys):
    write_prompts(tmp_path / "prompts.csv", [*PROMPTS, *(f"{prompt} again" for prompt in PROMPTS)])
    runs = [measured(row, 0.1) for row in ("base", "sage-dual-b", "dance-fixed-b")]
    (tmp_path / "studies" / "sage_vs_dance" / "videos").mkdir(parents=True)  # one that was interrupted
    votes = tmp_path / "studies" / "sage_vs_dance.votes"
    votes.mkdir()
    (votes / "ann.json").write_text("{")
    page = publish(PAPER, tmp_path, runs, scale="tiny")
    assert (tmp_path / "studies" / "sage_vs_dance" / "index.html").is_file()
    assert "votes" in (told := capsys.readouterr().err) and "are left out" in told
    assert "1 of 8 videos have no score by some metric" in page.read_text()
    assert "Every row was trained once" in page.read_text()


def test_a_row_is_trained_measured_and_never_made_twice(tmp_path, capsys):
    write_prompts(tmp_path / "held_out.csv", PROMPTS[:2])
    command = ["--scale", "tiny", "--output_dir", str(tmp_path / "out"), "--rows", "sage-dual", "--setting", "B"]
    command += [*SMALL, "--prompts_csv", str(tmp_path / "held_out.csv")]
    command += ["--sampling", "num_inference_steps=1", "video_length=5"]
    assert main(command) == 0, [path.read_text()[-2000:] for path in (tmp_path / "out").glob("*.log")]
    told = capsys.readouterr().out
    assert told.count("finished: ") == 2 and "index.html" in told
    out = tmp_path / "out"
    rows = {row["row"]: row["cells"] for row in json.loads((out / "results.json").read_text())["rows"]}
    assert rows["sage-dual-b"]["Overall"]["gain"]["num"] == rows["base"]["VQ"]["ours"]["num"] == 2
    assert (out / "sage-dual-b-seed42" / "metrics.jsonl").is_file()
    assert not (out / "sage-dual-b-seed42" / "checkpoints").exists()
    videos = out / "evaluation"
    made = {path: path.stat().st_mtime_ns for path in videos.rglob("*.mp4")}
    assert len(made) == 4 and main(command) == 0 and "finished: " not in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in videos.rglob("*.mp4")} == made
    (out / "evaluation" / "sage-dual-b-seed42" / "evaluation.json").unlink()
    assert main([*command, "--minutes", "0"]) == 0
    assert "1 of 2 runs are not finished: start the same command again" in capsys.readouterr().out
    assert main([*command, "--learning_rate", "1e-3"]) == 2
    assert "holds runs with other flags, which would stand in one table" in capsys.readouterr().err
