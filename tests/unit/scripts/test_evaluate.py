"""An evaluation refuses numbers that it could not follow, before the first video is made."""

from pathlib import Path

import pytest

from scripts.evaluate import main


@pytest.mark.parametrize("flag", ["--batch_size", "--num_processes"])
def test_a_number_below_one_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture, flag: str):
    argv = ["--prompts_csv", "none.csv", "--videos", "a", str(tmp_path), "--output_dir", str(tmp_path), flag, "0"]
    assert main(argv) == 2
    assert f"evaluate: {flag} must be at least 1; received 0." in capsys.readouterr().err
