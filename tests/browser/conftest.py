"""Pages in headless Chromium; without it these tests are skipped."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""The first is Chromium without windows, which takes half the CPU time."""

PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    chromium = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if chromium is None:
        pytest.skip("Chromium is not installed: on Debian `apt-get install chromium-headless-shell`")
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", *quiet])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """A function that opens a file; at the end no page may have logged an error or asked for anything but files.

    It asks for `tmp_path` so that the files outlive the pages, which may still be loading them.
    """
    contexts, errors = [], []

    def open_file(path: Path, *, size: dict = DESKTOP, theme="light", motion="reduce", scripts: bool = True) -> Page:
        settings = {"viewport": size, "color_scheme": theme, "reduced_motion": motion, "java_script_enabled": scripts}
        context = browser.new_context(**settings, accept_downloads=True)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else errors.append(r.url))
        page.goto(path.resolve().as_uri())
        return page

    yield open_file
    for context in contexts:
        context.close()
    assert errors == []
