"""A study writes picture, raw numbers and its part of the document, and nothing else of it."""

import json
import math

from matplotlib.figure import Figure

from scripts.paper.study import HOLDS, OPEN, Claim, Study, claims_table
from scripts.reports.markdown import replace_part

STUDY = Study(
    "colours",
    "Colours",
    draw=lambda found: Figure(),
    describe=lambda found: f"Seen: {found['seen']}.",
    claims=lambda found: [Claim("red is seen", HOLDS if found["seen"] else OPEN, f"{found['seen']} times")],
)


def test_publishing_writes_everything_and_again_replaces_it(tmp_path):
    (tmp_path / "claims.md").write_text("By hand.\n\n<!-- table -->\n<!-- /table -->\n\nBetween.\n")
    for seen in (1, 2):
        STUDY.publish({"seen": seen}, tmp_path)
    text = (tmp_path / "claims.md").read_text()
    assert text.startswith("By hand.") and "Between." in text
    assert "Seen: 2." in text and "Seen: 1." not in text
    assert text.count("| [red is seen](#colours) | **holds** | 2 times |") == 1
    assert sorted(path.name for path in (tmp_path / "claims").iterdir()) == ["colours.json", "colours.png"]


def test_what_was_published_can_be_described_again_from_its_json(tmp_path):
    STUDY.publish({"seen": 3, "odd": [math.nan, 1 / 3]}, tmp_path)
    found = json.loads((tmp_path / "claims/colours.json").read_text())
    section = STUDY.section(found)
    assert section in (tmp_path / "claims.md").read_text() and section.startswith('<a id="colours"></a>')
    assert "`python -m scripts.paper.colours`" in section and "(claims/colours.json)" in section
    assert found["odd"] == [None, 0.333333]


def test_the_table_has_the_claims_of_every_study_and_backslashes_in_a_part_stay_as_they_are(tmp_path):
    for name in ("b", "a"):
        claims = [{"text": f"claim of {name}", "verdict": OPEN, "evidence": "none"}]
        (tmp_path / f"{name}.json").write_text(json.dumps({"claims": claims}))
    rows = [line.split(" | ")[0] for line in claims_table(tmp_path).splitlines()[2:]]
    assert rows == ["| [claim of a](#a)", "| [claim of b](#b)"]
    before = "<!-- a -->\nold\n<!-- /a -->"
    assert replace_part(before, "a", r"\1 \n") == "<!-- a -->\n\\1 \\n\n<!-- /a -->"
