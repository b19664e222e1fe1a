"""Every page in the widths of a desk, a tablet and a phone, light and dark: it fits, cuts nothing and is legible."""

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page

from scripts.paper.reproduce import PAPER
from scripts.paper.reproduced import publish
from scripts.reports.gallery import write_gallery, write_study
from scripts.reports.report import report_runs
from tests.support.reproduction import make_measured
from tests.support.run_folders import model_of, write_run

WIDTHS = (1400, 800, 390)
LONG = '{"models": {"moving_shapes": {"weight": %s, "sub_reward": {"VQ": 1.0, "MQ": 1.0, "TA": 1.0}}}}'

FAULTS = """() => {
  const faults = [];
  const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); // contrast as WCAG defines it
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const groundOf = (element) => {
    for (let part = element; part; part = part.parentElement) {
      const [r, g, b, alpha = 1] = parts(getComputedStyle(part).backgroundColor);
      if (alpha === 1) return [r, g, b];
    }
  };
  const contrast = (element, colour) => {
    const [a, b] = [parts(colour).slice(0, 3), groundOf(element)].map(light);
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  const legible = (element, least) => {
    const found = contrast(element, getComputedStyle(element).color);
    if (found < least) faults.push(`contrast ${found.toFixed(1)}: ${element.outerHTML.slice(0, 120)}`);
  };
  if (document.documentElement.scrollWidth > innerWidth) faults.push(`${document.documentElement.scrollWidth} px wide`);
  for (const details of document.querySelectorAll("details")) details.open = true;
  for (const line of document.querySelectorAll("g.line path")) {
    const found = contrast(line, getComputedStyle(line).stroke);
    if (found < 3) faults.push(`contrast ${found.toFixed(1)} of a curve`);
  }
  const first = ".gains tr > :nth-child(-n+3), .verdict .gains tr > *"; // the rest may have to be scrolled to
  for (const part of document.querySelectorAll(`nav a, .facts div, .chart, ${first}`)) {
    if (part.getBoundingClientRect().right > innerWidth) faults.push(`beyond the screen: ${part.innerText}`);
  }
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement, range = document.createRange();
    range.selectNodeContents(texts.currentNode);
    const boxes = [...range.getClientRects()].filter((box) => box.width && box.height);
    if (!boxes.length || !texts.currentNode.data.trim() || element.closest(":disabled, .visually-hidden")) continue;
    const { fontSize, fontWeight } = getComputedStyle(element);
    legible(element, parseFloat(fontSize) >= (fontWeight >= 600 ? 18.6 : 24) ? 3 : 4.5);
    let frame = element;
    while (frame && getComputedStyle(frame).overflowX === "visible") frame = frame.parentElement;
    const scrolls = frame && ["auto", "scroll"].includes(getComputedStyle(frame).overflowX);
    const { left, right } = frame ? frame.getBoundingClientRect() : { left: 0, right: innerWidth };
    const cut = !scrolls && boxes.some((box) => box.left < left - 1 || box.right > right + 1);
    if (cut) faults.push(`cut: ${texts.currentNode.data}`);
  }
  return faults;
}"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    runs = [
        write_run(folder / name, samples={0: 0.0, 30: 30 * slope}, settings=["--reward_config", LONG % slope])
        for name, slope in {"sage": 0.02, "a_name_that_is_rather_long": 0.0}.items()
    ]
    models = [model_of(run) for run in runs]
    write_study(folder / "study", models, num_pairs=2)
    (folder / "reproduction").mkdir()
    values = {"base": 0.0, "sage-dual-b": 0.7, "dance-fixed-b": 0.1, "cps-none-b": 0.5, "cps-plain-b": 0.2}
    measured = [make_measured(folder / "reproduction", row, value) for row, value in values.items()]
    return {
        "report": report_runs(runs[:1], folder / "report.html"),
        "comparison": report_runs(runs, folder / "comparison.html"),
        "gallery": write_gallery(folder / "gallery.html", models),
        "study": folder / "study" / "index.html",
        "reproduction": publish(PAPER, folder / "reproduction", measured, scale="full"),
    }


@pytest.mark.parametrize("name", ["report", "comparison", "gallery", "study", "reproduction"])
def test_a_page_fits_cuts_nothing_and_is_legible(pages: dict[str, Path], open_page: Callable[..., Page], name: str):
    page = open_page(pages[name])

    def look() -> None:
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            for theme in ("light", "dark"):
                page.emulate_media(color_scheme=theme)
                assert page.evaluate(FAULTS) == [], f"{width} px, {theme}"

    look()
    if name == "study":
        page.get_by_label("Your name").fill("Ann")
        page.keyboard.press("Enter")
        look()
