"""The forecast as a program: what it prints and writes, and what it refuses."""

import json
from pathlib import Path

import pytest

from scripts.forecast import main
from tests.support.training import arguments

Capture = pytest.CaptureFixture[str]


def test_a_forecast_is_printed_and_written(tiny_root: Path, prompts_csv: Path, tmp_path: Path, capsys: Capture):
    assert main([*arguments(tiny_root, prompts_csv, tmp_path / "run"), "--num_held_out", "6"]) == 0
    printed = capsys.readouterr().err
    for told in ("best above mean", "noise left in the latents", "  step 3 ", "  0.001 ", "held-out videos, 13 of 13"):
        assert told in printed
    advice = printed.strip().splitlines()[-4:-1]
    assert [line.partition(":")[0] for line in advice][1:] == ["Videos", "Rate"]
    found = json.loads((tmp_path / "run" / "forecast.json").read_text())
    assert [outlook["rate"] for outlook in found["outlooks"]] == pytest.approx([1e-3 / 3, 1e-3, 3e-3])
    assert len(found["held_out"]["base"]) == 6 and found["updates"] == 3 and found["videos"] == 4
    assert not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--num_rounds", "1"], "--num_rounds must be at least 2; received 1"),
        (["--rates", "1e-5", "-1"], "--rates"),
        (["--config", "configs/tiny.yaml", "--etta", "1"], "etta"),
        ([], "a forecast needs held-out prompts: name a CSV with --valid_video_csv"),
        (["--config", "configs/tiny.yaml", "--resume_from_checkpoint", "latest"], "a folder of its own"),
        (
            [
                "--config",
                "configs/tiny.yaml",
                "--output_dir",
                "run",
                "--resume_from_checkpoint",
                "run/checkpoints/step_2",
            ],
            "a folder of its own",
        ),
    ],
)
def test_what_cannot_be_forecast_is_refused(flags: list[str], told: str, capsys: Capture):
    assert main(flags) == 2
    assert told in capsys.readouterr().err
