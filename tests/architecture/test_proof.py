"""Every recipe says how far it was run, and none says more than its evidence shows."""

import json
from pathlib import Path

import pytest

from scripts.proof import DOCUMENT, Evidence, digest_of, overclaims, table


def test_no_recipe_claims_more_than_its_evidence():
    assert list(overclaims()) == []


def test_the_table_follows_from_the_evidence():
    written = f"<!-- proof -->\n{table()}\n<!-- /proof -->"
    assert written in DOCUMENT.read_text(encoding="utf-8"), "run: python -m scripts.proof"


@pytest.mark.parametrize(
    ("claim", "change", "told"),
    [
        ("rehearsed", {}, None),
        ("checked", {}, None),
        ("run", {}, "configs/one.yaml says run, but its evidence shows it rehearsed: run scripts.proof"),
        ("rehearsed", {"configs": {"configs/one.yaml": "of other settings"}}, "its evidence shows it checked"),
        ("rehearsed", {"configs": {"configs/deleted.yaml": "of a file"}}, "its evidence shows it checked"),
        ("rehearsed", {"numbers": {"surprises": ["update: a value is read back"]}}, "its evidence shows it checked"),
        ("rehearsed", {"numbers": {}}, "its evidence shows it checked"),
        ("proven", {}, "configs/one.yaml must say its level in a line `# Proof: rehearsed`"),
    ],
)
def test_a_claim_is_held_against_evidence_of_these_settings(tmp_path: Path, claim: str, change: dict, told: str | None):
    (tmp_path / "configs").mkdir()
    (tmp_path / "docs" / "proof").mkdir(parents=True)
    config = tmp_path / "configs" / "one.yaml"
    config.write_text(f"# One.\n# Proof: {claim}\nparallel:\n  sp_size: 2\n")
    found = Evidence(
        level=2,
        command="python -m scripts.rehearse --config configs/one.yaml",
        date="2026-11-25",
        commit="1234567",
        configs={"configs/one.yaml": digest_of(config)},
        numbers={"surprises": [], "blocks": 54},
    )
    (tmp_path / "docs" / "proof" / "one.json").write_text(json.dumps(vars(found) | change))
    assert [told in said for said in overclaims(tmp_path)] == ([] if told is None else [True])
