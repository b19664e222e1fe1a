"""What generate.py is asked for is checked, and shared among processes, before any weight is read."""

import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from generate import parse_arguments
from hyvideo.evaluation.generate import Request, request_of
from hyvideo.evaluation.original_command import NOT_HERE
from tests.support.release import SAMPLING
from tests.support.training import PROMPTS, noisy_image, write_prompts


@pytest.fixture
def ask(original_root: Path, tmp_path: Path) -> Callable[..., Request]:
    """Check a command line; keywords are flags."""

    def make(**flags: Any) -> Request:
        chosen = {"model_path": original_root, "output_path": tmp_path / "video.mp4", **flags}
        argv = [f"--{name}" if value is True else f"--{name}={value}" for name, value in chosen.items()]
        return request_of(parse_arguments(argv))

    return make


def test_settings_are_those_of_the_version_but_for_what_is_given(ask: Callable[..., Request], tmp_path: Path):
    noisy_image(0).save(tmp_path / "image.png")
    image = {"prompt": "a cat", "image_path": tmp_path / "image.png"}
    made = ask(**image, transformer_version="480p_i2v_step_distilled", shift=3)
    assert made.settings["num_inference_steps"] == 12
    assert (made.settings["guidance_scale"], made.settings["shift"]) == (1.0, 3.0)
    assert ask(**image, transformer_version="480p_i2v").settings["guidance_scale"] == 6.0


def test_the_releases_sampling_command_is_taken_as_it_stands(original_root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "assets").mkdir()
    write_prompts(tmp_path / "assets" / "demo_sample.csv", PROMPTS)
    made = request_of(parse_arguments(shlex.split(SAMPLING.replace("MODEL", str(original_root)))))
    assert [(job.prompt.text, job.seed) for job in made.jobs] == [(prompt, 930) for prompt in PROMPTS]
    assert made.arguments.transformer_version == "480p_t2v" and not made.arguments.offload
    assert (made.settings["fixed_size"], made.settings["num_inference_steps"]) == ("480x864", 40)
    assert capsys.readouterr().err == ""


def test_settings_of_training_are_known_by_name_and_weights_in_ckpts_need_none(original_root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ckpts").symlink_to(original_root)
    command = "--prompt cat --output_path cat.mp4 --pretrained_transformer_version 480p_t2v --cfg_scale=2 "
    command += "--video_fps 12 --sample_n_frames 5 --rollout_size 64x96 --grpo_sampling_steps 3 "
    command += "--infer_flow_shift_video 4"
    made = request_of(parse_arguments(command.split()))
    expected = {"guidance_scale": 2.0, "video_length": 5, "fixed_size": "64x96", "num_inference_steps": 3, "shift": 4.0}
    assert made.settings == expected and made.arguments.fps == 12


def test_without_its_csv_the_releases_command_makes_its_prompts_video(original_root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = shlex.split(SAMPLING.replace("MODEL", str(original_root)))
    (job,) = request_of(parse_arguments(command)).jobs
    assert (job.prompt.text, job.seed) == ('A girl holding a paper with words "Hello, world!"', 930)
    assert job.path == Path("outputs/output_samples_864x480_step40_shift5_gs1_seed930.mp4")
    skipped, written = capsys.readouterr().err.splitlines()
    assert "no file 'assets/demo_sample.csv'" in skipped and "assets/prompts/valid.csv" in skipped
    assert str(job.path) in written

    output = command.index("--output_path")
    (job,) = request_of(parse_arguments(command[:output] + command[output + 2 :])).jobs
    assert re.fullmatch(r"outputs/output_480p_t2v_\d{4}(-\d\d){2}_\d\d(-\d\d){2}\.mp4", str(job.path))
    with pytest.raises(ValueError, match="give --output_path: FILE.mp4, or a folder"):
        request_of(parse_arguments(["--model_path", str(original_root), "--prompt", "a cat"]))


def test_the_releases_form_has_its_seed_and_says_what_is_not_here(ask, capsys):
    release = {"prompt": "a cat", "resolution": "480p", "valid_video_csv": "no.csv"}
    theirs = {"enable_cache": True, "enable_torch_compile": True, "use_sageattn": "off", "use_fp8_gemm": True}
    made = ask(**release, **theirs, dtype="fp32", image_path="none")
    assert [(job.prompt.text, job.seed) for job in made.jobs] == [("a cat", 930)]
    assert (made.arguments.cache, made.arguments.compile, made.arguments.attention_backend) == (0.1, True, None)
    expected = ["--use_fp8_gemm has no effect: a GPU computes", "--dtype has no effect: a GPU computes in bfloat16"]
    expected += ["The release sharpens videos by default (super", "--valid_video_csv: there is no file 'no.csv'"]
    for line, start in zip(capsys.readouterr().err.splitlines(), expected, strict=True):
        assert line.startswith(f"generate.py: {start}")
    with pytest.raises(ValueError, match="720p_t2v_distilled"):
        ask(prompt="a cat", resolution="720p", cfg_distilled=True, sr=0)
    for name, advice in NOT_HERE.items():
        with pytest.raises(ValueError, match=f"--{name} is not here. {advice}"):
            ask(**release, **{name: True})


def test_processes_share_the_videos_and_those_that_make_one_together_have_one_that_writes(ask, tmp_path, monkeypatch):
    csv = write_prompts(tmp_path / "prompts.csv", PROMPTS)
    flags = {"prompts_csv": csv, "output_path": tmp_path / "videos", "transformer_version": "480p_t2v"}
    everything = ask(**flags).jobs

    def asked_by_each(world_size: int, sp_size: int) -> Iterator[Request]:
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        for rank in range(world_size):
            monkeypatch.setenv("RANK", str(rank))
            yield ask(**flags, sp_size=sp_size)

    shares = [made.jobs for made in asked_by_each(3, 1)]
    assert sorted((job for share in shares for job in share), key=lambda job: job.path) == everything
    assert [len(share) for share in shares] == [1, 1, 2]
    first, second, third, fourth = asked_by_each(4, 2)
    assert first.jobs == second.jobs != third.jobs == fourth.jobs
    assert [made.writes for made in (first, second, third, fourth)] == [True, False, True, False]
    with pytest.raises(ValueError, match="world size 3 is not divisible by sp_size 2"):
        next(asked_by_each(3, 2))


BAD = {
    "wrong version": ({"transformer_version": "720p_t2v"}, "received '720p_t2v', .* holds 480p_i2v"),
    "no version": ({}, "none was named, .* holds 480p_i2v"),
    "no image": ({"transformer_version": "480p_i2v"}, "image-to-video model was given 1 of 1 prompts without an image"),
    "damaged image": ({"transformer_version": "480p_i2v", "image_path": __file__}, "image '.*' cannot be read"),
}
OF_T2V = {
    "a prompt that is no text": ({"prompt": "caf\udce9"}, "'utf-8' codec can't encode"),
    "a negative prompt that is no text": ({"negative_prompt": "caf\udce9"}, "'utf-8' codec can't encode"),
    "image for a t2v version": ({"image_path": __file__}, "text-to-video model was given 1 of 1 prompts with an image"),
    "missing checkpoint": ({"checkpoint_path": "nowhere"}, "'nowhere' is not a"),
    "missing adapter": ({"lora_path": "nowhere"}, "lora path: there is nothing at 'nowhere'"),
    "adapter of an unset variable": ({"lora_path": ""}, "--lora_path is empty: leave it out to take the base model"),
    "two names": ({"cfg_scale": 1, "guidance_scale": 6}, "--cfg_scale and --guidance_scale are one flag here: keep"),
    "two shares": ({"enable_cache": "true", "cache": 0.5}, "--enable_cache means --cache 0.1, but --cache is 0.5"),
    "a share for a switch": ({"enable_cache": "0.3"}, "--enable_cache: expected true or false; received '0.3'"),
    "too few processes": ({"sp_size": 2}, "world size 1 is not divisible by sp_size 2"),
    "offload without a GPU": ({"offload": True}, "--offload moves networks between GPU and host memory"),
    "frames": ({"video_length": 10}, "must have 4 n \\+ 1 frames.*received 10 frames.*take 9 or 13"),
    "few frames": ({"video_length": 2}, "received 2 frames of 480x848: take 1 or 5 frames"),
    "no size": ({"fixed_size": "wide"}, "a size is HEIGHTxWIDTH in pixels"),
    "no frames": ({"video_length": -3}, r"--video_length must be a number in \[1, inf\); received -3"),
    "sides": ({"fixed_size": "63x65"}, "multiples of 16 pixels; received 81 frames of 63x65"),
    "ratio": ({"aspect_ratio": "0:9"}, "--aspect_ratio is WIDTH:HEIGHT in positive whole numbers.*received '0:9'"),
    "eta": ({"eta": "nan", "sde_type": "sage_grpo"}, r"--eta must be a number in \[0, inf\); received nan"),
    "angle": ({"eta": 1.5, "sde_type": "cps"}, "--eta must be at most 1 for cps; received 1.5"),
    "sampler": ({"eta": 0.5, "sde_type": "sage"}, "unknown sde_type 'sage', expected one of sage_grpo"),
    "no rate": ({"fps": 0}, r"--fps must be a number in \[1, inf\); received 0"),
    "guidance": ({"guidance_scale": "nan"}, r"--guidance_scale must be a number in \[1, inf\); received nan"),
    "cache": ({"cache": 0}, r"--cache must be a number in \(0, inf\); received 0.0"),
    "cache of a rollout": ({"cache": True, "sde_type": "cps"}, "--cache leaves blocks out, which a rollout never does"),
    "cache of several processes": ({"cache": True, "sp_size": 2}, "--cache leaves blocks out.* without .* --sp_size"),
    "attention": ({"attention_backend": "fast"}, "--attention_backend: expected one of flash, .*; received 'fast'"),
    "attention of a GPU": ({"attention_backend": "_native_cudnn"}, "_native_cudnn needs a GPU; this machine"),
    "attention that is downloaded": ({"attention_backend": "sage_hub"}, "expected one of .*; received 'sage_hub'"),
    "attention that is not installed": ({"use_sageattn": True}, "--attention_backend sage: .* install `sageattention"),
    "seed": ({"seed": -1}, r"--seed must be a number in \[0, 9223372036854775808\); received -1"),
    "steps": ({"num_inference_steps": 0}, r"--num_inference_steps must be a number in \[1, inf\); received 0"),
    "shift": ({"shift": "inf"}, r"--shift must be a number in \(0, inf\); received inf"),
}
IDLE = {
    "negative prompt": (
        {"negative_prompt": "dim", "guidance_scale": 1},
        "'dim' .* guidance_scale 1 .* or leave --nega",
    ),
    "eta": ({"eta": 0.5}, "--eta is the noise of another --sde_type than ode: give one, or leave --eta out"),
    "distilled": ({"cfg_distilled": True}, "--cfg_distilled .* name a version with --resolution.*: give --resolution"),
    "distilled and a version": ({"enable_step_distill": True, "resolution": "480p"}, "a version .* --transformer_ver"),
}
"""Flags that nothing would read."""
T2V = {"transformer_version": "480p_t2v", "video_length": 81}
BAD |= {name: (T2V | flags, message) for name, (flags, message) in OF_T2V.items()}
BAD |= {f"idle {name}": (T2V | flags, message) for name, (flags, message) in IDLE.items()}


@pytest.mark.parametrize(("flags", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_named(ask: Callable[..., Request], tmp_path: Path, flags: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ask(**{"prompt": "a cat"} | flags)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["video.mp4", "video.json"])
def test_a_pipe_in_a_videos_or_its_notes_place_is_refused_before_the_video_is_made(ask, tmp_path: Path, name: str):
    os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match=f"it is a pipe, socket or device.*{name}"):
        ask(prompt="a cat", **T2V)


def test_every_byte_of_an_adapter_is_part_of_what_its_video_was_made_with(ask, tmp_path: Path):
    path = tmp_path / "style.safetensors"
    save_file({"weight": torch.zeros(2**21), "alpha": torch.tensor(8.0)}, path)
    made = {ask(prompt="a cat", lora_path=path, **T2V).weights for _ in range(2)}
    changed = bytearray(path.read_bytes())
    changed[5_000_001] += 1  # the fingerprint of a model's files reads samples of them
    path.write_bytes(changed)
    assert len(made) == 1 and made != {ask(prompt="a cat", lora_path=path, **T2V).weights}


def test_images_of_a_csv_stand_in_the_csv(ask: Callable[..., Request], tmp_path: Path):
    csv = write_prompts(tmp_path / "prompts.csv", images=True)
    with pytest.raises(ValueError, match="a CSV names images in its column ref_image_path"):
        ask(prompts_csv=csv, image_path="x.png", transformer_version="480p_i2v")
    jobs = ask(prompts_csv=csv, output_path=tmp_path / "out", transformer_version="480p_i2v", seed=3).jobs
    assert [Path(job.prompt.ref_image_path).name for job in jobs] == [f"prompts_{row}.png" for row in range(4)]
