"""Files of others: a pipe in the place of an input is refused, never opened; no text reaches the terminal raw."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import generate
import post_train
from hyvideo.checkpoint.train_state import begin_save
from hyvideo.models.model_folder import DIFFUSERS_COMPONENTS, original_files
from scripts import check_weights, evaluate, report
from tests.support.run_folders import write_run, write_scored
from tests.support.training import PROMPTS, arguments, write_prompts

Main = Callable[..., int]

EVIL = "\x1b]0;owned\x07\x9b31m\u202e"
"""Sets a window's title, colours what follows and turns the direction of text."""


@contextmanager
def pipe_at(path: Path) -> Iterator[Path]:
    """Put a pipe at `path` whose readers get nothing, at once; yields a file that is there after one has opened it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = path.with_name(f"{path.name}.kept")
    opened = path.with_name(f".{path.name}.opened")
    if path.exists():
        path.rename(kept)
    os.mkfifo(path)
    writer = subprocess.Popen(["sh", "-c", 'while :; do : >"$0"; : >"$1"; sleep 0.1; done', path, opened])
    try:
        yield opened
    finally:
        writer.kill()
        writer.wait()
        path.unlink()
        if kept.exists():
            kept.rename(path)


def run_main(main: Main, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    if main is post_train.main:  # reads its command line itself
        monkeypatch.setattr(sys, "argv", ["post_train.py", *argv])
        return main()
    return main(argv)


@pytest.fixture
def place(tiny_root: Path, original_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("model").symlink_to(tiny_root)
    Path("original").symlink_to(original_root)
    write_prompts(Path("prompts.csv"))
    write_prompts(Path("images.csv"), images=True)
    Path("given.yaml").write_text("eta: 0.3\n")
    begin_save(Path("saved"), 5, {"policy": {}}, {}).finish()
    facts = begin_save(Path("saved"), 6, {"policy": {}}, {}).finish() / "facts.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "format": EVIL}))
    begin_save(Path("saved"), 7, {"policy": {}}, {"lora": None, "trained": [EVIL]}).finish()
    Path("evil.csv").write_text(f"text{EVIL},other\na,b\n")
    Path("evil.yaml").write_text('"eta\\e]0;owned\\a": 1\n')
    Path("lora").mkdir()
    write_run(Path("run"), num_updates=3)
    write_scored(Path("videos"), ["a", "b"], [0.1, 0.2])
    for number in range(len(PROMPTS)):
        Path(f"videos/000{number}.mp4").touch()
    Path("study.key.json").write_text(json.dumps({"study": "s", "models": {}, "pairs": {}}))
    Path("votes.json").write_text('{"votes": []}')
    Path("clip").mkdir()
    return tmp_path


def train(**settings: object) -> list[str]:
    return arguments(Path("model"), Path("prompts.csv"), Path("out"), **settings)


SAMPLE = ["--model_path", "model", "--output_path", "out.mp4", "--prompt", "a"]
IMAGES = {"pretrained_model_root": "original", "pretrained_transformer_version": "480p_i2v"}
IMAGES |= {"train_video_csv": "images.csv", "valid_video_csv": "images.csv"}
CLIP = {"reward_model": "clip_score", "reward_checkpoint_path": "clip", "reward_weights": '{"CLIPScore": 1}'}
EVALUATE = ["--prompts_csv", "prompts.csv", "--output_dir", "out", "--rewards", "moving_shapes"]
VIDEOALIGN = [*EVALUATE[:4], *"--videos a videos --rewards videoalign_local --model_root reward".split()]
I2V = "--transformer_version 480p_i2v --image_path first.png".split()
ADAPTER, FACTS = "lora/pytorch_lora_weights.safetensors", "saved/step_5/facts.json"
MANIFEST = "saved/step_5/manifest.json"
CASES: dict[str, tuple[str, Main, list[str]]] = {
    "config": ("given.yaml", post_train.main, train(config="given.yaml")),
    "training prompts": ("prompts.csv", post_train.main, train()),
    "validation prompts": ("v.csv", post_train.main, train(valid_video_csv="v.csv", validation_interval=1)),
    "an image of a CSV": ("images_0.png", post_train.main, train(**IMAGES)),
    "facts of a checkpoint": (FACTS, post_train.main, train(resume_from_checkpoint="saved/step_5")),
    "an adapter": (ADAPTER, post_train.main, train(use_lora=True, pretrained_lora_path="lora")),
    "weights of a CLIP": ("clip/model.safetensors", post_train.main, train(**CLIP)),
    "settings of VideoReward": ("reward/VideoReward/model_config.json", evaluate.main, VIDEOALIGN),
    "prompts to sample": ("prompts.csv", generate.main, [*SAMPLE[:4], "--prompts_csv", "prompts.csv"]),
    "an image to start from": ("first.png", generate.main, ["--model_path", "original", *SAMPLE[2:], *I2V]),
    "an adapter to sample with": (ADAPTER, generate.main, [*SAMPLE, "--lora_path", "lora"]),
    "a checkpoint to sample with": (FACTS, generate.main, [*SAMPLE, "--checkpoint_path", "saved/step_5"]),
    "its manifest": (MANIFEST, generate.main, [*SAMPLE, "--checkpoint_path", "saved/step_5"]),
    "prompts to compare by": ("prompts.csv", evaluate.main, [*EVALUATE, "--videos", "a", "videos"]),
    "a video to score": ("videos/0000_seed42.mp4", evaluate.main, [*EVALUATE, "--videos", "a", "videos"]),
    "metrics of a run": ("run/metrics.jsonl", report.main, ["run"]),
    "a key": ("study.key.json", report.main, ["winrates", "study.key.json", "votes.json"]),
    "votes": ("votes.json", report.main, ["winrates", "study.key.json", "votes.json"]),
    "scores of a gallery": ("videos/scores.jsonl", report.main, ["gallery", "videos", "videos", "--embed"]),
    "a video of a gallery": ("videos/000.mp4", report.main, ["gallery", "videos", "videos", "--embed"]),
}


@pytest.mark.parametrize(("path", "main", "argv"), CASES.values(), ids=CASES)
def test_a_pipe_in_the_place_of_an_input_is_refused_and_not_opened(place, path, main, argv, monkeypatch):
    with pipe_at(Path(path)) as opened:
        status = run_main(main, argv, monkeypatch)
        assert not opened.exists()
    assert status == 2


@pytest.mark.parametrize("path", "config.yaml console.log metrics.discarded.jsonl samples/step_10/scores.jsonl".split())
def test_a_report_does_without_what_is_a_pipe(place: Path, path: str):
    with pipe_at(place / "run" / path) as opened:
        assert report.main(["run"]) == 0 and not opened.exists()


@pytest.mark.parametrize("layout", ["tiny_root", "original_root"])
def test_a_pipe_among_the_weights_is_refused_and_not_opened(layout, tmp_path, request):
    root = shutil.copytree(request.getfixturevalue(layout), tmp_path / "model")
    version = [] if layout == "tiny_root" else ["--transformer_version", "480p_t2v"]
    folders = DIFFUSERS_COMPONENTS if layout == "tiny_root" else original_files("480p_t2v")
    argv = ["--model_path", str(root), "--output_path", str(tmp_path / "out.mp4"), "--prompt", "a", *version]
    files = [path for folder in folders for path in sorted((root / folder).rglob("*")) if path.is_file()]
    assert len(files) > 10
    for path in files:
        with pipe_at(path) as opened:
            statuses = [generate.main(argv), check_weights.main(["--model_path", str(root), *version])]
            assert statuses == [2, 2] and not opened.exists(), path


MESSAGES: dict[str, tuple[Main, list[str]]] = {
    "a CSV's header": (post_train.main, train(train_video_csv="evil.csv")),
    "a key of a YAML file": (post_train.main, train(config="evil.yaml")),
    "facts of a checkpoint": (post_train.main, train(resume_from_checkpoint="saved/step_6")),
    "a weight's name": (generate.main, [*SAMPLE, "--checkpoint_path", "saved/step_7"]),
    "the name of a file": (post_train.main, train(train_video_csv=f"{EVIL}.csv")),
    "a folder's name": (check_weights.main, ["--model_path", EVIL]),
    "an unknown flag": (generate.main, [*SAMPLE, f"--{EVIL}"]),
    "a run's name": (report.main, [EVIL]),
    "a reward's name": (evaluate.main, [*EVALUATE, EVIL, "--videos", "a", "videos"]),
}


@pytest.mark.parametrize(("main", "argv"), MESSAGES.values(), ids=MESSAGES)
def test_what_a_message_quotes_is_shown_and_not_obeyed(place, main, argv, monkeypatch, capsys):
    try:
        status = run_main(main, argv, monkeypatch)
    except SystemExit as end:  # of argparse
        status = end.code
    told = capsys.readouterr().err
    assert status == 2 and "x1b]0;owned" in told and not set(EVIL) - set("]0;owned31m") & set(told)


@pytest.mark.parametrize("room", [0, 16])
def test_a_full_disk_is_told_by_the_file_and_the_reason(command_line, tiny_root, prompts_csv, room):
    """With room for so many kB: none for the first file, or some for the settings and not for all that comes."""
    folder = command_line.folder / "out"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        (folder / "filling").write_bytes(b"0" * 1024 * (64 - room))
        settings = {"max_steps": 1, "trackers": ["tensorboard"]}
        finished = command_line.run("post_train.py", arguments(tiny_root, prompts_csv, Path("out"), **settings))
    finally:
        subprocess.run(["umount", folder], check=True)
    assert finished.returncode in (1, 2) and 'post_train.py", line' not in finished.stderr
    assert re.search(r"(: |^)'out\S*': No space left on device|Cannot save 'out/", finished.stderr), finished.stderr
