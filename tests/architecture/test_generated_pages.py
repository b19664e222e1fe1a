"""Pages that commands write say what the committed numbers say now."""

import importlib
import json
import re

import pytest

from scripts.paper.study import DOCS, DOCUMENT, claims_table

FOLDER = DOCS / "claims"
SCRIPTS = (DOCS.parent / "scripts/paper").glob("*.py")
STUDIES = sorted(path.stem for path in SCRIPTS if "\nSTUDY = " in path.read_text(encoding="utf-8"))


def part(name: str) -> str:
    """What stands between a study's marks in the document."""
    text = (DOCS / DOCUMENT).read_text(encoding="utf-8")
    found = re.findall(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", text, re.DOTALL)
    assert len(found) == 1, f"{DOCUMENT} has {len(found)} parts <!-- {name} -->"
    return found[0]


@pytest.mark.parametrize("name", STUDIES)
def test_every_section_of_the_claims_follows_from_its_raw_numbers(name):
    study = importlib.import_module(f"scripts.paper.{name}").STUDY
    assert study.name == name
    assert part(name) == study.section(json.loads((FOLDER / f"{name}.json").read_text()))


def test_the_table_of_claims_follows_from_the_raw_numbers_which_are_small_as_the_pictures_are():
    assert part("table") == claims_table(FOLDER)
    files = [*FOLDER.glob("*.json"), *FOLDER.glob("*.png")]
    assert {path.stem for path in files} >= set(STUDIES)
    assert [file.name for file in files if file.stat().st_size >= 150_000] == []
