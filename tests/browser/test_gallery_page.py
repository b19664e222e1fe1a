"""The gallery and the preference study in a browser."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from playwright.sync_api import ElementHandle, Page

from hyvideo.data.videos import write_video
from scripts.reports.gallery import Model, write_gallery, write_study
from scripts.reports.win_rates import CRITERIA, read_votes, win_rates
from tests.browser.conftest import PHONE
from tests.support.run_folders import HOSTILE_PROMPTS, PROMPTS, model_of, write_scored

OpenPage = Callable[..., Page]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Model]:
    folder = tmp_path_factory.mktemp("models")
    return [model_of(write_scored(folder / name, PROMPTS, [0.1] * 8)) for name in ("base", "trained")]


@pytest.fixture(scope="module")
def gallery(models: list[Model]) -> Path:
    return write_gallery(models[0].videos[0].path.parents[1] / "gallery.html", models)


def wait_for_data(page: Page, *videos: ElementHandle) -> None:
    page.wait_for_function("(videos) => videos.every((video) => video.readyState > 1)", arg=list(videos))


def seek(page: Page, place: float) -> None:
    move = "(seek, place) => { seek.value = place; seek.dispatchEvent(new Event('input')); }"
    page.locator("#seek").evaluate(move, place)


def test_videos_of_a_row_play_together(gallery: Path, open_page: OpenPage):
    page = open_page(gallery)
    page.keyboard.press("Space")
    row = page.locator(".gallery .strip").first
    plays = "(row) => [...row.querySelectorAll('video')].every((video) => video.currentTime > 0.05 && !video.paused)"
    page.wait_for_function(plays, arg=row.element_handle())
    seek(page, 500)
    times = row.locator("video").evaluate_all("(videos) => videos.map((video) => video.currentTime / video.duration)")
    assert times == pytest.approx([0.5, 0.5], abs=0.02)
    assert row.locator("video").evaluate_all("(videos) => videos.every((video) => video.paused)")


@pytest.fixture(scope="module")
def tall(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tall")
    prompts = [f"prompt {number}" for number in range(60)]
    models = [model_of(write_scored(folder / name, prompts, [0.1] * 60)) for name in ("base", "trained")]
    return write_gallery(folder / "gallery.html", models)


def test_videos_far_from_the_screen_give_their_player_back_and_return_where_the_others_are(tall, open_page):
    page = open_page(tall)
    first = page.locator("video").first.element_handle()
    wait_for_data(page, first)
    loaded = []
    for row in range(0, 60, 3):
        shown = page.locator(".strip").nth(row)
        shown.scroll_into_view_if_needed()
        wait_for_data(page, *shown.locator("video").element_handles())
        loaded.append(page.evaluate("[...document.querySelectorAll('video')].filter((v) => v.readyState > 0).length"))
    assert max(loaded) < 40
    page.wait_for_function("(first) => first.readyState === 0", arg=first)
    seek(page, 500)
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_function("(first) => Math.abs(first.currentTime / first.duration - 0.5) < 0.02", arg=first)
    assert first.evaluate("(first) => first.paused")
    page.keyboard.press("Space")
    page.wait_for_function("(first) => !first.paused && first.currentTime / first.duration > 0.55", arg=first)
    assert page.locator(".no-video").count() == 0


def test_a_video_that_returns_follows_its_row(tall: Path, open_page: OpenPage):
    page = open_page(tall)
    row = page.locator(".strip").first
    first, second = (row.locator("video").nth(number).element_handle() for number in (0, 1))
    wait_for_data(page, second, first)
    # At once: between two calls the first video, at its start, could lead the second one back.
    reload = """([first, second]) => {
        place = 0; second.currentTime = 0.4 * second.duration;
        const source = first.src; first.removeAttribute('src'); first.load(); first.src = source;
    }"""
    page.evaluate(reload, [first, second])
    page.wait_for_function("(first) => Math.abs(first.currentTime / first.duration - 0.4) < 0.02", arg=first)
    assert second.evaluate("(video) => video.currentTime / video.duration") == pytest.approx(0.4, abs=0.02)


def test_keys_play_and_pause_all_whatever_was_clicked_before(gallery: Path, open_page: OpenPage):
    page = open_page(gallery)
    video = page.locator("video").first
    wait_for_data(page, video.element_handle())
    video.click()
    assert page.evaluate("playing")
    page.keyboard.press("Space")
    assert not page.evaluate("playing")
    page.locator("#play").click()
    page.keyboard.press(",")
    assert not page.evaluate("playing")
    page.locator("#seek").click()
    page.keyboard.press("r")
    assert video.evaluate("(video) => video.currentTime") == 0


def test_a_shorter_video_repeats_instead_of_standing_at_its_end(open_page: OpenPage, tmp_path: Path):
    models = [model_of(write_scored(tmp_path / name, ["a"], [0.0])) for name in ("base", "trained")]
    write_video(models[0].videos[0].path, torch.zeros(15, 16, 16, 3, dtype=torch.uint8), fps=24)
    page = open_page(write_gallery(tmp_path / "gallery.html", models))
    long, short = (page.locator("video").nth(number).element_handle() for number in (0, 1))
    wait_for_data(page, long, short)
    place = page.evaluate("([long, short]) => 1250 * short.duration / long.duration", [long, short])
    seek(page, place)
    page.wait_for_function("(short) => Math.abs(short.currentTime / short.duration - 0.25) < 0.02", arg=short)


def test_a_gallery_is_searched_by_words_of_the_prompt(gallery: Path, open_page: OpenPage):
    page = open_page(gallery, size=PHONE)
    page.locator("#find").fill("GREEN")
    assert page.locator(".gallery .strip:visible").count() == 4
    page.locator("#find").fill("purple")
    assert page.get_by_text("No prompt has these words").is_visible()


def test_a_gallery_of_scored_videos_is_ordered_by_what_the_last_model_gained(open_page: OpenPage, tmp_path: Path):
    prompts, scores = ["a", "b", "c"], {"base": [0.0, 0.0, 5.0], "trained": [1.0, 3.0, 4.0]}
    models = [model_of(write_scored(tmp_path / name, prompts, of_model)) for name, of_model in scores.items()]
    page = open_page(write_gallery(tmp_path / "gallery.html", models))
    found = {}
    for order in ("best", "worst", "index"):
        page.locator("#order").select_option(order)
        found[order] = "".join(page.locator(".gallery .prompt").all_inner_texts())
    assert found == {"best": "bac", "worst": "cab", "index": "abc"}
    failed = model_of(write_scored(tmp_path / "failed", prompts, [1.0, None, 2.0]))
    assert open_page(write_gallery(tmp_path / "other.html", [models[0], failed])).locator("#order").count() == 0


def start_study(page: Page, rater: str = "Ann") -> None:
    page.get_by_label("Your name").fill(rater)
    page.keyboard.press("Enter")


def answers(page: Page) -> list[str]:
    return page.locator("[aria-pressed=true]").all_inner_texts()


def vote(page: Page, keys: list[str]) -> None:
    for key in keys:
        page.keyboard.press(key)
    page.keyboard.press("Enter")


def shown_sides(page: Page) -> list[str]:
    sources = page.locator(".pair video").evaluate_all("(videos) => videos.map((video) => video.src)")
    return [source.rpartition("/")[2].removesuffix(".mp4") for source in sources]


def save_votes(page: Page, path: Path) -> Path:
    with page.expect_download() as download:
        page.locator("#save:visible, #save-done:visible").click()
    download.value.save_as(path)
    return path


def test_win_rates_over_twenty_pairs_come_out_as_two_raters_voted(open_page: OpenPage, tmp_path: Path):
    prompts = [f"prompt {number}" for number in range(20)]
    folders = [write_scored(tmp_path / name, prompts, [0.0] * 20) for name in ("base", "trained")]
    key_path = write_study(tmp_path / "study", [model_of(folder) for folder in folders])
    key = json.loads(key_path.read_text())
    number_of = {name: number for number, name in enumerate(key["pairs"])}
    pair_of = {frozenset(videos): name for name, videos in key["pairs"].items()}
    files, lefts = [], []
    for rater, num_wins in (("Ann", 15), ("Bo <b>", 10)):
        page = open_page(tmp_path / "study" / "index.html")
        start_study(page, rater)
        for _ in prompts:
            sides = shown_sides(page)
            lefts.append(key["models"][sides[0]])
            wanted = "trained" if number_of[pair_of[frozenset(sides)]] < num_wins else "base"
            arrow = "ArrowLeft" if key["models"][sides[0]] == wanted else "ArrowRight"
            vote(page, [arrow, "ArrowDown", arrow])
        assert "You judged 20 of 20 pairs" in page.locator("#done").inner_text()
        files.append(save_votes(page, tmp_path / f"{len(files)}.json"))
    assert 10 < lefts.count("base") < 30  # sides are shuffled
    rates = {rate.criterion: rate for rate in win_rates(key_path, read_votes(files))}
    visual, motion = rates["visual_quality"], rates["motion_quality"]
    assert (visual.first, visual.second, visual.num_pairs, visual.num_raters) == ("base", "trained", 20, 2)
    assert (visual.wins, visual.ties, visual.losses) == (15, 0, 25)
    assert visual.rate == pytest.approx(15 / 40) and visual.low < 0.375 < visual.high
    assert (motion.wins, motion.ties, motion.losses, motion.rate) == (0, 40, 0, 0.5)
    assert rates["semantic_alignment"].rate == visual.rate


def test_a_study_hides_names_keeps_votes_over_a_reload_and_shows_hostile_prompts(open_page: OpenPage, tmp_path: Path):
    folders = [write_scored(tmp_path / name, HOSTILE_PROMPTS, [0.0] * 5) for name in ("secret_base", "secret_trained")]
    write_study(tmp_path / "study", [model_of(folder) for folder in folders])
    assert "secret_" not in (tmp_path / "study" / "index.html").read_text()
    page = open_page(tmp_path / "study" / "index.html", size=PHONE)
    seen = []
    for _ in range(2):
        start_study(page)
        seen.append(page.locator("#prompt").text_content())
        if len(seen) == 1:
            vote(page, ["ArrowLeft"] * len(CRITERIA))
            page.reload()
    assert seen[0] in HOSTILE_PROMPTS and seen[1] in HOSTILE_PROMPTS and seen[0] != seen[1]
    assert "owned" not in page.title()
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    page.keyboard.press("Backspace")
    assert page.locator("#prompt").text_content() == seen[0]
    assert answers(page) == ["Left"] * 3


@pytest.fixture
def study(models: list[Model], tmp_path: Path) -> Path:
    write_study(tmp_path / "study", models)
    return tmp_path / "study" / "index.html"


def test_a_pair_has_its_size_and_pictures_before_it_is_loaded(study: Path, open_page: OpenPage):
    places = """() => [...document.querySelectorAll(".pair video, #questions")]
        .map((part) => part.getBoundingClientRect().bottom)"""
    page = open_page(study)
    page.evaluate("""() => {  // nothing is loaded
        Object.defineProperty(HTMLMediaElement.prototype, "src", { set() {} });
        Object.defineProperty(HTMLVideoElement.prototype, "poster", { set(url) { this.dataset.url = url; } });
    }""")
    start_study(page)
    posters = page.locator(".pair video").evaluate_all("(videos) => videos.map((video) => video.dataset.url)")
    assert all((study.parent / poster).is_file() for poster in posters)
    unloaded = page.evaluate(places)
    page = open_page(study)
    start_study(page)
    page.wait_for_function("() => [...document.querySelectorAll('.pair video')].every((v) => v.readyState > 1)")
    assert page.evaluate(places) == unloaded


def test_keys_do_not_press_the_button_that_the_mouse_pressed_last(study: Path, open_page: OpenPage):
    page = open_page(study)
    start_study(page)
    vote(page, ["ArrowRight"] * len(CRITERIA))
    page.locator(".question").last.get_by_text("Left").click()
    page.keyboard.press("Backspace")
    page.keyboard.press("Enter")
    assert "Pair 2" in page.locator("#count").inner_text() and answers(page) == ["Left"]
    page.locator("#previous").click()
    page.keyboard.press(" ")
    assert "Pair 1" in page.locator("#count").inner_text() and answers(page) == ["Right"] * 3
    button = page.locator(".question").last.get_by_text("Left")
    button.focus()
    page.keyboard.press("Enter")
    assert answers(page) == ["Right", "Right", "Left"]


def test_votes_of_two_tabs_are_kept_together(study: Path, open_page: OpenPage, tmp_path: Path):
    old = open_page(study)
    start_study(old)
    new = old.context.new_page()
    new.goto(study.as_uri())
    start_study(new)
    vote(new, ["ArrowLeft"] * len(CRITERIA))
    new.keyboard.press("ArrowRight")
    new.close()
    old.keyboard.press("ArrowDown")
    votes = json.loads(save_votes(old, tmp_path / "votes.json").read_text())["votes"]
    assert len(votes) == len(CRITERIA) + 1 and [vote["choice"] for vote in votes].count("tie") == 1


FULL = "Storage.prototype.setItem = () => { throw new DOMException('full'); }"
BLOCKED = "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('blocked'); } })"


@pytest.mark.parametrize("storage", [FULL, BLOCKED], ids=["full", "blocked"])
def test_a_browser_that_keeps_no_votes_warns_at_once_and_offers_them_as_a_file(study, open_page, storage):
    page = open_page(study)
    page.evaluate(f"void ({storage})")
    assert not page.get_by_role("alert").is_visible()
    start_study(page)
    assert "does not keep your votes" in page.get_by_role("alert").inner_text()
    for _ in range(3):
        page.keyboard.down("ArrowLeft")  # a key that is held down answers once
    assert answers(page) == ["Left"]
    with page.expect_download() as download:
        page.get_by_text("Save votes now").click()
    assert [vote["count"] for vote in json.loads(download.value.path().read_text())["votes"]] == [1]
