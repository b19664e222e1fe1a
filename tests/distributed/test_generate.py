"""generate.py over ranks: several make one video, or each makes its own; the videos are those of one process."""

import shutil
from pathlib import Path

from hyvideo.data.videos import read_video
from tests.support.original_layout import save_super_resolution
from tests.support.training import PROMPTS, arguments, flags_of, write_prompts


def sample(command_line, root, csv, folder, num_ranks, sp_size, **more: Path | str) -> list[Path]:
    """Sample every prompt of `csv` on `num_ranks` processes; return the videos in order."""
    settings = {"model_path": root, "prompts_csv": csv, "output_path": folder, "sp_size": sp_size, "shift": 3.0, **more}
    size = {"num_inference_steps": 2, "fixed_size": "32x48", "video_length": 9, "guidance_scale": 2.0}
    command_line.run_ranks(num_ranks, "generate.py", flags_of(size | settings))
    return sorted(folder.glob("*.mp4"))


def test_videos_made_together_are_those_of_one_process(tmp_path, command_line, root_of_four_heads):
    csv = write_prompts(tmp_path / "prompts.csv")
    alone = sample(command_line, root_of_four_heads, csv, tmp_path / "alone", num_ranks=1, sp_size=1)
    pairs = sample(command_line, root_of_four_heads, csv, tmp_path / "pairs", num_ranks=4, sp_size=2)
    assert len(alone) > 2
    assert [path.name for path in pairs] == [path.name for path in alone]
    for mine, theirs in zip(pairs, alone, strict=True):
        assert (read_video(mine).int() - read_video(theirs).int()).abs().max() <= 2, mine.name


def test_ranks_that_share_a_guided_video_sharpen_it_together(tmp_path, command_line, original_root):
    root = save_super_resolution(shutil.copytree(original_root, tmp_path / "ckpts"))
    csv = write_prompts(tmp_path / "prompts.csv", PROMPTS[:1])
    how = {"transformer_version": "480p_t2v", "fixed_size": "640x640", "video_length": "1", "sr": "true"}
    (alone,) = sample(command_line, root, csv, tmp_path / "alone", num_ranks=1, sp_size=1, **how)
    (pair,) = sample(command_line, root, csv, tmp_path / "pair", num_ranks=2, sp_size=2, **how)
    assert read_video(alone).shape == (1, 960, 960, 3)
    apart = (read_video(pair).float() - read_video(alone).float()).abs()
    # the file's compression makes more of rounding in a noisy picture; how much depends on the processor
    assert apart.mean() <= 0.55 and (apart > 1).float().mean() < 0.15, apart.mean()


def test_ranks_without_a_video_wait_for_those_with_one(tmp_path, command_line, root_of_four_heads):
    csv = tmp_path / "one.csv"
    csv.write_text("prompt\na red circle moves slowly to the left\n")
    run = arguments(root_of_four_heads, csv, tmp_path / "run", max_steps=1)
    assert command_line.run("post_train.py", run).returncode == 0
    trained = {"checkpoint_path": tmp_path / "run" / "checkpoints" / "step_1"}
    made = sample(command_line, root_of_four_heads, csv, tmp_path / "one", num_ranks=4, sp_size=2, **trained)
    assert len(made) == 1
