"""generate.py: videos of a base model, of what a run trained, and of an adapter; the same seed, the same file."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hyvideo.data.videos import read_video, video_length
from tests.support.command_line import CommandLine, Finished
from tests.support.training import PROMPTS, REPOSITORY, flags_of, noisy_image, write_prompts

Generate = Callable[..., Finished]

SMALL = {"num_inference_steps": 2, "fixed_size": "32x48", "video_length": 9, "guidance_scale": 1.0, "shift": 3.0}


@pytest.fixture
def generate(command_line: CommandLine, tiny_root: Path) -> Generate:
    """Run generate.py on the tiny model, to an end with `status`; other keywords are flags, None leaves one out."""

    def run(status: int = 0, **flags: Any) -> Finished:
        settings = {"model_path": tiny_root, "prompt": PROMPTS[0], **SMALL, **flags}
        finished = command_line.run("generate.py", flags_of(settings))
        assert finished.returncode == status, finished.stderr
        return finished

    return run


@pytest.fixture
def video(generate: Generate, command_line: CommandLine) -> Callable[..., Tensor]:
    def run(**flags: Any) -> Tensor:
        path = command_line.folder / f"{len(list(command_line.folder.iterdir()))}.mp4"
        generate(output_path=path, **flags)
        return read_video(path)

    return run


def test_a_video_has_the_asked_size_and_a_note_of_how_it_was_made_and_a_cut_prompt_is_told(generate, command_line):
    finished = generate(output_path="sub/red.mp4", seed=7, fps=12)
    assert read_video(command_line.folder / "sub" / "red.mp4").shape == (9, 32, 48, 3)
    assert video_length(command_line.folder / "sub" / "red.mp4") == (9, 12)
    note = json.loads((command_line.folder / "sub" / "red.json").read_text())
    assert (note["prompt"], note["seed"], note["num_inference_steps"]) == (PROMPTS[0], 7, 2)
    assert finished.stdout == "wrote sub/red.mp4 (and how it was made: red.json)\n"
    finished = generate(output_path="red.mp4", prompt="red " * 1200)
    assert "WARNING: 1 prompt(s) are longer than the model reads" in finished.stderr


def test_a_video_is_decided_by_prompt_seed_guidance_shift_steps_and_the_noise_of_a_rollout(video):
    first = video(seed=7)
    assert torch.equal(first, video(seed=7))
    others = ({"seed": 8}, {"shift": 9.0}, {"num_inference_steps": 3}, {"prompt": PROMPTS[1]}, {"guidance_scale": 6.0})
    negative = {"guidance_scale": 6.0, "negative_prompt": "blurred"}
    videos = [first, *(video(**{"seed": 7} | other) for other in (*others, negative))]
    assert not any(torch.equal(a, b) for i, a in enumerate(videos) for b in videos[:i])
    assert not torch.equal(first, video(seed=7, sde_type="sage_grpo", eta=0.7))
    assert torch.equal(first, video(seed=7, sde_type="sage_grpo", eta=0.0))


def test_a_csv_gives_a_folder_of_videos_whose_own_seeds_count(generate, video, command_line):
    csv = command_line.folder / "prompts.csv"
    csv.write_text(f"prompt,seed\n{PROMPTS[0]},7\n{PROMPTS[3]!r},\n".replace("'", '"'))
    generate(prompt=None, prompts_csv=csv, output_path="videos", seed=1)
    folder = command_line.folder / "videos"
    assert sorted(path.name for path in folder.glob("*.mp4")) == ["0000.mp4", "0001.mp4"]
    assert torch.equal(read_video(folder / "0000.mp4"), video(seed=7))
    assert json.loads((folder / "0001.json").read_text())["prompt"] == PROMPTS[3]


def test_several_seeds_give_a_file_each(generate: Generate, video: Callable, command_line: CommandLine):
    generate(output_path="red.mp4", seeds=[7, 8])
    for seed in (7, 8):
        assert torch.equal(read_video(command_line.folder / f"red_seed{seed}.mp4"), video(seed=seed))


def test_what_is_finished_is_not_made_again_but_with_other_settings(generate: Generate, command_line: CommandLine):
    csv = write_prompts(command_line.folder / "prompts.csv", PROMPTS[:2])
    folder = command_line.folder / "videos"
    settings = {"prompt": None, "prompts_csv": csv, "output_path": folder}
    generate(**settings)
    first = {path: path.stat().st_mtime_ns for path in folder.glob("*.mp4")}
    (folder / "0001.json").unlink()  # as if the run had been killed between the video and its note
    assert "0000.mp4 is finished already" in generate(**settings).stderr
    assert {path.name for path in first if path.stat().st_mtime_ns != first[path]} == {"0001.mp4"}
    text = csv.read_text()
    rows = zip(text.splitlines(), (",index", ",0", ",5"), strict=True)
    csv.write_text("\n".join(map("".join, rows)))  # the second one's noise is another now
    second = {path: path.stat().st_mtime_ns for path in first}
    generate(**settings)
    assert {path.name for path in second if path.stat().st_mtime_ns != second[path]} == {"0001.mp4"}
    csv.write_text(text)
    generate(**settings, eta=0.1, sde_type="sage_grpo")
    assert all(path.stat().st_mtime_ns != first[path] for path in first)


def test_other_weights_make_the_videos_again_and_a_copy_does_not(generate, video, trained, command_line, tmp_path):
    training = trained(max_steps=2, learning_rate=0.02, save_interval=1)
    checkpoint = tmp_path / "checkpoint"
    flags = {"output_path": "red.mp4", "checkpoint_path": checkpoint}
    shutil.copytree(training.folder.checkpoints / "step_1", checkpoint)
    generate(**flags)
    assert not torch.equal(read_video(command_line.folder / "red.mp4"), video())
    checkpoint.rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", checkpoint)
    assert "finished already" in generate(**flags).stderr
    shutil.rmtree(checkpoint)
    shutil.copytree(training.folder.checkpoints / "step_2", checkpoint)
    assert "finished already" not in generate(**flags).stderr


@pytest.fixture
def image(tmp_path: Path) -> Path:
    noisy_image(0, (40, 60)).save(tmp_path / "image.png")
    return tmp_path / "image.png"


def test_a_video_starts_from_an_image_in_its_ratio(video, original_root, tmp_path, image):
    flags = {"model_path": original_root, "transformer_version": "480p_i2v_step_distilled", "video_length": 1}
    flags |= {"fixed_size": None, "num_inference_steps": 1, "image_path": image}
    first = video(**flags)
    assert first.shape == (1, 768, 512, 3)  # the 480p bucket nearest to 40:60
    noisy_image(1, (40, 60)).save(tmp_path / "other.png")
    assert not torch.equal(first, video(**flags | {"image_path": tmp_path / "other.png"}))
    assert video(**flags, aspect_ratio="16:9").shape == (1, 480, 848, 3)


def test_bad_input_is_named_and_leaves_nothing(generate, command_line):
    """The cases are in test_generate_request.py."""
    finished = generate(status=2, output_path="video.avi")
    assert "expected a file ending in .mp4" in finished.stderr
    assert "Traceback" not in finished.stderr and list(command_line.folder.iterdir()) == []


def test_without_arguments_it_shows_a_command_that_works_here(command_line):
    finished = command_line.run("generate.py", [])
    assert finished.returncode == 2
    (command_line.folder / "assets").symlink_to(REPOSITORY / "assets")
    program, *arguments = shlex.split(finished.stdout.splitlines()[0])[1:]
    assert command_line.run(program, arguments).returncode == 0
    assert video_length(command_line.folder / arguments[-1])[0] > 1
