"""The one-node launcher names what is missing and hands every argument on as it came."""

import os
import shutil
import stat
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
VERSION = "480p_t2v"

# Stands in for Python: answers the question for GPUs with NUM_GPUS and prints what else it is asked to run.
STUB = """#!/usr/bin/env bash
if [[ $1 == -c ]]; then echo "${NUM_GPUS:-0}"; exit; fi
printf '<%s>\\n' "$@"
exit "${STUB_EXIT:-0}"
"""

ORIGINAL_LAYOUT = [
    "scheduler/scheduler_config.json",
    f"transformer/{VERSION}/config.json",
    f"transformer/{VERSION}/diffusion_pytorch_model.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
    "text_encoder/llm/config.json",
    "text_encoder/llm/tokenizer_config.json",
    "text_encoder/llm/model-00001-of-00005.safetensors",
    "text_encoder/byt5-small/config.json",
    "text_encoder/byt5-small/tokenizer_config.json",
    "text_encoder/Glyph-SDXL-v2/assets/color_idx.json",
    "text_encoder/Glyph-SDXL-v2/assets/multilingual_10-lang_idx.json",
    "text_encoder/Glyph-SDXL-v2/checkpoints/byt5_model.pt",
    "VideoReward/model_config.json",
    "VideoReward/checkpoint-11352/model.pth",
]


def touch(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def write_config(project, name, text=""):
    path = project / "configs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def project(tmp_path):
    """A project folder, its path with a space, with the launcher, its configs, a stub Python and no weights."""
    project = tmp_path / "my project"
    write_config(project, "sage_8gpu.yaml", "parallel:\n  sp_size: 2\n")
    shutil.copy(ROOT / "run_post_train.sh", project)
    stub = project / "stub-python"
    stub.write_text(STUB)
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    return project


@pytest.fixture
def project_with_weights(project):
    for name in ORIGINAL_LAYOUT:
        touch(project / "ckpts" / name)
    return project


def launch(project, *flags, **settings):
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(project / "stub-python")} | settings
    command = ["bash", str(project / "run_post_train.sh"), *flags]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=60)


def launched(project, *flags, **settings):
    """The arguments that Python got."""
    result = launch(project, *flags, **settings)
    assert result.returncode == 0, result.stderr
    return [line[1:-1] for line in result.stdout.removesuffix("\n").split("\n")]


def test_without_weights_it_names_each_folder_the_way_to_get_it_and_the_tiny_command(project):
    result = launch(project)
    assert result.returncode == 1 and result.stdout == ""
    for folder in (
        *("scheduler", f"transformer/{VERSION}", "vae", "VideoReward"),
        *(f"text_encoder/{name}" for name in ("llm", "byt5-small", "Glyph-SDXL-v2")),
    ):
        assert f"\n  ./ckpts/{folder} " in result.stderr
    assert "checkpoints-download.md" in result.stderr
    assert "python post_train.py --config configs/tiny.yaml" in result.stderr


@pytest.mark.parametrize("name", ORIGINAL_LAYOUT)
def test_with_one_file_missing_it_names_that_folder_alone(project_with_weights, name):
    (project_with_weights / "ckpts" / name).unlink()
    result = launch(project_with_weights)
    named = [line for line in result.stderr.splitlines() if line.startswith("  ./ckpts/")]
    assert result.returncode == 1 and len(named) == 1
    folder, absent = named[0].split(maxsplit=1)
    assert fnmatch(name, f"{folder.removeprefix('./ckpts/')}/{absent}")


def test_on_a_machine_without_gpus_one_process_runs_and_continues_its_fixed_folder(project_with_weights):
    assert launched(project_with_weights) == [
        "post_train.py",
        *("--output_dir", "outputs/sage_8gpu"),
        *("--resume_from_checkpoint", "latest"),
        *("--config", "configs/sage_8gpu.yaml"),
    ]


def test_on_gpus_torchrun_starts_one_process_for_each(project_with_weights):
    assert launched(project_with_weights, NUM_GPUS="8")[:5] == [
        *("-m", "torch.distributed.run", "--nproc_per_node=8"),
        *("--standalone", "post_train.py"),
    ]


def test_the_environment_sets_processes_port_config_and_folder(project_with_weights):
    write_config(project_with_weights, "mine.yaml")
    got = launched(
        project_with_weights,
        NUM_GPUS="8",
        NPROC_PER_NODE="2",
        MASTER_PORT="29511",
        CONFIG="configs/mine.yaml",
        OUTPUT_DIR="/runs/a b",
        RESUME_FROM_CHECKPOINT="",
    )
    assert got == [
        *("-m", "torch.distributed.run", "--nproc_per_node=2"),
        *("--nnodes=1", "--master_addr=127.0.0.1", "--master_port=29511"),
        *("post_train.py", "--output_dir", "/runs/a b", "--config", "configs/mine.yaml"),
    ]


HOSTILE = [
    *("--negative_prompt", ""),
    *("--reward_weights", '{"VQ": 0.5, "TA": 1.0}'),
    *("--train_video_csv", "my prompts.csv", "it's $HOME `id` $(id).csv", "*"),
    *("--pretrained_lora_path=a\\b;c", "--use_lora"),
]


@pytest.mark.parametrize("num_gpus", ["0", "2"])
def test_spaces_quotes_and_shell_signs_reach_the_run_unchanged(project_with_weights, num_gpus):
    assert launched(project_with_weights, *HOSTILE, NUM_GPUS=num_gpus)[-len(HOSTILE) :] == HOSTILE


def test_the_callers_flags_come_last_so_they_win_over_the_launchers(project_with_weights):
    got = launched(project_with_weights, "--output_dir", "mine", "--resume_from_checkpoint=none")
    assert got[-3:] == ["--output_dir", "mine", "--resume_from_checkpoint=none"]


def test_configs_given_as_a_flag_replace_the_default_and_name_the_folder(project_with_weights):
    for name in ("a.yaml", "b c.yaml"):
        write_config(project_with_weights, name)
    got = launched(project_with_weights, "--eta", "0.4", "--config", "configs/a.yaml", "configs/b c.yaml")
    assert got[got.index("--output_dir") + 1] == "outputs/a-b c"
    assert got.count("--config") == 1 and got[-3:] == ["--config", "configs/a.yaml", "configs/b c.yaml"]


def test_a_run_folder_written_in_the_config_is_kept(project_with_weights):
    write_config(project_with_weights, "a.yaml", "run:\n  output_dir: 'outputs/from yaml'  # keep\n  max_steps: 3")
    write_config(project_with_weights, "b.yaml", "output_dir: null\neta: 0.3")
    write_config(project_with_weights, "c.yaml", "output_dir: later")
    for configs, folder in {
        "a": "outputs/from yaml",
        "b": "outputs/b",
        "a c": "later",
        "c a": "outputs/from yaml",
    }.items():
        got = launched(project_with_weights, "--config", *(f"configs/{name}.yaml" for name in configs.split()))
        assert got[got.index("--output_dir") + 1] == folder


def test_the_tiny_model_in_the_diffusers_layout_needs_none_of_the_original_folders(project):
    write_config(
        project, "tiny.yaml", "model:\n  pretrained_model_root: assets/tiny\nreward:\n  reward_model: moving_shapes\n"
    )
    touch(project / "assets/tiny/transformer/config.json")
    assert launched(project, "--config", "configs/tiny.yaml")[-2:] == ["--config", "configs/tiny.yaml"]
    assert launched(project, CONFIG="configs/tiny.yaml")[-2:] == ["--config", "configs/tiny.yaml"]


def test_only_what_the_chosen_version_and_reward_need_is_asked_for(project_with_weights):
    shutil.rmtree(project_with_weights / "ckpts/VideoReward")
    assert "VideoReward" in launch(project_with_weights).stderr
    assert launched(project_with_weights, "--reward_model", "remote")
    result = launch(project_with_weights, "--reward_model=remote", "--pretrained_transformer_version", "720p_i2v")
    assert "transformer/720p_i2v" in result.stderr and "vision_encoder/siglip" in result.stderr
    assert "VideoReward" not in result.stderr and "text_encoder" not in result.stderr


def test_weights_elsewhere_are_found_through_the_flag(project_with_weights):
    (project_with_weights / "ckpts").rename(project_with_weights / "other [1] place")
    assert launch(project_with_weights).returncode == 1
    assert launched(project_with_weights, "--pretrained_model_root", "other [1] place")


def test_the_exit_status_of_the_run_is_the_launchers(project_with_weights):
    assert launch(project_with_weights, STUB_EXIT="7").returncode == 7


@pytest.mark.parametrize("count", ["0", "many", "-1"])
def test_a_process_count_that_is_none_is_refused_with_what_came(project_with_weights, count):
    result = launch(project_with_weights, NPROC_PER_NODE=count)
    assert result.returncode == 1 and f"received '{count}'" in result.stderr


def test_a_config_that_does_not_exist_is_refused_with_those_that_do(project):
    result = launch(project, CONFIG="configs/sagee.yaml")
    assert result.returncode == 1
    assert "No config file at 'configs/sagee.yaml'" in result.stderr and "configs/sage_8gpu.yaml" in result.stderr


def test_an_interpreter_without_torch_points_to_the_setup(project_with_weights):
    result = launch(project_with_weights, PYTHON="no-such-python")
    assert result.returncode == 1 and "'no-such-python' cannot import torch. Run 'make setup'" in result.stderr


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_is_the_usage_and_names_every_setting(project, flag):
    result = launch(project, flag)
    assert result.returncode == 0 and "Usage: ./run_post_train.sh" in result.stdout
    for setting in ("CONFIG", "OUTPUT_DIR", "RESUME_FROM_CHECKPOINT", "NPROC_PER_NODE", "MASTER_PORT", "PYTHON"):
        assert f"\n  {setting} " in result.stdout
    assert "set -" not in result.stdout and "fail()" not in result.stdout
