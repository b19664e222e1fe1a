"""The forecast as a program: what it prints and writes, on ranks too, and what it refuses."""

import json
import math

import pytest

from hyvideo.config.loading import load_config
from hyvideo.evaluation.intervals import Interval
from scripts.forecast.__main__ import advice, main, parse_arguments, write_forecast
from scripts.forecast.measure import Agreement, Forecast, Groups, Outlook
from tests.support.ranks import run_on_ranks
from tests.support.rewards import BRIGHTNESS
from tests.support.training import PROMPTS, arguments, training_of, write_prompts

TINY = ["--config", "configs/tiny.yaml"]


def test_a_forecast_is_printed_and_written(tiny_root, prompts_csv, tmp_path, capsys):
    assert main([*arguments(tiny_root, prompts_csv, tmp_path / "run"), "--num_held_out", "6"]) == 0
    printed = capsys.readouterr().err
    for told in ("best above mean", "noise left in the latents", "  0.001 ", "held-out videos, 13 of 13"):
        assert told in printed
    advice = printed.strip().splitlines()[-4:-1]
    assert [line.partition(":")[0] for line in advice][1:] == ["Videos", "Rate"]
    found = json.loads((tmp_path / "run" / "forecast.json").read_text())
    assert [outlook["rate"] for outlook in found["outlooks"]] == pytest.approx([1e-3 / 3, 1e-3, 3e-3])
    assert len(found["held_out"]["base"]) == 6 and found["updates"] == 3 and found["videos"] == 4
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_a_reward_that_fails_and_an_empty_file_are_said(tiny_root, prompts_csv, tmp_path, capsys):
    failing = write_prompts(tmp_path / "failing.csv", ["raise"])
    reward = {"reward_model": BRIGHTNESS, "reward_weights": '{"brightness": 1.0}'}
    argv = arguments(tiny_root, prompts_csv, tmp_path / "run", **reward)
    assert main([*argv, "--train_video_csv", str(failing)]) == 1
    assert "scripts.forecast: the reward failed: RuntimeError: the reward broke" in capsys.readouterr().err
    (tmp_path / "empty.csv").touch()
    assert main([*argv, "--valid_video_csv", str(tmp_path / "empty.csv")]) == 2
    assert f"{tmp_path / 'empty.csv'}" in capsys.readouterr().err


def test_a_guarded_run_keeps_its_rollbacks_rate_and_a_finished_one_is_refused(tiny_root, prompts_csv, tmp_path, capsys):
    guard = {"reward_guard": json.dumps({"models": {BRIGHTNESS: {"sub_reward": {"brightness": 1.0}}}})}
    guard |= {"reward_guard_action": "stop", "lr_warmup_steps": 0}
    valid = write_prompts(tmp_path / "valid.csv", PROMPTS * 2)
    watched = {"validation_interval": 1, "validation_num_videos": 8, "valid_video_csv": valid}
    training = training_of(arguments(tiny_root, prompts_csv, tmp_path / "run", **guard, **watched))
    training.state.optimization.updates, training.state.optimization.rate_scale = 1, 0.3
    saved = training.state.save(tmp_path / "run" / "checkpoints", keep_last=None)
    argv = arguments(tiny_root, prompts_csv, tmp_path / "found", resume_from_checkpoint=saved, **guard, **watched)
    assert main([*argv, "--num_rounds", "2", "--num_held_out", "2", "--rates", "1e-3"]) == 0
    assert "nothing reads reward_guard" not in capsys.readouterr().err
    (outlook,) = json.loads((tmp_path / "found" / "forecast.json").read_text())["outlooks"]
    assert outlook["length"] == pytest.approx(0.3 * 1e-3 * 2**0.5)
    for tensors in saved.glob("*.safetensors"):
        tensors.unlink()  # they are not read any more
    assert main([*argv, "--max_steps", "1"]) == 2
    assert "the run has made 1 of max_steps 1 updates" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--num_rounds", "0"], "--num_rounds must be even, for two halves of them; received 0"),
        (["--num_rounds", "5"], "--num_rounds must be even, for two halves of them; received 5"),
        (["--num_held_out", "1"], "--num_held_out must be at least 2; received 1"),
        (["--rates", "1e-5", "-1"], "--rates"),
        ([*TINY, "--etta", "1"], "etta"),
        ([], "a forecast needs held-out prompts: name a CSV with --valid_video_csv"),
        ([*TINY, "--resume_from_checkpoint", "latest"], "a folder of its own"),
        ([*TINY, *"--output_dir run --resume_from_checkpoint run/checkpoints/step_2".split()], "a folder of its own"),
    ],
)
def test_what_cannot_be_forecast_is_refused(flags, told, capsys):
    assert main(flags) == 2 and told in capsys.readouterr().err


def a_forecast(**changes: object) -> Forecast:
    gain = Interval(1.0, 0.8, 1.2, 64)
    outlooks = [Outlook(rate, 1e-4, gain, gain, gain) for rate in (1e-5, 3e-5)]
    groups = Groups(1.0, 0.8, changes.pop("dead", 0.0), 1.5)
    shown = {"gradient": Agreement(0.1, 300.0), "noise": (1.05, 0.05), "ode_gap": 0.0, "outlooks": outlooks} | changes
    return Forecast(updates=40, videos=16, base_std=2.0, groups=groups, **shown)


def test_advice_names_what_holds_a_run_back():
    config = load_config([*TINY, "--learning_rate", "1e-5"])
    fine = advice(a_forecast(), config)
    assert "Change nothing here" in fine[0] and "That is enough" in fine[1] and "1e-05 is the best" in fine[2]
    assert "num_generations" in advice(a_forecast(dead=0.5), config)[0]
    assert "eta" in advice(a_forecast(noise=(1.4, 0.3), ode_gap=1.5), config)[0]
    assert "more videos per update" in advice(a_forecast(gradient=Agreement(0.001, 1e4)), config)[1]
    unseen = Agreement(-0.1, math.inf)
    assert "steps along them teach" in advice(a_forecast(gradient=unseen), config)[1]
    outlooks = a_forecast().outlooks
    better = [outlooks[0], Outlook(1e-4, 1e-4, *[Interval(1.4, 1.2, 1.6, 64)] * 3)]
    expected = "Expect +0.70 base std [+0.60, +0.80] instead of +0.50 base std [+0.40, +0.60]."
    assert advice(a_forecast(outlooks=better), config)[2] == f"Rate: use learning_rate 0.0001. {expected}"
    config.optimizer.learning_rate = 3e-6
    told = "[+0.60, +0.80]. The configured 3e-06 was not tried: add it to --rates to compare."
    assert advice(a_forecast(outlooks=better), config)[2].endswith(told)
    unsure = [Outlook(1e-5, 1e-4, *[Interval(0.1, -0.1, 0.3, 64)] * 3)]
    assert "at none of the tried rates is a gain sure" in advice(a_forecast(outlooks=unsure), config)[2]
    assert "Use many more" in advice(a_forecast(gradient=unseen, outlooks=unsure), config)[1]


SMALL = ["--num_held_out", "6", "--rates", "1e-3"]
SETUPS = {"dp": {"batch_size": 2}, "sharded, sp": {"sp_size": 2, "enable_fsdp": True}}


def forecast_all(runs: list[list[str]]) -> None:
    for argv in runs:
        write_forecast(*parse_arguments(argv))


def test_two_ranks_forecast_what_one_does(root_of_four_heads, prompts_csv, tmp_path):
    alone, *runs = (
        [*arguments(root_of_four_heads, prompts_csv, tmp_path / name, **setup), *SMALL]
        for name, setup in {"alone": {}, **SETUPS}.items()
    )
    run_on_ranks(1, forecast_all, [alone])
    run_on_ranks(2, forecast_all, runs)
    expected, *others = (json.loads((tmp_path / name / "forecast.json").read_text()) for name in ("alone", *SETUPS))
    for found in others:
        assert found["gradient"]["correlation"] == pytest.approx(expected["gradient"]["correlation"], abs=1e-3)
        assert found["groups"] == pytest.approx(expected["groups"], rel=1e-2, abs=1e-3)
        assert found["held_out"]["base"] == pytest.approx(expected["held_out"]["base"], abs=0.02)
