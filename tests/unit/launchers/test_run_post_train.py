"""The one-node launcher names what is missing and hands every argument on as it came."""

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from hyvideo.distributed import HANGS
from tests.support.programs import write_program
from tests.support.ranks import free_port
from tests.support.training import REPOSITORY as ROOT

# Stands in for Python: answers the question for GPUs with NUM_GPUS and prints what else it is asked to run.
STUB = """#!/usr/bin/env bash
if [[ $1 == -c ]]; then echo "${NUM_GPUS:-0}"; exit; fi
echo "ranks have ${TORCH_ELASTIC_SHUTDOWN_TIMEOUT} s" >&2
echo "CUDA allocates by '${PYTORCH_CUDA_ALLOC_CONF:-${PYTORCH_ALLOC_CONF-}}'" >&2  # the older name wins
echo "NCCL records $TORCH_FR_BUFFER_SIZE, $TORCH_NCCL_DUMP_ON_TIMEOUT, $TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC" >&2
printf '<%s>\\n' "$@"
exit "${STUB_EXIT:-0}"
"""


def write_config(project, name, text=""):
    path = project / "configs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def project(tmp_path):
    """A project folder, its path with a space, with the launcher, its configs and a stub Python."""
    project = tmp_path / "my project"
    write_config(project, "sage_8gpu.yaml", "parallel:\n  sp_size: 2\n")
    shutil.copy(ROOT / "run_post_train.sh", project)
    shutil.copytree(ROOT / "scripts" / "post_train", project / "scripts" / "post_train")
    write_program(project / "stub-python", STUB)
    return project


def launch(project, *flags, **settings):
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(project / "stub-python"), "PREFLIGHT": "0"} | settings
    command = ["bash", str(project / "run_post_train.sh"), *flags]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=60)


def launched(project, *flags, **settings):
    result = launch(project, *flags, **settings)
    assert result.returncode == 0, result.stderr
    return [line[1:-1] for line in result.stdout.removesuffix("\n").split("\n")]


def test_prompts_that_nobody_names_are_the_starter_prompts_and_it_says_so(project):
    (project / "assets" / "prompts").mkdir(parents=True)
    for name in ("train", "valid"):
        (project / "assets" / "prompts" / f"{name}.csv").write_text("prompt\na cat\n")
    taken = ["--train_video_csv", "assets/prompts/train.csv", "--valid_video_csv", "assets/prompts/valid.csv"]
    result = launch(project, "--max_steps", "2")
    received = [line[1:-1] for line in result.stdout.splitlines()]
    assert received[-6:] == [*taken, "--max_steps", "2"]
    assert result.stderr.count("taking the starter prompts, assets/prompts/") == 2
    write_config(project, "own.yaml", "data:\n  train_video_csv: [a.csv]\n")
    write_config(project, "flow.yaml", "data: {train_video_csv: [a.csv]}\n")
    write_config(project, "comment.yaml", "# train_video_csv: [a.csv]\n")
    assert "assets/prompts/train.csv" in launched(project, "--config", "configs/comment.yaml")
    named = "--config configs/own.yaml,--config=configs/own.yaml,--config configs/flow.yaml,--train_video_csv a.csv"
    for flags in f"{named},--train_video_csv=a.csv".split(","):
        received = launched(project, *flags.split())
        assert "assets/prompts/train.csv" not in received and "assets/prompts/valid.csv" in received


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "ranks have 1800 s\nCUDA allocates by 'expandable_segments:True'\nNCCL records 2000, 1, 1800\n"),
        ({"STOP_GRACE": "60"}, "ranks have 60 s\n"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "allocates by 'max_split_size_mb:64'"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "allocates by 'max_split_size_mb:64'"),
        ({"TORCH_FR_BUFFER_SIZE": "9", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60"}, "NCCL records 9, 1, 60\n"),
    ],
)
def test_what_ranks_get_for_their_end_allocator_and_flight_recorder_can_be_set_otherwise(project, settings, told):
    assert told in launch(project, NUM_GPUS="8", **settings).stderr


def test_without_gpus_one_process_continues_its_folder_and_on_gpus_one_for_each_runs(project):
    flags = "--config configs/sage_8gpu.yaml --output_dir outputs/sage_8gpu --resume_from_checkpoint latest"
    assert launched(project) == ["post_train.py", *flags.split()]
    result = launch_node(project, NNODES="2")
    assert result.returncode == 1 and "set MASTER_ADDR and MASTER_PORT" in result.stderr
    started = "-m scripts.post_train.launch_ranks --nproc_per_node=8 --standalone post_train.py"
    assert launched(project, NUM_GPUS="8")[:5] == started.split()


def test_the_environment_sets_processes_port_config_folder_and_logs(project):
    write_config(project, "mine.yaml")
    port = str(free_port())
    places = {"CONFIG": "configs/mine.yaml", "OUTPUT_DIR": "/runs/a b", "RESUME_FROM_CHECKPOINT": ""}
    got = launched(project, NUM_GPUS="8", NPROC_PER_NODE="2", MASTER_PORT=port, **places)
    torchrun = f"--nproc_per_node=2 --nnodes=1 --master_addr=127.0.0.1 --master_port={port}".split()
    flags = ["post_train.py", "--config", "configs/mine.yaml", "--output_dir", "/runs/a b"]
    assert got == ["-m", "scripts.post_train.launch_ranks", *torchrun, *flags]
    got = launched(project, NUM_GPUS="2", LOG_DIR="/runs/a b/logs of mine")
    assert "--log_dir=/runs/a b/logs of mine/node_0" in got and "--redirects=3" in got and "--tee=0:3" in got


def test_the_settings_that_a_run_has_saved_continue_it_where_it_is(project):
    saved = project / "outputs" / "first" / "config.yaml"
    saved.parent.mkdir(parents=True)
    saved.touch()
    assert launched(project, CONFIG="outputs/first/config.yaml")[4] == "outputs/config"  # no run is there
    (saved.parent / "console.log").touch()
    assert launched(project, CONFIG="outputs/first/config.yaml")[4] == "outputs/first"
    assert launched(project, CONFIG="outputs/first/config.yaml", OUTPUT_DIR="other")[4] == "other"


HOSTILE = ["--negative_prompt", "", "--reward_weights", '{"VQ": 0.5, "TA": 1.0}', "--pretrained_lora_path=a\\b;c"]
HOSTILE += ["--train_video_csv", "my prompts.csv", "it's $HOME `id` $(id).csv", "*", "--use_lora"]


@pytest.mark.parametrize("num_gpus", ["0", "2"])
def test_spaces_quotes_and_shell_signs_reach_the_run_unchanged(project, num_gpus):
    assert launched(project, *HOSTILE, NUM_GPUS=num_gpus)[-len(HOSTILE) :] == HOSTILE


def test_everything_is_checked_first_by_the_same_command_with_dry_run(project):
    lines = launch(project, "--seed", "3", NUM_GPUS="2", PREFLIGHT="1").stdout.split("<post_train.py>\n")[1:]
    check, run = ([word for word in line.split("\n") if word.startswith("<--")] for line in lines)
    flags = ["<--config>", "<--output_dir>", "<--resume_from_checkpoint>", "<--seed>"]
    assert check[:5] == [*flags, "<--dry_run>"] and run == flags


def test_the_exit_status_is_that_of_the_run_or_of_the_check_that_fails(project):
    assert launch(project, STUB_EXIT="7").returncode == 7
    result = launch(project, PREFLIGHT="1", STUB_EXIT="2")
    assert result.returncode == 2 and result.stdout.count("post_train.py") == 1


def test_a_port_in_use_is_refused_before_anything_starts(project):
    with socket.create_server(("", 0)) as listener:
        port = str(listener.getsockname()[1])
        result = launch(project, NPROC_PER_NODE="2", MASTER_PORT=port, PYTHON=sys.executable)
    assert result.returncode == 1 and f"port {port} is in use" in result.stderr and result.stdout == ""


def test_an_invalid_setting_is_refused_with_the_way_to_mend_it(project):
    for setting, value, words in (
        ("STOP_GRACE", "soon", "must be a whole number from 0 to 31536000, without leading zeros; received 'soon'."),
        ("CONFIG", "configs/sagee.yaml", "no file at 'configs/sagee.yaml'"),
        ("PYTHON", "no-such-python", "'no-such-python' cannot import torch. Run 'make setup'"),
    ):
        result = launch(project, **{setting: value})
        assert result.returncode == 1 and words in result.stderr
    bare = project / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec {sys._base_executable} -S "$@"\n')
    bare.chmod(0o755)
    result = launch(project, "--max_restarts", "2", PYTHON=str(bare))
    assert result.returncode == 1 and result.stderr.startswith(f"'{bare}' cannot import torch. Run 'make setup'")


def launch_node(project, **settings):
    script = project / "scripts" / "post_train" / "train_grpo.sh"
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(project / "stub-python"), **settings}
    return subprocess.run(["bash", script], env=environment, capture_output=True, text=True, timeout=60)


COMMAND = "x[$(touch${IFS}ran)]"
"""A text whose command bash arithmetic would run."""


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("NNODES", value) for value in ("0", "08", f"{2**64 + 1}", COMMAND)),
        *(("NODE_RANK", value) for value in ("-1", "1", COMMAND)),
        *(("NPROC_PER_NODE", value) for value in ("0", "65537", COMMAND)),
        *((name, COMMAND) for name in ("NUM_GPUS", "STOP_GRACE")),
        *(("MASTER_PORT", value) for value in ("0", "65536", COMMAND)),
        *(("MASTER_ADDR", value) for value in ("--rdzv_conf=x", "a b")),
        *(("RUN_ID", value) for value in ("one\ntwo", "*")),
        ("PREFLIGHT", "00"),
    ],
)
def test_an_invalid_setting_of_a_node_is_refused_before_it_is_used(project, setting, value):
    result = launch_node(project, **{setting: value})
    assert result.returncode == 1 and result.stdout == ""
    named = "NPROC_PER_NODE" if setting == "NUM_GPUS" else setting  # what the interpreter counted
    received = value.replace("\n", "?")
    assert result.stderr.startswith(f"{named} must be ") and result.stderr.endswith(f"received '{received}'.\n")
    assert not list(project.rglob("ran"))


@pytest.mark.parametrize("words", [["run"], ["run", COMMAND], ["one\ntwo", "1"], ["", "1"], ["run", f"{2**63}"]])
def test_an_invalid_stop_is_refused_before_a_process_is_looked_for(project, words):
    script = project / "scripts" / "post_train" / "train_grpo.sh"
    result = subprocess.run(["bash", script, "--stop", *words], cwd=project, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and "--stop " in result.stderr and not (project / "ran").exists()


# Stands in for Python, but for restarts.py: begins a run in outputs/sage_8gpu and ends or waits as it is told.
LOSING = """#!/usr/bin/env bash
if [[ $1 == -c ]]; then echo 0; exit; fi
if [[ ${2-} == scripts.post_train.restarts ]]; then PYTHONPATH=%s exec %s "$@"; fi
printf '<%%s>\\n' "$@" ---
if [[ " $* " == *" --dry_run "* ]]; then exit "${CHECKED:-0}"; fi
mkdir -p outputs/sage_8gpu/checkpoints
if [[ -z ${SILENT-} ]]; then echo begun >>outputs/sage_8gpu/console.log; fi
if [[ -n ${HANG-} ]]; then echo "$HANG" >>outputs/sage_8gpu/console.log; fi
if [[ -n ${SAVED-} ]]; then printf step_4 >outputs/sage_8gpu/checkpoints/latest; fi
if [[ -n ${WAIT-} ]]; then trap 'exit 69' TERM; echo waiting >&2; sleep 60 & wait; fi
exit "$STUB_EXIT"
"""


@pytest.fixture
def losing(project):
    write_program(project / "stub-python", LOSING % (ROOT, sys.executable))
    (project / "outputs" / "sage_8gpu").mkdir(parents=True)
    (project / "outputs" / "sage_8gpu" / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}, "time/rollout": 60.0, "time/update": 30.0}}\n' for step in range(1, 7))
    )
    return project


def test_a_lost_run_goes_on_from_its_last_checkpoint_as_often_as_is_said(losing):
    result = launch(losing, *HOSTILE, "--max_restarts", "1", PREFLIGHT="1", STUB_EXIT="69", SAVED="1")
    assert result.returncode == 69
    starts = [start.strip("<>\n").split(">\n<") for start in result.stdout.split("<--->\n")[:-1]]
    assert [start[-2:] for start in starts[::2]] == [["--dry_run", "true"], ["--resume_from_checkpoint", "latest"]]
    assert starts[1][-len(HOSTILE) :] == HOSTILE and starts[2][-2 - len(HOSTILE) : -2] == HOSTILE and len(starts) == 3
    told = "restart 1 of 1 in 5 s, from step 4: the launcher ended with status 69. Lost: updates 5 to 6 (3.0 minutes)"
    assert told in result.stderr and told in (losing / "outputs" / "sage_8gpu" / "console.log").read_text()
    assert "Not restarted: all 1 restarts are used up." in result.stderr
    result = launch(losing, "--max_restarts", "--seed", "3")
    assert result.returncode == 2 and result.stderr.endswith("received ''. Write --max_restarts 3, for example.\n")


def test_after_a_hang_the_rank_that_did_not_come_is_named_and_not_only_the_one_that_noticed(losing):
    missing, noticed = "gloo:all_reduce, ...: rank 1 on b (silent) did not come", "the launcher ended with status 69"
    hangs, goes_on = f"2026-11-28 12:00:00 WARNING: {HANGS}{missing}.", "2026-11-28 12:09:00 step 9/12"
    for lines, told in ((f"{goes_on}\n{hangs}", f"{missing} ({noticed})"), (f"{hangs}\n{goes_on}", noticed)):
        result = launch(losing, "--max_restarts", "1", STUB_EXIT="69", HANG=lines)
        assert f"from step 0: {told}. Lost: " in result.stderr


def test_a_run_that_was_to_begin_afresh_does_not_begin_once_more(losing):
    afresh = ["--resume_from_checkpoint", ""]
    result = launch(losing, *afresh, "--max_restarts", "1", PREFLIGHT="0", STUB_EXIT="69")
    first, second, _ = result.stdout.split("<--->\n")
    assert first.endswith("<--resume_from_checkpoint>\n<>\n")
    assert second.endswith("<--resume_from_checkpoint>\n<>\n<--resume_from_checkpoint>\n<latest>\n")


@pytest.mark.parametrize(
    ("settings", "status", "says"),
    [
        *(({"STUB_EXIT": str(status)}, status, "") for status in (0, 1, 2, 75, 143)),
        ({"PREFLIGHT": "1", "CHECKED": "2", "STUB_EXIT": "69"}, 2, ""),
        ({"STUB_EXIT": "137", "SILENT": "1"}, 137, "Not restarted: the run had not begun"),
        ({"STUB_EXIT": "137", "MAX_RESTARTS": "0"}, 137, ""),
        ({"STUB_EXIT": "0", "MAX_RESTARTS": "often"}, 2, "must be a whole number from 0"),
    ],
)
def test_what_would_fail_again_is_not_started_again(losing, settings, status, says):
    result = launch(losing, **{"MAX_RESTARTS": "3"} | settings)
    assert result.returncode == status and says in result.stderr and "restart 1" not in result.stderr


@pytest.mark.parametrize(
    ("number", "settings", "moment", "status"),
    [(signal.SIGINT, {"STUB_EXIT": "137"}, "restart 1 of", 130), (signal.SIGTERM, {"WAIT": "1"}, "waiting", 69)],
)
def test_who_asks_a_run_to_stop_gets_no_restart(losing, number, settings, moment, status):
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(losing / "stub-python"), "PREFLIGHT": "0"} | settings
    command = ["bash", str(losing / "run_post_train.sh"), "--max_restarts=3"]
    launcher = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    while moment not in (line := launcher.stderr.readline()):
        assert line
    launcher.send_signal(number)
    assert launcher.wait(timeout=4) == status


def test_the_limit_of_open_files_is_raised_to_what_many_ranks_need(project):
    write_program(project / "stub-python", "#!/bin/bash\nif [[ $1 == -c ]]; then echo 256; else ulimit -Sn; fi\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        result = launch(project)
        assert result.stdout == f"{5 * 256 + 256}\n" and "open files" not in result.stderr
        command = f"ulimit -Hn 1100; bash '{project}/run_post_train.sh'"
        environment = {"PATH": os.environ["PATH"], "PYTHON": str(project / "stub-python"), "PREFLIGHT": "0"}
        result = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=60)
        assert result.stdout == "1100\n" and "may open 1536 files, and no more than 1100" in result.stderr
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
