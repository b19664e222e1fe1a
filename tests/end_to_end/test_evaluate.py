"""scripts/evaluate.py: what a run trained and existing videos in one table; a second call makes nothing again."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest

from hyvideo.data.prompts import read_prompts
from hyvideo.data.videos import write_video
from hyvideo.observability.scored_videos import read_scored_videos
from scripts import evaluate as program
from tests.support.command_line import CommandLine
from tests.support.rewards import grey_videos
from tests.support.training import PROMPTS
from tests.support.vision_language import write_vision_language_model

SAMPLING = ["--num_inference_steps", "2", "--fixed_size", "32x32", "--video_length", "5", "--guidance_scale", "1"]


@pytest.fixture
def evaluate(prompts_csv: Path, tmp_path: Path, command_line: CommandLine, monkeypatch):
    """Run it on four prompts with the moving-shapes reward; returns the exit status.

    generate.py is forked from a process that has imported it; test_checkpoint_names.py starts it as a user's call does.
    """
    monkeypatch.setattr(program.subprocess, "call", command_line.call)

    def run(*flags: object) -> int:
        shared = ["--prompts_csv", prompts_csv, "--rewards", "moving_shapes", "--output_dir", tmp_path / "evaluation"]
        return program.main([str(word) for word in [*shared, *flags]])

    return run


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written") / "greys"
    for number, video in enumerate(grey_videos(0, 60, 120, 180)):
        write_video(folder / f"{number:04d}.mp4", video, fps=24)
    return folder


@pytest.fixture
def greys(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "greys")


def test_a_checkpoint_and_existing_videos_are_compared_and_nothing_is_made_twice(
    evaluate, trained, tiny_root, prompts_csv, greys, tmp_path, capfd
):
    training = trained(max_steps=1, kl_weight=0.0)
    models = ["--model", "trained", tiny_root, training.folder.checkpoints / "step_1", "--videos", "greys", greys]
    assert evaluate(*models, *SAMPLING) == 0

    folder = tmp_path / "evaluation"
    result = json.loads((folder / "evaluation.json").read_text())
    assert list(result["means"]) == ["trained", "greys"]
    assert list(result["means"]["trained"]) == ["Overall", "VQ", "MQ", "TA"]
    overall = result["means"]["greys"]["Overall"]["mean"]
    assert overall == pytest.approx(sum(result["means"]["greys"][name]["mean"] for name in ("VQ", "MQ", "TA")))
    assert (result["num_prompts"], result["num_videos"]) == (4, 4)
    note = json.loads((folder / "trained" / "0003.json").read_text())
    assert note["checkpoint_path"].endswith("step_1") and note["num_inference_steps"] == 2
    assert "Gain over trained" in (folder / "evaluation.md").read_text()

    gallery = read_scored_videos(folder / "trained")  # the scores there are not taken for those of a training
    assert [video.prompt for video in gallery] == [prompt.text for prompt in read_prompts([prompts_csv])]
    made = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.suffix in (".mp4", ".jsonl")}
    (folder / "evaluation.json").unlink()
    capfd.readouterr()
    assert evaluate(*models, *SAMPLING) == 0 and capfd.readouterr().err.count("is finished already") == 4
    assert {path: path.stat().st_mtime_ns for path in made} == made
    assert json.loads((folder / "evaluation.json").read_text()) == result


def test_a_folder_for_vbench_holds_its_videos_and_nothing_else(evaluate, tiny_root, tmp_path, capfd):
    base = ["--model", "base", tiny_root, *SAMPLING, "--file_names", "vbench", "--seeds", "0", "1"]
    assert evaluate(*base) == 0
    videos = tmp_path / "evaluation" / "base"
    assert {path.name for path in videos.iterdir()} == {f"{text}-{n}.mp4" for text in PROMPTS for n in (0, 1)}
    made = {(video.prompt, video.seed) for video in read_scored_videos(videos)}
    assert made == {(text, seed) for text in PROMPTS for seed in (0, 1)}
    capfd.readouterr()
    assert evaluate(*base) == 0 and capfd.readouterr().err.count("is finished already") == 2 * len(PROMPTS)


def test_questions_of_the_csv_are_asked(greys: Path, tmp_path: Path, evaluate):
    judge = write_vision_language_model(tmp_path / "judge", "qwen3_vl")
    checks = json.dumps([{"question": "Is it bright?", "answer": "yes"}])
    with (tmp_path / "checks.csv").open("w", newline="") as file:
        rows = [(text, checks) for text in PROMPTS[:-1]]
        csv.writer(file).writerows([("prompt", "checks"), *rows, (PROMPTS[-1], "")])
    asked = ["--prompts_csv", tmp_path / "checks.csv", "--rewards", f"vlm_checks={judge}", "--videos", "greys", greys]
    assert evaluate(*asked) == 0
    result = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert 0 < result["means"]["greys"]["CHECKS"]["mean"] < 1
    assert result["num_failed"]["greys"] == {"CHECKS": 0}, "a prompt without questions is no failure"


def test_weights_of_overall_are_the_users_and_a_seed_twice_or_rows_of_one_text_count_once(evaluate, greys, tmp_path):
    assert evaluate("--videos", "greys", greys, "--overall", '{"VQ": 0.5, "TA": 2}', "--seeds", 42, 42) == 0
    result = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    means = result["means"]["greys"]
    assert result["num_videos"] == 4
    assert means["Overall"]["mean"] == pytest.approx(0.5 * means["VQ"]["mean"] + 2 * means["TA"]["mean"])
    text = "a red circle moves slowly to the left"
    (tmp_path / "seeds.csv").write_text(f"prompt,seed\n{text},1\n{text},2\nanother text,1\nanother text,2\n")
    assert evaluate("--videos", "greys", greys, "--prompts_csv", tmp_path / "seeds.csv") == 0
    result = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert (result["num_prompts"], result["num_videos"]) == (2, 4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "received none"),
        (["--videos", "a", "GREYS", "--videos", "a", "GREYS"], "received a, a"),
        (["--videos", "a/b", "GREYS"], "no '/' or '..'"),
        (["--videos", "..", "GREYS"], "no '/' or '..'"),
        (["--videos", "a", "nowhere"], "there is no folder 'nowhere'"),
        (["--model", "a", "GREYS"], "weights are missing"),
        (["--model", "a", "ROOT", "GREYS"], "greys"),
        (["--videos", "a", "GREYS", "--seeds", "1", "2"], "There is no video '.*0000_seed1.mp4'"),
        (["--videos", "a", "GREYS", "--overall", '{"XQ": 1}'], "no reward gives XQ; there are VQ, MQ, TA"),
        (["--videos", "a", "GREYS", "--overall", "VQ"], "expected finite weights as JSON"),
        (["--videos", "a", "GREYS", "--overall", '{"VQ": NaN}'], "expected finite weights"),
        (["--videos", "a", "GREYS", "--overall", "[" * 100_000], "expected finite weights"),
        (["--videos", "a", "GREYS", "--overall", '{"VQ": ' + "9" * 400 + "}"], "expected finite weights"),
        (["--videos", "a", "GREYS", "--batchsize", "2"], "unknown flag --batchsize"),
        (["--model", "a", "ROOT", "--batch_size", "0"], "--batch_size must be at least 1; received 0."),
        (["--model", "a", "ROOT", "--num_processes", "0"], "--num_processes must be at least 1; received 0."),
        (["--videos", "a", "GREYS", "--rewards", "moving_shape"], "Nearest: moving_shapes"),
        (["--videos", "a", "GREYS", "--rewards", "clip_score=nowhere"], "there is no folder 'nowhere'"),
    ],
)
def test_wrong_input_ends_with_status_2_and_says_what_to_do(evaluate, greys, tiny_root, capsys, flags, message):
    places = {"GREYS": str(greys), "ROOT": str(tiny_root)}
    assert evaluate(*[places.get(word, word) for word in flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("evaluate: ") and re.search(message, error)


def test_damaged_videos_are_named_and_a_model_needs_a_name_and_a_folder(evaluate, greys, capsys):
    shutil.copy(__file__, greys / "0002.mp4")
    assert evaluate("--videos", "greys", greys) == 2 and "0002.mp4" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        evaluate("--model", "alone")
    assert "--model takes NAME ROOT [TRAINED]; received alone" in capsys.readouterr().err


def test_scores_of_other_weights_are_not_reused(evaluate, greys: Path, tmp_path: Path):
    scores = tmp_path / "evaluation" / "greys" / "evaluation_scores.jsonl"
    for root, num_rows in (("one", 4), ("one", 4), ("other", 8)):
        assert evaluate("--videos", "greys", greys, "--model_root", tmp_path / root) == 0
        assert len(scores.read_text().splitlines()) == num_rows
    weights = tmp_path / "other" / "VideoReward" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"replaced")
    assert evaluate("--videos", "greys", greys, "--model_root", tmp_path / "other") == 0
    assert len(scores.read_text().splitlines()) == 12


def test_videos_of_another_prompt_or_seed_are_refused_before_any_is_made(evaluate, greys, tiny_root, tmp_path, capsys):
    note = greys / "0001.json"
    note.write_text('{"prompt": "another prompt", "seed": 42}')
    assert evaluate("--model", "base", tiny_root, "--videos", "greys", greys, *SAMPLING) == 2
    assert not (tmp_path / "evaluation").exists()
    assert "0001.mp4' was made with the prompt 'another prompt'" in capsys.readouterr().err
    note.write_text('{"seed": 7}')
    assert evaluate("--videos", "greys", greys) == 2
    assert "was made with the seed 7, here its row has 42" in capsys.readouterr().err
    note.write_text('{"index": 0}')  # by which the noise differs too
    assert evaluate("--videos", "greys", greys) == 2
    assert "was made with the index 0, here its row has 1" in capsys.readouterr().err
    (greys / "0001.mp4").unlink()
    assert evaluate("--model", "base", tiny_root, "--videos", "greys", greys, *SAMPLING) == 2
    assert not (tmp_path / "evaluation").exists() and "There is no video" in capsys.readouterr().err


@pytest.mark.parametrize(("rows", "told"), [("", "no prompts"), ("alone\n", "at least 2")])
def test_too_few_prompts_are_said_before_a_reward_is_loaded(evaluate, monkeypatch, greys, tmp_path, capsys, rows, told):
    (tmp_path / "few.csv").write_text(f"prompt\n{rows}")
    monkeypatch.setattr(program, "_build_reward", lambda *_: pytest.fail("a reward was loaded"))
    assert evaluate("--videos", "greys", greys, "--prompts_csv", tmp_path / "few.csv") == 2
    assert told in capsys.readouterr().err and not (tmp_path / "evaluation").exists()
