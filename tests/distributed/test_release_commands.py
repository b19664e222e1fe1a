"""The commands of SAGE-GRPO's release run as published, on tiny weights in the released layout."""

import json
import shlex
import shutil

from hyvideo.data.videos import read_video
from tests.support.release import SAMPLING, TRAINING
from tests.support.training import PROMPTS, write_prompts
from tests.support.videoreward import write_videoreward

PROMPT_FILES = "--train_video_csv prompts.csv --valid_video_csv prompts.csv"
"""The release's own are not here."""

SMALLER = """--max_steps 1 --sample_n_frames 5 --rollout_size 32x32 --grpo_sampling_steps 2 --validation_num_videos 2
--validate_video_length 5 --validation_fixed_size 32x32 --validation_num_inference_steps 1"""
SMALLER_SAMPLES = "--video_length 5 --fixed_size 32x32 --num_inference_steps 2"


def test_what_its_training_command_trains_its_sampling_command_samples(command_line, original_root, tmp_path):
    here = command_line.folder
    shutil.copytree(original_root, here / "ckpts")
    (here / "ckpts" / "VideoReward").mkdir()
    write_videoreward(here / "ckpts" / "VideoReward")
    write_prompts(here / "prompts.csv")
    command_line.run_ranks(4, "post_train.py", shlex.split(f"{TRAINING} {PROMPT_FILES} {SMALLER}"))
    (row,) = map(json.loads, (here / "outputs" / "metrics.jsonl").read_text().splitlines())
    assert row["step"] == 1 and row["grad_norm"] > 0 and row["reward/failed"] == 0
    assert {"reward/VQ", "reward/MQ", "reward/TA"} <= row.keys()

    (here / "assets").mkdir()
    write_prompts(here / "assets" / "demo_sample.csv")
    trained = "--checkpoint_path outputs/checkpoints/step_1/transformer --output_path outputs/trained"
    sampling = f"{SAMPLING.replace('MODEL', 'ckpts')} {SMALLER_SAMPLES} {trained}"
    command_line.run_ranks(4, "generate.py", shlex.split(sampling))
    videos = sorted((here / "outputs" / "trained").glob("*.mp4"))
    assert len(videos) == len(PROMPTS)
    assert all(read_video(path).shape[0] == 5 for path in videos)
