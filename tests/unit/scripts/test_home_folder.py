"""Every command finds `~`, which a shell leaves as it is within quotes and after an equals sign."""

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

HOME = "/home/ann"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", HOME)


def values_in(parsed: Any) -> list[str]:
    if isinstance(parsed, (list, tuple)):
        return [text for one in parsed for text in values_in(one)]
    named = hasattr(parsed, "__dict__") and not callable(parsed)
    return values_in([*vars(parsed).values()]) if named else [str(parsed)]


MODELS = "--model a ~/ckpts ~/step_1 --videos b ~/videos --model_root ~/ckpts"
EXPORT = "--model_path ~/ckpts --checkpoint_path ~/step_1 --format lora --output_path ~/out"
COMMANDS: dict[str, tuple[Callable, str]] = {
    "evaluate": (evaluate.parse_arguments, f"--prompts_csv ~/p.csv {MODELS} --output_dir=~/out"),
    "export": (export.parse_arguments, EXPORT),
    "serve_reward": (serve_reward.parse_arguments, "--reward clip_score --model_root ~/ckpts"),
    "plan": (plan.parse_arguments, "--world_size 8 --json ~/plan.json --pretrained_model_root ~/ckpts"),
    "make_checks": (make_checks.parse_arguments, "--validate ~/checks.csv"),
    "forecast": (forecast.parse_arguments, "--valid_video_csv ~/v.csv --output_dir=~/run"),
    "reproduce": (reproduce.parse_arguments, "--scale tiny --output_dir ~/r --config ~/c.yaml"),
}


@pytest.mark.parametrize(("parse", "line"), COMMANDS.values(), ids=COMMANDS)
def test_a_commands_paths_lie_in_the_home_folder(parse: Callable, line: str):
    found = values_in(parse(line.split()))
    assert not any("~" in text for text in found)
    for word in line.split():
        if "~" in word:
            assert any(HOME + word.partition("~")[2] in text for text in found), word


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
        assert main(line.split()) == 2
        told = capsys.readouterr().err
        assert f"{HOME}/ckpts" in told and "~" not in told, (line, told)


def test_the_options_of_a_served_reward_may_lie_in_the_home_folder():
    with pytest.raises(ValueError, match=f"'{HOME}/clip'"):
        serve_reward.read_reward('clip_score={"checkpoint": "~/clip"}', RewardContext())


def test_a_prompt_that_speaks_of_a_tilde_stays_as_it_is(tmp_path: Path):
    argv = ["--model_path", "assets/tiny", "--output_path", str(tmp_path / "o.mp4"), "--prompt"]
    for prompt in ("~ a wave", "a = ~/b", "x~", "~~~", "~/x art", "~"):
        assert generate.parse_arguments([*argv[:-1], f"--prompt={prompt}"]).prompt == prompt
        assert generate.parse_arguments([*argv, prompt]).prompt == prompt
