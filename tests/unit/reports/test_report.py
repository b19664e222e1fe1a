"""What stands in a report, read without a browser."""

import base64
import io
import json
import re
from collections import Counter
from html.parser import HTMLParser
from itertools import count, cycle
from urllib.parse import unquote

import numpy as np
import pytest
from PIL import Image

from hyvideo.evaluation.drift import LOOKS
from hyvideo.observability.metrics import read_metrics
from hyvideo.training.guard import RewardWatch
from scripts.reports.pictures import plot_reward_curve
from scripts.reports.report import report_runs
from tests.support.run_folders import HOSTILE_PROMPTS, PROMPTS, change_rows, write_run, write_scored


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.words, self.attributes = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_data(self, data):
        self.words.append(data)

    def values(self, tag, name):
        """What an attribute of the tags says, one after the other."""
        return [value for where, what, value in self.attributes if (where, what) == (tag, name)]

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def read(path):
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader


def add_looks(folder, levels):
    """Note looks in a folder of videos: all of one level, of each video its own."""
    looks = iter([{"looks": dict.fromkeys(LOOKS, level)} for level in levels])
    change_rows(folder / "scores.jsonl", lambda row: row | next(looks))


def test_a_report_shows_the_group_that_teaches_most_of_the_first_and_the_last_kept_round(tmp_path):
    run = write_run(tmp_path / "run", samples={30: 0.5})
    write_scored(run / "rollouts" / "step_10", ["middle"] * 9, [*range(9)])
    write_scored(run / "rollouts" / "step_20", ["alike"] * 10 + ["apart"] * 10, [*[5.0] * 9, 5.1, *range(9), None])
    numbers = count()
    change_rows(run / "rollouts" / "step_20" / "scores.jsonl", lambda row: row | {"advantage": next(numbers) - 14.5})
    page = read(report_runs([run], run / "report.html"))
    group = page.text.split("Round after update 20")[1].split("Trust region")[0]
    assert "First round" not in page.text  # its prompts have one video each, which teach nothing
    assert "apart" in group and "alike" not in group and "advantage +3.50" in group
    videos = [video for video in page.values("video", "src") if "step_20" in video]
    assert videos == [f"rollouts/step_20/{number:03d}.mp4" for number in (18, 17, 16, 15, 13, 12, 11, 10)]


@pytest.mark.parametrize("siblings", [False, True])
def test_a_report_shows_what_else_changed_and_the_pairs_that_changed_most(tmp_path, siblings):
    prompts = PROMPTS[:4] * 2 if siblings else PROMPTS
    run = write_run(tmp_path / "run", samples={0: 0.0, 30: 0.5}, prompts=prompts)
    without = read(report_runs([run], run / "report.html"))
    levels = np.linspace(0.2, 0.9, 8)
    add_looks(run / "samples" / "step_0", levels)
    add_looks(run / "samples" / "step_30", 0.5 + 0.1 * (levels - 0.5))
    page = read(report_runs([run], run / "report.html"))
    assert "spread -90 %" in page.text and "Most changed, gain" in page.text and "flicker" in page.text
    assert "99.8 % interval" in page.text and "no bound" not in page.text
    report = (run / "report.html").read_text()
    assert "<b>−90</b>" in report and not re.search(r"<b>[+−]?0\.\d\d</b>", report.partition('id="drift"')[2])
    assert ("Spread among siblings" in page.text) == siblings
    assert "What else changed" not in without.text
    shown, before = (Counter(one.values("video", "src")) for one in (page, without))
    assert before <= shown and (shown - before).total() == 6
    assert {"samples/step_0/007.mp4", "samples/step_30/007.mp4"} <= (shown - before).keys()


def test_a_report_refers_to_nothing_but_its_videos_and_an_embedded_one_to_nothing(tmp_path):
    run = write_run(tmp_path / "a run # 1", samples={10: 0.0, 30: 0.5})
    page = read(report_runs([run], run / "report.html"))
    links = [value for _, name, value in page.attributes if name in ("src", "href")]
    videos = [link for link in links if link.endswith(".mp4")]
    assert len(videos) == 2 * 8 + 2 * 3
    posters = [value for _, name, value in page.attributes if name == "poster"]
    assert [unquote(poster) for poster in posters] == [unquote(video)[:-3] + "jpg" for video in videos]
    assert all((run / link).is_file() for link in (*videos, *posters))
    assert all(link.startswith(("#", "data:")) for link in links if link not in videos)
    elsewhere = read(report_runs([run], tmp_path / "pages" / "report.html"))
    assert ("video", "src", "../a%20run%20%23%201/samples/step_10/000.mp4") in elsewhere.attributes
    labels = [value for tag, name, value in page.attributes if name == "aria-label"]
    assert sum(label.startswith("update 10: a ") for label in labels) == 8
    assert any(re.match(r"Training reward\. .*at update 1, .* at update 30", label) for label in labels)
    page = read(report_runs([run], run / "report.html", embed=True))
    sources = page.values("video", "src")
    assert len(sources) == 22 and all(source.startswith("data:video/mp4;base64,") for source in sources)
    posters = page.values("video", "poster")
    assert len(posters) == 22 and all(poster.startswith("data:image/jpeg;base64,") for poster in posters)


def test_prompts_add_no_tag_and_no_attribute(tmp_path):
    plain = write_run(tmp_path / "plain", samples={0: 0.0, 30: 0.5}, prompts=[*"abcdefghij"][: len(HOSTILE_PROMPTS)])
    hostile = write_run(tmp_path / "hostile", samples={0: 0.0, 30: 0.5}, prompts=HOSTILE_PROMPTS)
    pages = [read(report_runs([run], run / "report.html")) for run in (plain, hostile)]
    assert pages[0].tags == pages[1].tags
    assert [a[:2] for a in pages[0].attributes] == [a[:2] for a in pages[1].attributes]
    assert HOSTILE_PROMPTS[0] in pages[1].words


def test_a_video_without_a_picture_beside_it_gets_its_first_frame(tmp_path):
    run = write_run(tmp_path / "run", samples={30: 0.5})
    (run / "samples" / "step_30" / "001.jpg").unlink()
    (run / "samples" / "step_30" / "002.jpg").write_bytes(b"not a picture")
    (run / "samples" / "step_30" / "003.jpg").unlink()
    (run / "samples" / "step_30" / "003.mp4").write_bytes(b"not a video")
    posters = read(report_runs([run], run / "report.html")).values("video", "poster")
    assert [poster.partition(",")[0] for poster in posters[:2]] == ["samples/step_30/000.jpg", "data:image/jpeg;base64"]
    assert len(posters) == 8 - 2, "neither a broken picture nor a broken video ends the page"
    picture = Image.open(io.BytesIO(base64.b64decode(posters[1].partition(",")[2])))
    assert picture.size == (32, 32)


def test_the_worst_the_median_and_the_best_pair_of_the_verdict_are_shown(tmp_path):
    run = write_run(tmp_path / "run", samples={30: 0.5})
    for step, rewards in {0: range(8), 30: [0, 1, 2, 3 + 3, 4 - 2, 5, 6 + 1, None]}.items():
        write_scored(run / "samples" / f"step_{step}", PROMPTS, list(rewards))
    words = read(report_runs([run], run / "report.html")).text
    assert "eight more pairs" not in words
    shown = re.findall(r"(Worst|Median|Best) gain (\S+) base std before (\S+)", words)
    assert [(place, before) for place, _, before in shown] == [("Worst", "4.00"), ("Median", "2.00"), ("Best", "3.00")]
    unit = np.std([0, 1, 2, 3, 4, 5, 6], ddof=1)  # the eighth pair failed
    assert [gain for _, gain, _ in shown] == [f"−{2 / unit:.2f}", "0.00", f"+{3 / unit:.2f}"]


def test_the_last_tenth_of_rounds_is_that_of_the_run(tmp_path):
    run = write_run(tmp_path / "run", num_updates=2)
    rounds = {step: float((step - 1) // 4) for step in range(1, 41)}
    rows = [{"step": step, "round": number, "reward/mean": number} for step, number in rounds.items()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report_runs([run], tmp_path / "report.html")
    words = [word.strip() for word in read(tmp_path / "report.html").words]
    at = words.index("training reward")
    assert [word for word in words[at + 1 : at + 3] if word] == ["9.00", "last round"]


def test_a_page_says_where_its_run_comes_from(tmp_path):
    run = write_run(tmp_path / "first", num_updates=2)
    (run / "console.log").write_text(
        "2026-01-01 10:00:00 the code in hyvideo/ is 1f0c3a5e7b9d2468 (commit b84b4cd-dirty)\n"
        "2026-01-01 10:00:00 command: python post_train.py --config configs/tiny.yaml\n"
        "2026-01-02 10:00:00 the code in hyvideo/ is 1f0c3a5e7b9d2468 (commit c95b4cd)\n"
        "2026-01-02 10:00:00 command: python post_train.py --config configs/tiny.yaml --resume_from_checkpoint latest\n"
    )
    words = read(report_runs([run], run / "report.html")).text
    assert "first: report (c95b4cd)" in words
    assert "first 2 of 2 updates" in words and "<footer data-reload" not in (run / "report.html").read_text()
    assert "python post_train.py --config configs/tiny.yaml --resume_from_checkpoint latest · commit c95b4cd" in words


@pytest.mark.parametrize(
    ("samples", "settings", "headline"),
    [
        ({}, (), "next validation at update 24, to be compared with the one after it"),
        ({0: 0.1}, (), "next validation at update 24"),
        ({}, ("--validation_interval", "0"), "validation is off (validation_interval, valid_video_csv)"),
        ({}, ("--validation_interval", "64"), "two validations of the same prompts are needed (validate_at_step0)"),
    ],
)
def test_a_young_run_says_when_there_will_be_a_verdict(tmp_path, samples, settings, headline):
    run = write_run(tmp_path / "run", num_updates=5, samples=samples, settings=[*settings, "--max_steps", "60"])
    words = [word.strip() for word in read(report_runs([run], run / "report.html")).words]
    assert f"No verdict yet: {headline}" in words
    assert "<footer data-reload" in (run / "report.html").read_text(), "it is in progress"


def test_the_film_of_the_demo_is_linked_and_the_gain_of_every_validation_is_the_first_chart(tmp_path):
    run = write_run(tmp_path / "run", samples={0: 0.0, 10: 0.2, 30: 0.5})
    (run / "before_after.mp4").write_bytes(b"video")
    page = read(report_runs([run], run / "report.html"))
    assert page.words[page.words.index("eight more pairs") - 1].endswith("the median and most; ")
    assert ("a", "href", "before_after.mp4") in page.attributes
    first = next(label for label in page.values("div", "aria-label") if " at update " in label)
    assert re.fullmatch(r"Validated gain\. 0\.00 at update 0, \+\d\.\d\d at update 30", first)


def charts_of(page):
    labels = [label.partition(". ") for label in page.values("div", "aria-label")]
    return {title: text for title, dot, text in labels if "at update" in text}


MIXING = ("Share of each metric in the advantage", "Spread of each metric within a prompt")
MIXING += ("Correlation of each metric with the others",)
PLACES = ("share", "spread", "correlation")
OF_BOTH = {f"mixing/{of}_{name}": y for of in PLACES for name, y in (("VQ", 0), ("TA", 0.125))}
TWICE = "{0} at update 1, {0} at update 3"
DISTANCES = {"Distance to the old policy": TWICE.format(0.1), "Distance to the base": TWICE.format(0.2)}
OWN = {"critic/value": 0.5, "loss/critic": 0.25}
PARTS = {
    "two metrics": (OF_BOTH, dict.fromkeys(MIXING, f"VQ: {TWICE.format(0)}. TA: {TWICE.format(0.125)}")),
    "nft": ({"nft/old_distance": 0.1, "nft/base_distance": 0.2}, DISTANCES),
    "an algorithm's own": (OWN, {name: TWICE.format(value) for name, value in OWN.items()}),
    "a guard": ({"valid/judge": 0.5}, {"Validation by the judge": TWICE.format(0.5)}),
}


@pytest.mark.parametrize(("logged", "charts"), PARTS.values(), ids=PARTS)
def test_what_only_some_runs_log_is_drawn_for_these_alone(tmp_path, logged, charts):
    runs = [write_run(tmp_path / name, num_updates=3, samples={0: 0.1, 3: 0.2}) for name in ("plain", "more")]
    change_rows(runs[1] / "metrics.jsonl", lambda row: row | logged)
    plain, more = (charts_of(read(report_runs([run], run / "report.html"))) for run in runs)
    assert more == plain | charts and not plain.keys() & charts.keys()


def test_runs_that_are_compared_have_their_differing_settings_beside_their_names(tmp_path):
    settings = {"0.3": ["--eta", "0.3", "--keep_last", "2"], "0.7": ["--eta", "0.7", "--keep_last", "3"]}
    runs = [write_run(tmp_path / eta, num_updates=2, settings=flags) for eta, flags in settings.items()]
    page = report_runs(runs, tmp_path / "comparison.html").read_text()
    beside = re.findall(r'<bdi>(0\.\d)</bdi><span class="differs">([^<]*)</span></th>', page)
    assert beside == [("0.3", "eta 0.3"), ("0.7", "eta 0.7")]


def cells_of(page):
    return [word.strip() for word in page.words if word.strip()]


def test_runs_of_different_length_are_compared_after_the_last_update_that_all_validated(tmp_path):
    """After update 20 the short run is ahead, and at the end the long one, which trained twice as long."""
    short = write_run(tmp_path / "short", num_updates=20, samples={0: 0.0, 10: 0.2, 20: 0.4})
    long = write_run(tmp_path / "long", num_updates=40, samples={0: 0.0, 20: 0.3, 40: 0.9})
    cut = write_run(tmp_path / "cut" / "long", num_updates=20, samples={0: 0.0, 20: 0.3})
    page, expected = (read(report_runs([short, run], tmp_path / "comparison.html")) for run in (long, cut))
    words = cells_of(page)
    assert "short gained most" in words
    ends = "Compared after update 20, the last that all validated: short has 20 updates, long has 40 updates."
    assert any(word.endswith(ends) for word in words)
    assert any(word.endswith("Compared after update 20.") for word in cells_of(expected))
    videos = page.values("video", "src")
    assert len(videos) == 16 and all("/step_20/" in video for video in videos)
    whole = map(cells_of, (page, expected))
    tables = [cells[cells.index("seconds per update") : cells.index("Validated gain")] for cells in whole]
    assert "40" in tables[0] and ["20" if cell == "40" else cell for cell in tables[0]] == tables[1]


def test_runs_that_never_validated_after_the_same_update_are_not_compared(tmp_path):
    runs = [write_run(tmp_path / "ten", samples={10: 0.0, 20: 0.5})]
    runs += [write_run(tmp_path / "seven", num_updates=14, samples={7: 0.0, 14: 0.1})]
    words = cells_of(read(report_runs(runs, tmp_path / "comparison.html")))
    assert "Not compared: there is no update after which all runs validated" in words
    assert any("ten has 30 updates, seven has 14 updates." in word for word in words)
    assert not any("gained most" in word for word in words)


def test_a_reward_that_may_be_exploited_is_said_beside_the_verdict_and_nothing_otherwise(tmp_path):
    """By the watch itself, which reads the metrics of a run whose reward rises while its videos become alike."""
    exploiting = write_run(tmp_path / "exploiting", num_updates=45, samples={0: 0.0, 45: 0.5})
    fine = write_run(tmp_path / "fine", num_updates=45, samples={0: 0.0, 45: 0.5})
    for run, fall in ((exploiting, 0.02), (fine, 0.0)):
        rows = read_metrics(run / "metrics.jsonl")
        watch = RewardWatch()
        told = [watch.observe({**row, "rollout/diversity": 1 - fall * row["step"]}) for row in rows]
        warnings = [f"2026-01-01 10:00:00 WARNING: {warning}\n" for warning in filter(None, told)]
        warnings.append("2026-01-01 10:00:00 WARNING: 1 videos could not be scored\n")
        (run / "console.log").write_text("".join(warnings))
    pages = [report_runs([run], run / "report.html") for run in (exploiting, fine)]
    verdicts = [page.read_text().partition('aria-label="Verdict"')[2].partition("</section>")[0] for page in pages]
    assert "Improved" in verdicts[0] and "Improved" in verdicts[1]
    assert 'class="chip" href="#failures"' in verdicts[0] and "diversity fell from" in verdicts[0]
    assert "chip" not in verdicts[1] and "could not be scored" not in verdicts[1]
    both = report_runs([exploiting, fine], tmp_path / "comparison.html").read_text()
    assert re.findall(r'<bdi>(\w+)</bdi> <a class="chip"', both) == ["exploiting"]


def test_failures_are_listed(tmp_path):
    run = write_run(tmp_path / "run", num_updates=2)
    text = (run / "metrics.jsonl").read_text().replace('"reward/failed": 0.0', '"reward/failed": 2.0')
    (run / "metrics.jsonl").write_text(text)
    (run / "metrics.discarded.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 2}\n{"step": 3, "rew\n')
    (run / "console.log").write_text("2026-01-01 10:00:01 WARNING: <b>Update 3: loss nan</b>\n")
    words = read(report_runs([run], run / "report.html")).text
    assert "failed scores 4 videos of the whole run" in words
    assert 'class="alarming"' in (run / "report.html").read_text()
    assert "4 videos in 2 rounds" in words and "3 rows in metrics.discarded.jsonl" in words
    assert "WARNING: <b>Update 3: loss nan</b>" in words


def test_lost_rows_are_said_and_shaded_in_every_curve_over_the_updates(tmp_path):
    run = write_run(tmp_path / "run", num_updates=20)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:4] + lines[9:]))
    page = read(report_runs([run], run / "report.html"))
    assert "Shaded in the charts: the rows of updates 5 to 9 are missing from metrics.jsonl." in page.words
    assert "5 to 9; lost from metrics.jsonl" in page.words
    assert page.attributes.count(("g", "class", "gap")) == 15
    assert "Shaded" not in "".join(read(report_runs([write_run(tmp_path / "whole")], tmp_path / "r.html")).words)


@pytest.mark.parametrize("num_updates", [0, 1, 2])
def test_the_shortest_runs_have_a_report(tmp_path, num_updates):
    run = write_run(tmp_path / "run", num_updates=num_updates)
    (run / "metrics.jsonl").touch()
    page = read(report_runs([run], run / "report.html"))
    assert page.tags.count("figure") > 10 if num_updates else "Nothing was logged yet." in page.words


@pytest.mark.parametrize("name", ["reward/mean", "reward/std", "time/rollout", "grad_norm", "round"])
@pytest.mark.parametrize("values", [(1.7e308, 1.7e308), (9e99, -9e99)], ids=str)
def test_numbers_whose_sums_no_float_holds_are_left_out_of_curves_and_means(tmp_path, name, values):
    run = write_run(tmp_path / "run", num_updates=12, samples={0: 0.0, 12: 1.0})
    change_rows(run / "metrics.jsonl", lambda row: row | {name: values[row["step"] % 2]})
    alternating = cycle(values)
    change_rows(run / "samples" / "step_12" / "scores.jsonl", lambda row: row | {"VQ": next(alternating)})
    page = read(report_runs([run], run / "report.html"))
    assert page.tags.count("figure") > 10
    if name != "reward/mean":
        plot_reward_curve(run / "metrics.jsonl", tmp_path / "curve.png", held_out={})


def test_an_unwritable_page_leaves_the_old_one_and_two_runs_of_one_name_are_refused(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", num_updates=2)
    before = report_runs([run], run / "report.html").read_bytes()

    def full(self, data):
        raise OSError("No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        report_runs([run], run / "report.html")
    assert (run / "report.html").read_bytes() == before
    assert sorted(path.name for path in run.iterdir()) == ["config.yaml", "metrics.jsonl", "report.html"]
    runs = [write_run(tmp_path / folder / "run", num_updates=2) for folder in "ab"]
    with pytest.raises(ValueError, match="Two runs are called run: .* Name them, as in"):
        report_runs(runs, tmp_path / "comparison.html")
