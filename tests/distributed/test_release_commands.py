"""The commands of SAGE-GRPO's release run as published, on tiny weights in the released layout."""

import json
import shlex
import shutil

from hyvideo.data.videos import read_video
from tests.support.command_line import CommandLine
from tests.support.ranks import free_port, rank_environment
from tests.support.release import SAMPLING, TRAINING
from tests.support.training import PROMPTS, write_prompts
from tests.support.videoreward import write_videoreward

PROMPT_FILES = "--train_video_csv prompts.csv --valid_video_csv prompts.csv"
"""The release's own are not here."""

SMALLER = """--max_steps 1 --sample_n_frames 5 --rollout_size 32x32 --grpo_sampling_steps 2 --validation_num_videos 2
--validate_video_length 5 --validation_fixed_size 32x32 --validation_num_inference_steps 1"""
SMALLER_SAMPLES = "--video_length 5 --fixed_size 32x32 --num_inference_steps 2"


def on_four_ranks(command_line: CommandLine, script: str, *arguments: str) -> str:
    """Run a command as torchrun does; return what the first rank wrote to stderr."""
    port, argv = free_port(), shlex.split(" ".join(arguments))
    ranks = [command_line.start(script, argv, rank_environment(rank, 4, port)) for rank in range(4)]
    finished = [rank.wait() for rank in ranks]
    assert [rank.status for rank in finished] == [0] * 4, finished
    return finished[0].stderr


def test_what_its_training_command_trains_its_sampling_command_samples(command_line, original_root, tmp_path):
    here = command_line.folder
    shutil.copytree(original_root, here / "ckpts")
    (here / "ckpts" / "VideoReward").mkdir()
    write_videoreward(here / "ckpts" / "VideoReward")
    write_prompts(here / "prompts.csv")
    on_four_ranks(command_line, "post_train.py", TRAINING, PROMPT_FILES, SMALLER)
    (row,) = map(json.loads, (here / "outputs" / "metrics.jsonl").read_text().splitlines())
    assert row["step"] == 1 and row["grad_norm"] > 0 and row["reward/failed"] == 0
    assert {"reward/VQ", "reward/MQ", "reward/TA"} <= row.keys()

    (here / "assets").mkdir()
    write_prompts(here / "assets" / "demo_sample.csv")
    trained = "--checkpoint_path outputs/checkpoints/step_1/transformer --output_path outputs/trained"
    on_four_ranks(command_line, "generate.py", SAMPLING.replace("MODEL", "ckpts"), SMALLER_SAMPLES, trained)
    videos = sorted((here / "outputs" / "trained").glob("*.mp4"))
    assert len(videos) == len(PROMPTS)
    assert all(read_video(path).shape[0] == 5 for path in videos)
