"""scripts/report.py as a program: what it writes and says, and what it refuses."""

import json
import os
from pathlib import Path

import pytest

from scripts.report import main
from tests.support.run_folders import PROMPTS, contents, write_run, write_scored


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_one_run_is_reported_in_its_folder_and_several_beside_each_other(here: Path, capsys: pytest.CaptureFixture):
    for name in ("sage", "dance"):
        write_run(here / name, num_updates=5)
    assert main(["sage"]) == 0 and (here / "sage" / "report.html").is_file()
    assert main(["sage", "ours=dance"]) == 0
    assert main(["sage", "ours=dance", "--output", "pages/both.html"]) == 0
    assert capsys.readouterr().out == "sage/report.html\nsage/comparison.html\npages/both.html\n"
    assert {path.name for path in here.iterdir()} == {"sage", "dance", "pages"}
    assert "ours" in (here / "pages" / "both.html").read_text()


def test_a_study_goes_from_gallery_to_win_rates(here: Path, capsys: pytest.CaptureFixture):
    for name in ("base", "trained"):
        write_scored(here / name, PROMPTS, [0.0] * len(PROMPTS))
    assert main(["gallery", "base", "trained"]) == 0 and (here / "base" / "gallery.html").is_file()
    assert main(["gallery", "base", "trained", "--preference", "study"]) == 0
    key = json.loads((here / "study.key.json").read_text())
    vote = {"study": key["study"], "rater": "Ann", "criterion": "motion_quality", "count": 1}
    votes = [vote | {"pair": pair, "choice": videos[1]} for pair, videos in key["pairs"].items()]
    (here / "ann.json").write_text(json.dumps({"votes": votes}))
    capsys.readouterr()
    assert main(["winrates", "study.key.json", "ann.json", "--merged", "all.json"]) == 0
    assert capsys.readouterr().out == (
        "Motion quality       base preferred to trained: 0.0% [0.0%, 32.4%], 8 pairs, 1 rater(s), "
        "votes 0 won, 0 tied, 8 lost\n"
        "raters: Ann (8 votes)\n"
    )
    assert len(json.loads((here / "all.json").read_text())["votes"]) == 8


def test_an_output_that_is_no_page_or_is_read_itself_is_left_as_it_is(here: Path, capsys: pytest.CaptureFixture):
    write_run(here / "run", num_updates=2)
    write_scored(here / "base", PROMPTS[:1], [0.0])
    os.mkfifo(here / "pipe.html")
    for name in ("key.json", "votes.json"):
        (here / name).write_text('{"study": "a", "models": {}, "pairs": {}, "votes": []}')
    for argv, told in (
        (["run", "--output", "pipe.html"], "'pipe.html': it is a pipe, socket or device"),
        (["run", "--output", "run/metrics.jsonl"], "'run/metrics.jsonl': a page is written to a file ending in .html"),
        (["gallery", "base", "--output", "base/000.mp4"], "'base/000.mp4': a page is written"),
        (["winrates", "key.json", "votes.json", "--merged", "key.json"], "'key.json' is read by this command"),
        (["winrates", "key.json", "votes.json", "--merged", "./votes.json"], "'votes.json' is read by this command"),
    ):
        before = contents(here)
        assert main(argv) == 2 and told in capsys.readouterr().err and contents(here) == before


def test_wrong_input_is_named_without_a_traceback(here, capsys):
    write_scored(here / "base", PROMPTS[:1], [0.0])
    for argv, message in (
        (["nowhere"], "No metrics at nowhere/metrics.jsonl: expected the metrics.jsonl of a run folder."),
        (["gallery", "nowhere", "nowhere2"], "'nowhere' holds no videos"),
        (["gallery", "base", "--preference", "study"], "Expected two or more folders with names of their own"),
        (["gallery", "=base", "base"], "expected FOLDER or NAME=FOLDER; received '=base'."),
        (["winrates", "base/scores.jsonl", "none.json"], "none.json: expected a JSON object with votes"),
    ):
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert error.startswith("scripts.report: ") and message in error and error.count("\n") == 1
