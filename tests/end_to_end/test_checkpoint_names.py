"""`best` and `--ema` in every program that takes a checkpoint: they give the guard's choice and the average."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from generate import main as generate
from hyvideo.checkpoint.train_state import BEST, read_facts
from hyvideo.checkpoint.trained_policy import load_trained_policy
from hyvideo.models.adapter import load_lora, merge_lora
from hyvideo.models.loading import load_transformer
from scripts.evaluate import main as evaluate
from scripts.export import main as export
from tests.support.equal_runs import assert_same
from tests.support.rewards import BRIGHTNESS, GUARDED
from tests.support.training import PROMPTS, arguments, flags_of, training_of, write_prompts

SAMPLING = {"num_inference_steps": 2, "fixed_size": "32x32", "video_length": 5, "guidance_scale": 1.0}


def test_every_program_takes_the_best_checkpoint_and_the_average_by_name(stock_root, tmp_path, capsys):
    """At this learning rate the second update makes the videos worse, so the judge prefers the first."""
    prompts = write_prompts(tmp_path / "prompts.csv", [f"{prompt} {n}" for n in range(2) for prompt in PROMPTS])
    guard = json.dumps({"models": {BRIGHTNESS: {"sub_reward": {"brightness": 1.0}}}})
    settings = GUARDED | {"validate_at_step0": False, "save_interval": 1, "max_steps": 2, "learning_rate": 0.05}
    settings |= {"reward_model": BRIGHTNESS, "reward_weights": '{"brightness": 1.0}', "reward_guard": guard}
    settings |= {"ema_decay": 0.5, "use_lora": True, "lora_r": 2}
    run = arguments(stock_root, prompts, tmp_path / "run", **settings)
    training_of(run).train()
    first, last, best = (tmp_path / "run" / "checkpoints" / name for name in ("step_1", "step_2", BEST))
    assert best.read_text().strip() == first.name and last.is_dir()

    def made(name: str, **flags: Any) -> Path:
        shared = {"model_path": stock_root, "prompt": PROMPTS[0], "seed": 1, "output_path": tmp_path / f"{name}.mp4"}
        assert generate(flags_of(shared | SAMPLING | flags) + ["--ema"] * name.startswith("average")) == 0
        return tmp_path / f"{name}.mp4"

    named, average = made("best", checkpoint_path=best), made("average of the best", checkpoint_path=best)
    assert json.loads(named.with_suffix(".json").read_text())["checkpoint_path"] == str(first)
    assert named.read_bytes() == made("first", checkpoint_path=first).read_bytes()
    for name, path in {"adapter": best, "file": first / "lora" / "pytorch_lora_weights.safetensors"}.items():
        assert named.read_bytes() == made(name, lora_path=path).read_bytes()
    assert average.read_bytes() == made("average", checkpoint_path=first).read_bytes()
    assert len({path.read_bytes() for path in (named, average, made("last", checkpoint_path=last))}) == 3

    output = tmp_path / "evaluated"
    argv = {"prompts_csv": write_prompts(tmp_path / "two.csv", PROMPTS[:2]), "output_dir": output, "seeds": 1}
    entry = ["--model", "average", str(stock_root), str(best), "--ema", "average", "--rewards", "moving_shapes"]
    assert evaluate([*flags_of(argv | SAMPLING), *entry]) == 0
    assert (output / "average" / "0000.mp4").read_bytes() == average.read_bytes()

    for ema in (False, True):
        argv = ["--model_path", str(stock_root), "--checkpoint_path", str(best), *["--ema"] * ema]
        expected = load_transformer(stock_root, dtype=torch.float32)
        load_trained_policy(expected, first, ema=ema)
        assert export([*argv, "--format", "lora", "--output_path", str(tmp_path / f"lora {ema}")]) == 0
        received = load_transformer(stock_root, dtype=torch.float32)
        load_lora(received, tmp_path / f"lora {ema}")
        trained = read_facts(first)["trained"]
        assert_same(*({name: model.state_dict()[name] for name in trained} for model in (received, expected)))
        assert export([*argv, "--format", "diffusers", "--output_path", str(tmp_path / f"merged {ema}")]) == 0
        merge_lora(expected)
        assert_same(load_transformer(tmp_path / f"merged {ema}").state_dict(), expected.state_dict())

    resumed = training_of([*run, "--resume_from_checkpoint", str(best)])
    assert resumed.state.step == 1

    best.write_text("step_7")
    capsys.readouterr()
    argv = ["--model_path", str(stock_root), "--checkpoint_path", str(best), "--output_path"]
    assert generate([*argv, str(tmp_path / "none.mp4"), "--prompt", PROMPTS[0]]) == 2
    assert export([*argv, str(tmp_path / "none"), "--format", "lora"]) == 2
    told = capsys.readouterr().err
    assert told.count("names 'step_7', which is not a finished checkpoint beside it") == 2
    with pytest.raises(ValueError, match="names 'step_7'"):
        training_of([*run, "--resume_from_checkpoint", str(best)])
