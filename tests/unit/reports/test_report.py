"""What stands in a report, read without a browser."""

import base64
import io
import json
import re
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest
from PIL import Image

from hyvideo.reports.report import report_runs
from tests.support.run_folders import HOSTILE_PROMPTS, PROMPTS, write_run, write_scored


class Reader(HTMLParser):
    """Collects the tags and the visible text of a page."""

    def __init__(self):
        super().__init__()
        self.tags, self.words, self.attributes = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_data(self, data):
        self.words.append(data)


def read(path):
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader


def test_a_report_refers_to_nothing_but_its_videos_and_itself(tmp_path):
    run = write_run(tmp_path / "a run # 1", samples={10: 0.0, 30: 0.5})
    page = read(report_runs([run], run / "report.html"))
    links = [value for _, name, value in page.attributes if name in ("src", "href")]
    videos = [link for link in links if link.endswith(".mp4")]
    assert len(videos) == 2 * 8 + 8 + 2 * 3
    posters = [value for _, name, value in page.attributes if name == "poster"]
    assert [unquote(poster) for poster in posters] == [unquote(video)[:-3] + "jpg" for video in videos]
    assert all((run / link).is_file() for link in (*videos, *posters))
    assert all(link.startswith(("#", "data:")) for link in links if link not in videos)
    elsewhere = read(report_runs([run], tmp_path / "pages" / "report.html"))
    assert ("video", "src", "../a%20run%20%23%201/samples/step_10/000.mp4") in elsewhere.attributes


def test_prompts_add_no_tag_and_no_attribute(tmp_path):
    plain = write_run(tmp_path / "plain", samples={0: 0.0, 30: 0.5}, prompts=["a"] * len(HOSTILE_PROMPTS))
    hostile = write_run(tmp_path / "hostile", samples={0: 0.0, 30: 0.5}, prompts=HOSTILE_PROMPTS)
    pages = [read(report_runs([run], run / "report.html")) for run in (plain, hostile)]
    assert pages[0].tags == pages[1].tags
    assert [a[:2] for a in pages[0].attributes] == [a[:2] for a in pages[1].attributes]
    assert HOSTILE_PROMPTS[0] in pages[1].words


def test_an_embedded_report_can_be_sent_alone(tmp_path):
    run = write_run(tmp_path / "run", samples={10: 0.0, 30: 0.5})
    page = read(report_runs([run], run / "report.html", embed=True))
    sources = [value for tag, name, value in page.attributes if (tag, name) == ("video", "src")]
    assert len(sources) == 30 and all(source.startswith("data:video/mp4;base64,") for source in sources)
    posters = [value for tag, name, value in page.attributes if (tag, name) == ("video", "poster")]
    assert len(posters) == 30 and all(poster.startswith("data:image/jpeg;base64,") for poster in posters)


def test_a_video_without_a_picture_beside_it_gets_its_first_frame(tmp_path):
    run = write_run(tmp_path / "run", samples={30: 0.5})
    (run / "samples" / "step_30" / "001.jpg").unlink()
    (run / "samples" / "step_30" / "002.jpg").write_bytes(b"not a picture")
    (run / "samples" / "step_30" / "003.jpg").unlink()
    (run / "samples" / "step_30" / "003.mp4").write_bytes(b"not a video")
    page = read(report_runs([run], run / "report.html"))
    posters = [value for tag, name, value in page.attributes if (tag, name) == ("video", "poster")]
    assert [poster.partition(",")[0] for poster in posters[:2]] == ["samples/step_30/000.jpg", "data:image/jpeg;base64"]
    assert len(posters) == 16 - 2, "neither a broken picture nor a broken video ends the page"
    picture = Image.open(io.BytesIO(base64.b64decode(posters[1].partition(",")[2])))
    assert picture.size == (32, 32)


def test_the_worst_the_median_and_the_best_pair_of_the_verdict_are_shown(tmp_path):
    run = write_run(tmp_path / "run", samples={30: 0.5})
    for step, rewards in {0: range(8), 30: [0, 1, 2, 3 + 2, 4 - 3, 5, 6 + 1, None]}.items():
        write_scored(run / "samples" / f"step_{step}", PROMPTS, list(rewards))
    words = " ".join(" ".join(read(report_runs([run], run / "report.html")).words).split())
    shown = re.findall(r"(Worst|Median|Best) gain (\S+) before (\S+)", words)
    assert [(place, before) for place, _, before in shown] == [("Worst", "4"), ("Median", "2"), ("Best", "3")]
    assert [gain[0] for _, gain, _ in shown] == ["−", "0", "+"]


def test_every_video_and_chart_says_what_it_shows(tmp_path):
    run = write_run(tmp_path / "run", samples={10: 0.0, 30: 0.5})
    page = read(report_runs([run], run / "report.html"))
    labels = [value for tag, name, value in page.attributes if name == "aria-label"]
    assert sum(label.startswith("update 10: a ") for label in labels) == 8
    assert any(re.match(r"Training reward\. .*at update 1, .* at update 30", label) for label in labels)


def test_the_last_tenth_of_rounds_is_that_of_the_run(tmp_path):
    run = write_run(tmp_path / "run", num_updates=2)
    rows = [
        {"step": step, "round": float((step - 1) // 4), "reward/mean": float((step - 1) // 4)} for step in range(1, 41)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report_runs([run], tmp_path / "report.html")
    words = [word.strip() for word in read(tmp_path / "report.html").words]
    assert words[words.index("training reward") + 1] == "9"


def test_failures_are_listed(tmp_path):
    run = write_run(tmp_path / "run", num_updates=2)
    text = (run / "metrics.jsonl").read_text().replace('"reward/failed": 0.0', '"reward/failed": 2.0')
    (run / "metrics.jsonl").write_text(text)
    (run / "metrics.discarded.jsonl").write_text("{}\n{}\n{}\n")
    (run / "console.log").write_text("2026-01-01 10:00:01 WARNING: <b>Update 3: loss nan</b>\n")
    words = " ".join(read(report_runs([run], run / "report.html")).words)
    assert "4 videos in 2 rounds" in words and "3 rows in metrics.discarded.jsonl" in words
    assert "WARNING: <b>Update 3: loss nan</b>" in words


def test_lost_rows_are_said_and_shaded_in_every_curve_over_the_updates(tmp_path):
    run = write_run(tmp_path / "run", num_updates=20)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:4] + lines[9:]))
    page = read(report_runs([run], run / "report.html"))
    assert "Shaded in the charts: the rows of updates 5 to 9 are missing from metrics.jsonl." in page.words
    assert "5 to 9; lost from metrics.jsonl" in page.words
    classes = [value for tag, name, value in page.attributes if (tag, name) == ("path", "class")]
    assert classes.count("gap c0") == 15
    assert "Shaded" not in "".join(read(report_runs([write_run(tmp_path / "whole")], tmp_path / "r.html")).words)


@pytest.mark.parametrize("num_updates", [0, 1, 2])
def test_the_shortest_runs_have_a_report(tmp_path, num_updates):
    run = write_run(tmp_path / "run", num_updates=num_updates)
    (run / "metrics.jsonl").touch()
    page = read(report_runs([run], run / "report.html"))
    assert page.tags.count("figure") > 10 if num_updates else "Nothing was logged yet." in page.words


def test_an_unwritable_page_leaves_the_old_one(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", num_updates=2)
    before = report_runs([run], run / "report.html").read_bytes()

    def full(self, data):
        raise OSError("No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        report_runs([run], run / "report.html")
    assert (run / "report.html").read_bytes() == before
    assert sorted(path.name for path in run.iterdir()) == ["config.yaml", "metrics.jsonl", "report.html"]


def test_two_runs_of_one_name_are_refused(tmp_path):
    runs = [write_run(tmp_path / folder / "run", num_updates=2) for folder in "ab"]
    with pytest.raises(ValueError, match="Two runs are called run: .* Name them, as in"):
        report_runs(runs, tmp_path / "comparison.html")
