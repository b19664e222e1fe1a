"""The report in a browser: plots drawn, videos playing, prompts as text, fits a phone, quiet console."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page

from scripts.reports.report import report_runs
from tests.browser.conftest import DESKTOP, PHONE
from tests.support.run_folders import HOSTILE_PROMPTS, write_run, write_scored

OpenPage = Callable[..., Page]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "sage", samples={10: 0.0, 20: 0.3, 30: 0.5})


@pytest.fixture(scope="module")
def report(run: Path) -> Path:
    return report_runs([run], run / "report.html")


def test_on_a_phone_every_chart_has_a_visible_curve_and_no_name_breaks_inside_a_word(report: Path, open_page: OpenPage):
    page = open_page(report, size=PHONE)
    charts = page.locator(".chart")
    assert charts.count() >= 15
    for number in range(charts.count()):
        line = charts.nth(number).locator("g.line path").first.bounding_box()
        assert line["width"] > 100, charts.nth(number).inner_text()
    broken = """() => [...document.querySelectorAll(".settings th")].flatMap((name) => [...name.childNodes])
        .filter((piece) => piece.nodeType === Node.TEXT_NODE).map((piece) => {
          const range = document.createRange();
          range.selectNodeContents(piece);
          return [piece.textContent, new Set([...range.getClientRects()].map((line) => line.top)).size];
        }).filter(([, lines]) => lines > 1)"""
    assert page.evaluate(broken) == []


def test_the_zero_of_the_intervals_is_named_above_its_line(report: Path, open_page: OpenPage):
    page = open_page(report)
    label, lines = page.locator(".verdict .interval-head i"), page.locator(".verdict .interval .zero")
    assert label.inner_text() == "0"
    middle = label.bounding_box()["x"] + label.bounding_box()["width"] / 2
    assert [line.bounding_box()["x"] for line in lines.all()] == pytest.approx([middle] * lines.count(), abs=1)


def test_all_pairs_are_sorted_by_gain_and_by_whatever_head_is_pressed(open_page: OpenPage, tmp_path: Path):
    run = write_run(tmp_path / "run", samples={0: 0.0, 30: 0.0}, settings=["--algorithm", "my_own:Reinforce"])
    write_scored(run / "samples" / "step_0", ["a", "c", "b"] * 3, [0.0, 5.0, 1.0] * 3)
    write_scored(run / "samples" / "step_30", ["a", "c", "b"] * 3, [2.0, 4.0, -3.0] * 3)
    page = open_page(report_runs([run], run / "report.html"))
    assert "my_own:Reinforce · sage_grpo" in page.locator(".top .meta").first.inner_text()
    page.locator("#pairs summary").click()
    table = page.locator("#pairs .sortable")

    def prompts() -> str:
        return "".join(table.locator("tbody th").all_inner_texts())

    assert prompts() == "aaacccbbb"
    for head, expected in {
        "Gain": "bbbcccaaa",
        "After": "cccaaabbb",
        "Before": "cccbbbaaa",
        "Prompt": "aaabbbccc",
    }.items():
        table.get_by_role("columnheader", name=head).click()
        assert prompts() == expected, head
    table.get_by_role("columnheader", name="Prompt").press("Enter")
    assert prompts() == "cccbbbaaa"


def test_the_page_of_a_run_in_progress_is_read_anew_but_not_while_a_video_plays(open_page: OpenPage, tmp_path: Path):
    run = write_run(tmp_path / "run", num_updates=5, samples={0: 0.0}, settings=["--max_steps", "60"])
    page = open_page(report_runs([run], run / "report.html"))
    page.clock.install()
    page.reload()
    video = page.locator("#strips video").first
    video.evaluate("(video) => { window.isOld = true; return video.play(); }")
    page.clock.fast_forward(61_000)
    page.wait_for_timeout(300)
    assert page.evaluate("window.isOld")
    video.evaluate("(video) => video.pause()")
    page.clock.fast_forward(61_000)
    page.wait_for_function("!window.isOld")


@pytest.mark.parametrize("embed", [False, True], ids=["linked", "embedded"])
def test_videos_play(run: Path, report: Path, open_page: OpenPage, tmp_path: Path, embed: bool):
    page = open_page(report_runs([run], tmp_path / "alone.html", embed=True) if embed else report)
    page.locator("#samples").get_by_role("button", name="Play all").click()
    video = page.locator("#strips video").first
    page.wait_for_function("(video) => video.currentTime > 0.05", arg=video.element_handle(), timeout=10_000)


@pytest.mark.parametrize("reduced", [False, True], ids=["motion", "reduced motion"])
def test_before_and_after_play_side_by_side_in_step_unless_motion_is_unwanted(report, open_page, reduced):
    page = open_page(report, motion="reduce" if reduced else "no-preference")
    pairs = page.locator("#pairs .pair")
    assert pairs.count() == 3
    assert page.locator("#pairs").bounding_box()["y"] < page.locator(".facts").bounding_box()["y"]
    videos = page.locator("#pairs video")
    assert videos.evaluate_all("(videos) => videos.every((video) => video.muted && video.loop)")
    playing = "() => [...document.querySelectorAll('#pairs video')].map((video) => !video.paused)"
    if reduced:
        page.wait_for_function("() => [...document.querySelectorAll('#pairs video')].every((v) => v.readyState > 1)")
        page.wait_for_timeout(500)
        assert not any(page.evaluate(playing))
        page.locator("#pairs").get_by_role("button", name="Play all").click()
    page.wait_for_function(f"() => ({playing})().every(Boolean)")
    first, second = (pairs.first.locator("video").nth(side).element_handle() for side in (0, 1))
    page.evaluate("(video) => { video.currentTime = 0.5 * video.duration; }", second)
    apart = "([a, b]) => { const d = Math.abs(a.currentTime - b.currentTime); return Math.min(d, a.duration - d); }"
    page.wait_for_function(f"(pair) => ({apart})(pair) < 0.1", arg=[first, second])
    pairs.first.locator("video").first.click()
    assert [page.evaluate("(video) => video.paused", video) for video in (first, second)] == [True, True]
    assert page.evaluate(playing)[2:] == [True] * 4


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_videos_have_their_size_and_a_picture_before_they_are_loaded(report: Path, open_page: OpenPage, size: dict):
    page = open_page(report, size=size, scripts=False)
    heights = "(videos) => videos.map((video) => video.offsetHeight)"
    unloaded = page.locator("video").evaluate_all(heights)
    page = open_page(report, size=size)
    page_height = page.evaluate("document.body.scrollHeight")
    for video in page.locator("video").all():
        video.scroll_into_view_if_needed()
        page.wait_for_function("(video) => video.readyState > 1", arg=video.element_handle())
    assert page.locator("video").evaluate_all(heights) == unloaded
    assert page.evaluate("document.body.scrollHeight") == page_height
    page.emulate_media(reduced_motion="reduce")
    page.evaluate("scrollTo(0, 0)")
    page.get_by_role("link", name="Trust region").click()
    page.wait_for_timeout(200)
    assert abs(page.locator("#trust").bounding_box()["y"]) < 20


def test_play_all_plays_what_is_near_the_screen_and_goes_on_where_one_scrolls(open_page: OpenPage, tmp_path: Path):
    run = write_run(tmp_path / "run", samples=dict.fromkeys(range(0, 60, 10), 0.0))
    page = open_page(report_runs([run], run / "report.html"), size={"width": 800, "height": 900})
    page.locator("#samples").get_by_role("button", name="Play all").click()
    strips = page.locator("#strips .strip")
    playing = "(videos) => videos.map((video) => !video.paused)"
    for strip in (strips.first, strips.last):
        strip.scroll_into_view_if_needed()
        page.wait_for_function("(video) => video.currentTime > 0.05", arg=strip.locator("video").first.element_handle())
        assert strip.locator("video").evaluate_all(playing) == [True] * 5 + [False]  # six do not fit side by side
    assert not any(strips.first.locator("video").evaluate_all(playing))
    page.locator("#samples").get_by_role("button", name="Pause all").click()
    assert not any(page.locator("#strips video").evaluate_all(playing))


def test_hostile_prompts_are_text(open_page: OpenPage, tmp_path: Path):
    run = write_run(tmp_path / "run", samples={0: 0.0, 30: 0.5}, prompts=HOSTILE_PROMPTS)
    page = open_page(report_runs([run], run / "report.html", ["<b>name</b>"]), size=PHONE)
    shown = page.locator("#strips .prompt").evaluate_all("(prompts) => prompts.map((prompt) => prompt.textContent)")
    assert shown == list(HOSTILE_PROMPTS)
    assert "owned" not in page.title() and page.locator("h1").inner_text() == "<b>name</b>"
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    long = page.locator("#strips .prompt").last
    cut = long.bounding_box()["height"]
    long.click()
    assert long.bounding_box()["height"] > 3 * cut
    long.press("Space")
    assert long.bounding_box()["height"] == cut


def test_missing_and_broken_videos_are_shown_as_such(open_page: OpenPage, tmp_path: Path):
    run = write_run(tmp_path / "run", samples={10: 0.0, 30: 0.5})
    (run / "samples" / "step_10" / "000.mp4").unlink()
    (run / "samples" / "step_10" / "001.mp4").write_bytes(b"not a video" * 100)
    (run / "samples" / "step_30" / "001.mp4").write_bytes(b"")
    page = open_page(report_runs([run], run / "report.html"))
    page.locator("#samples .strip").nth(1).scroll_into_view_if_needed()
    page.get_by_text("Video cannot be played").wait_for()
    texts = page.locator(".no-video").all_inner_texts()
    missing = [f"Video missing samples/step_{name}.mp4" for name in ("10/000", "30/001")]
    told = sorted(" ".join(text.split()) for text in texts)
    assert told == ["Video cannot be played samples/step_10/001.mp4", *missing]


def test_a_run_of_5000_updates_opens_within_three_seconds(open_page: OpenPage, tmp_path: Path):
    run = write_run(tmp_path / "run", num_updates=5000, slope=1e-4)
    for step in range(0, 5001, 500):
        write_scored(run / "samples" / f"step_{step}", ["a red circle"] * 16, [0.1] * 16)
    path = report_runs([run], run / "report.html")
    assert path.stat().st_size < 1_000_000
    for _ in range(3):  # the best of three: other programs may be running
        start = time.monotonic()
        page = open_page(path)
        assert page.locator("#reward .chart g.line path").first.is_visible()
        if (seconds := time.monotonic() - start) < 3:
            break
    assert seconds < 3


def test_four_runs_are_compared_in_colours_of_their_own(open_page: OpenPage, tmp_path: Path):
    samplers = {"sage": 0.02, "dance": 0.01, "flow": 0.0, "cps": -0.01}
    runs = []
    for name, slope in samplers.items():
        settings = ["--sde_type", name if name == "cps" else f"{name}_grpo"]
        samples = {10: 0.0, 30: 30 * slope}
        runs.append(write_run(tmp_path / name, slope=slope, samples=samples, settings=settings))
    shutil.rmtree(runs[3] / "samples")
    for theme in ("light", "dark"):
        page = open_page(report_runs(runs, tmp_path / "comparison.html"), theme=theme)
        chart = page.locator(".chart", has_text="Training reward")
        strokes = "(lines) => lines.map((line) => getComputedStyle(line).stroke)"
        colours = chart.locator("g.line path").evaluate_all(strokes)
        assert len(set(colours)) == 4
        assert chart.locator(".legend li").all_inner_texts() == list(samplers)
    rows = page.locator("table.gains tbody tr")
    assert rows.count() == 4
    assert "+1.60" in rows.nth(0).inner_text() and "the reference" in rows.nth(0).inner_text()
    assert "−0.80" in rows.nth(1).inner_text()  # dance against sage
    assert "not comparable" in rows.nth(3).inner_text()
    assert "are over videos and tell nothing about another training seed" in page.locator("header + main").inner_text()
    differing = page.locator("#settings tr.notable").first.inner_text().split()
    assert differing[:4] == ["rollout.sde_type", "sage_grpo", "dance_grpo", "flow_grpo"]
