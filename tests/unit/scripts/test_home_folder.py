"""Every command finds `~`, which a shell leaves as it is within quotes and after an equals sign."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import generate
from hyvideo.models.reward_models.registry import RewardContext
from scripts import check_weights, evaluate, export, make_checks, plan, report, serve_reward
from scripts.forecast import __main__ as forecast
from scripts.paper import reproduce
from scripts.tiny import evaluate as tiny_evaluate
from scripts.tiny import prove_learning

HOME = "/home/ann"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", HOME)


def values_in(parsed: Any) -> list[str]:
    """Every text in what a command line became."""
    if isinstance(parsed, (list, tuple)):
        return [text for one in parsed for text in values_in(one)]
    return (
        values_in([*vars(parsed).values()]) if hasattr(parsed, "__dict__") and not callable(parsed) else [str(parsed)]
    )


COMMANDS: dict[str, tuple[Callable, str]] = {
    "evaluate": (
        evaluate.parse_arguments,
        "--prompts_csv ~/p.csv --model a ~/ckpts ~/step_1 --videos b ~/videos --model_root ~/ckpts --output_dir=~/out",
    ),
    "export": (
        export.parse_arguments,
        "--model_path ~/ckpts --checkpoint_path ~/step_1 --format lora --output_path ~/out",
    ),
    "serve_reward": (serve_reward.parse_arguments, "--reward clip_score --model_root ~/ckpts"),
    "plan": (plan.parse_arguments, "--world_size 8 --json ~/plan.json --pretrained_model_root ~/ckpts"),
    "make_checks": (make_checks.parse_arguments, "--validate ~/checks.csv"),
    "forecast": (forecast.parse_arguments, "--valid_video_csv ~/v.csv --output_dir=~/run"),
}


@pytest.mark.parametrize(("parse", "line"), COMMANDS.values(), ids=COMMANDS)
def test_a_commands_paths_lie_in_the_home_folder(parse: Callable, line: str):
    found = values_in(parse(line.split()))
    assert not any("~" in text for text in found)
    for word in line.split():
        if "~" in word:
            assert any(HOME + word.partition("~")[2] in text for text in found), word


def told_by(main: Callable, line: str, capsys: pytest.CaptureFixture) -> str:
    assert main(line.split()) == 2
    return capsys.readouterr().err


def test_what_is_missing_in_the_home_folder_is_named_with_its_whole_path(capsys: pytest.CaptureFixture):
    for main, line in (
        (generate.main, "--model_path ~/ckpts --prompt x --output_path ~/o.mp4"),
        (check_weights.main, "--model_path=~/ckpts"),
        (report.main, "ours=~/ckpts"),
        (report.main, "~/ckpts"),
        (report.main, "gallery ours=~/ckpts"),
        (report.main, "winrates ~/ckpts ~/ckpts"),
        (tiny_evaluate.main, "--model_path ~/ckpts"),
    ):
        told = told_by(main, line, capsys)
        assert f"{HOME}/ckpts" in told and "~" not in told, (line, told)


def test_the_options_of_a_served_reward_may_lie_in_the_home_folder():
    with pytest.raises(ValueError, match=f"'{HOME}/clip'"):
        serve_reward.read_reward('clip_score={"checkpoint": "~/clip"}', RewardContext())


def test_a_prompt_that_speaks_of_a_tilde_stays_as_it_is(tmp_path: Path):
    argv = ["--model_path", "assets/tiny", "--output_path", str(tmp_path / "o.mp4"), "--prompt"]
    for prompt in ("~ a wave", "a = ~/b", "x~", "~~~", "~/x art", "~"):
        assert generate.parse_arguments([*argv[:-1], f"--prompt={prompt}"]).prompt == prompt
        assert generate.parse_arguments([*argv, prompt]).prompt == prompt


def test_the_tiny_models_commands_and_the_studies_find_it_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    arguments, _ = reproduce.parse_arguments(["--scale", "tiny", "--output_dir", "~/r", "--config", "~/c.yaml"])
    assert (arguments.output_dir, arguments.config) == (tmp_path / "r", [str(tmp_path / "c.yaml")])
    monkeypatch.setattr(sys, "argv", ["build", "--export_only", "--work", "~/w", "--assets=~/a"])
    with pytest.raises(OSError, match=str(tmp_path / "w" / "transformer")):
        runpy.run_path("scripts/tiny/build.py", run_name="__main__")
    assert (tmp_path / "a" / "prompts" / "valid.csv").is_file()
    asked = []
    monkeypatch.setattr(prove_learning, "_train_and_compare", lambda folder, *_: asked.append(folder))
    monkeypatch.setattr(prove_learning, "_found", lambda folder: ({}, prove_learning.Drift({}, {"dark": (0.0, 0.0)})))
    monkeypatch.setattr(prove_learning.Drift, "__str__", lambda self: "")
    monkeypatch.setattr(prove_learning, "_print_mean", lambda folders, kind: None)
    assert prove_learning.main(["--output_dir", "~/proof", "--seeds", "1", "--kinds", "true"]) == 0
    assert asked == [tmp_path / "proof" / "true-1"]
