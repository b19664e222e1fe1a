"""An evaluation refuses wrong numbers and prompts before it loads a reward."""

from pathlib import Path

import pytest

from scripts import evaluate
from scripts.evaluate import _overall_weights, main


@pytest.mark.parametrize("flag", ["--batch_size", "--num_processes"])
def test_a_number_below_one_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture, flag: str):
    argv = ["--prompts_csv", "none.csv", "--videos", "a", str(tmp_path), "--output_dir", str(tmp_path), flag, "0"]
    assert main(argv) == 2
    assert f"evaluate: {flag} must be at least 1; received 0." in capsys.readouterr().err


@pytest.mark.parametrize(("rows", "told"), [("prompt\n", "no prompts"), ("prompt\nthe only one\n", "has one")])
def test_too_few_prompts_are_refused_before_a_reward_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture, rows: str, told: str
):
    csv = tmp_path / "prompts.csv"
    csv.write_text(rows)
    monkeypatch.setattr(evaluate, "_build_reward", lambda text, arguments: pytest.fail("a reward was loaded"))
    argv = ["--prompts_csv", str(csv), "--videos", "a", str(tmp_path), "--output_dir", str(tmp_path)]
    assert main(argv) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "given", ["[" * 100_000, '{"VQ": ' + "9" * 400 + "}", '{"VQ": 1e999}'], ids=["deep", "long", "inf"]
)
def test_weights_that_are_no_finite_numbers_are_refused(given: str):
    with pytest.raises(ValueError, match="--overall: expected finite weights as JSON"):
        _overall_weights(given, ["VQ"])
