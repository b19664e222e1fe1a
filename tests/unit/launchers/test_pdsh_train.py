"""The launcher of several nodes hands every word on as it came, stops all when one fails, and says what is wrong first.

Nodes are local shells: pdsh is the real one, and a stand-in for ssh runs the command here.
"""

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.programs import write_program
from tests.support.training import REPOSITORY as ROOT

needs_pdsh = pytest.mark.skipif(shutil.which("pdsh") is None, reason="pdsh is not installed (apt-get install pdsh)")

# The last two words are the host and the command, as sshd would give it to the user's shell.
SSH = """#!/usr/bin/env bash
cd / && exec env -i PATH="$PATH" sh -c "${@: -1}"
"""

# Stands in for Python: checks pass, a node named BAD fails, others write down what they are asked to run and wait.
STUB = """#!/usr/bin/env bash
if [[ $1 == -c ]]; then echo 0; fi
if [[ $1 == -c || " $* " == *" --dry_run "* ]]; then exit; fi
printf '%s\\n' "$@" "GIVEN=${GIVEN-}" "NCCL_DEBUG=$NCCL_DEBUG" >"got.$NODE_RANK"
env >"environment.$NODE_RANK"
if [[ -n ${LATE-} ]]; then if [[ $NODE_RANK == 0 ]]; then exit 69; else sleep 2; exit "$LATE"; fi; fi
if [[ $NODE_RANK == "${BAD-}" ]]; then exit 7; fi
if [[ -n ${DEAF-} ]]; then trap '' TERM; fi
sleep "${SECONDS_LONG:-0}" &
wait
"""


@pytest.fixture
def project(tmp_path):
    """A project whose path no shell should see unquoted, a stub Python in it and the stand-in for ssh."""
    project = tmp_path / 'it\'s 100% "mine" $HOME; `id` & %h'
    (project / "configs").mkdir(parents=True)
    (project / "configs" / "sage_64gpu.yaml").touch()
    shutil.copy(ROOT / "run_post_train_multinode.sh", project)
    shutil.copytree(ROOT / "scripts" / "post_train", project / "scripts" / "post_train")
    write_program(project / "stub-python", STUB)
    write_program(project / "bin" / "ssh", SSH)
    return project


def start(project, *flags, **settings):
    environment = {"PATH": f"{project / 'bin'}:{os.environ['PATH']}", "PYTHON": "./stub-python"}
    environment |= {"NODE_IP_LIST": "node1,node2", "NPROC_PER_NODE": "2", "MASTER_PORT": "29533", "PREFLIGHT": "0"}
    command = ["bash", str(project / "run_post_train_multinode.sh"), *flags]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    # A shell cannot catch a signal that was ignored when it started, as tests in the background have SIGINT.
    options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, env=environment | settings, cwd="/", **options)


def launch(project, *flags, **settings):
    launcher = start(project, *flags, **settings)
    output, errors = launcher.communicate(timeout=60)
    return subprocess.CompletedProcess(launcher.args, launcher.returncode, output, errors)


def got(project, node):
    return (project / f"got.{node}").read_text().splitlines()


def start_until_both_run(project):
    launcher, deadline = start(project, SECONDS_LONG="300", PASS_ENV="SECONDS_LONG"), time.monotonic() + 30
    while not all((project / f"got.{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline, "a node does not run"
        time.sleep(0.05)
    return launcher


def processes_of(project):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == project and (process / "cmdline").read_bytes():
                found.append(process)
        except OSError:
            continue
    return found


@needs_pdsh
def test_every_node_runs_torchrun_with_its_number_and_the_same_flags(project):
    result = launch(project, "--seed", "3", NODE_IP_LIST="node1:8 node2,node3:4", NPROC_PER_NODE="")
    assert result.returncode == 0, result.stderr
    for rank, processes in enumerate(("8", None, "4")):
        words = got(project, rank)
        assert words[:2] == ["-m", "scripts.post_train.launch_ranks"] or processes is None
        assert processes is None or f"--nproc_per_node={processes}" in words
        assert {"--nnodes=3", f"--node_rank={rank}", "--master_addr=node1", "--master_port=29533"} <= set(words)
        assert words[words.index("--config") + 1] == "configs/sage_64gpu.yaml"
        assert "--resume_from_checkpoint" in words and words[words.index("--seed") + 1] == "3"


HOSTILE = ["--negative_prompt", "", "it's $HOME `id` $(id)", "a  b\tc", '{"VQ": 0.5}']
HOSTILE += ["--train_video_csv", "*", "100%", "%h %n %u %%", "a\\b;c & d | e > f", "\\'", "!x ~ #"]


@needs_pdsh
def test_hostile_paths_and_flags_reach_every_node_unchanged(project):
    folder = "runs of 100% 'mine' $(id)"
    result = launch(project, *HOSTILE, OUTPUT_DIR=folder, LOG_DIR=f"{folder}/logs", PASS_ENV="GIVEN", GIVEN="a'b %h $x")
    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        words = got(project, rank)
        assert words[-2 - len(HOSTILE) : -2] == HOSTILE and words[words.index("--output_dir") + 1] == folder
        assert f"--log_dir={folder}/logs/node_{rank}" in words and "GIVEN=a'b %h $x" in words
        assert (project / folder / "logs" / f"node_{rank}").is_dir()


@needs_pdsh
def test_secrets_go_to_the_nodes_only_when_they_are_named(project):
    secrets = {"HF_TOKEN": "hf_1", "TORCH_API_KEY": "k", "NCCL_DEBUG": "INFO"}
    environment = project / "environment.1"
    assert launch(project, **secrets).returncode == 0
    passed = environment.read_text().splitlines()
    assert "NCCL_DEBUG=INFO" in passed
    assert not [line for line in passed if line.startswith(("HF_TOKEN=", "TORCH_API_KEY="))]
    assert launch(project, **secrets, PASS_ENV="HF_TOKEN").returncode == 0
    assert "HF_TOKEN=hf_1" in environment.read_text().splitlines()


@needs_pdsh
def test_every_node_checks_first_and_a_check_that_fails_stops_all(project):
    write_program(project / "stub-python", '#!/usr/bin/env bash\nif [[ " $* " == *" --dry_run "* ]]; then exit 2; fi\n')
    result = launch(project, PREFLIGHT="1")
    assert result.returncode == 2 and not (project / "outputs").exists()


@needs_pdsh
def test_a_hostfile_may_have_comments_and_slots(project, tmp_path):
    (tmp_path / "my hosts").write_text("# the cluster\n  node1 slots=8  # first\n\nnode2\tslots=4\n")
    result = launch(project, HOSTFILE=str(tmp_path / "my hosts"), NPROC_PER_NODE="", NODE_IP_LIST="other")
    assert result.returncode == 0, result.stderr
    assert "--nproc_per_node=8" in got(project, 0) and "--nproc_per_node=4" in got(project, 1)


@needs_pdsh
@pytest.mark.parametrize("deaf", ["", "1"])
def test_a_node_that_fails_stops_the_others_and_gives_the_status(project, deaf):
    started = time.monotonic()
    result = launch(project, BAD="1", DEAF=deaf, SECONDS_LONG="300", PASS_ENV="BAD DEAF SECONDS_LONG")
    assert result.returncode == 7 and time.monotonic() - started < 20
    assert "node2 (node 1) ended with status 7" in result.stderr and "/node_1" in result.stderr
    assert processes_of(project) == []


@needs_pdsh
@pytest.mark.parametrize(("late", "told"), [("1", "status 1;"), ("137", "status 137 (SIGKILL);")])
def test_a_node_that_lost_the_others_waits_for_what_they_tell(project, late, told):
    result = launch(project, LATE=late, PASS_ENV="LATE")
    assert result.returncode == int(late) and f"node2 (node 1) ended with {told}" in result.stderr


@needs_pdsh
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_nodes(project, number):
    launcher = start_until_both_run(project)
    os.kill(launcher.pid, number)
    launcher.communicate(timeout=20)
    assert launcher.returncode != 0 and processes_of(project) == []


@needs_pdsh
def test_a_node_whose_connection_is_lost_ends_its_processes(project):
    """The launcher and its connections are killed: nobody is left to stop the nodes."""
    launcher = start_until_both_run(project)
    launcher.kill()
    for script in processes_of(project):
        with suppress(FileNotFoundError, ProcessLookupError):  # some end by themselves
            if (script / "cmdline").read_bytes().split(b"\0")[1:2] == [b"scripts/post_train/train_grpo.sh"]:
                os.kill(int((script / "stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    deadline = time.monotonic() + 20
    while processes_of(project) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_of(project) == []


STRANGE = ("a;rm -rf x", "-x", "$(id)", "a b'c;d", "a:0", "a:08", f"a:{2**64 + 1}", "a:b")


@pytest.mark.parametrize("node", [*STRANGE, "n[1-4]", "^file", "a/b", "a%h", "::1", "ä"])
def test_an_invalid_host_name_is_refused(project, node):
    result = launch(project, NODE_IP_LIST=f"node1,{node}")
    assert result.returncode == 1 and "expected a host name or IPv4 address" in result.stderr
    assert not list(project.glob("got.*"))


EMPTY = "the node list is empty: set NODE_IP_LIST, for example to 10.0.0.1,10.0.0.2, "
EMPTY += "or HOSTFILE to a file with one node"
WRONG = [
    ("STOP_GRACE", "soon", "STOP_GRACE must be a whole number from 0 to 31536000"),
    ("PASS_ENV", "NO_SUCH_NAME", "PASS_ENV names 'NO_SUCH_NAME'"),
    ("PASS_ENV", "HOME[$(touch${IFS}ran)]", "each of PASS_ENV must be the name of a variable"),
    ("PASS_ENV", "HOME\n\x1b]0;owned\x07", "received '?]0;owned?'"),
]


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("NODE_IP_LIST", "node1:2,node1:4", "'node1' twice"),
        *(("NODE_IP_LIST", empty, EMPTY) for empty in ("", " , ,\n")),
        ("HOSTFILE", "no such file", "cannot read 'no such file'"),
        ("HOSTFILE", "pipe", "HOSTFILE: cannot read"),  # and is not waited for
        *(pytest.param(*case, marks=needs_pdsh) for case in WRONG),
    ],
)
def test_an_invalid_setting_or_list_of_nodes_is_refused(project, setting, value, words):
    os.mkfifo(project / "pipe")
    result = launch(project, **{setting: value})
    assert result.returncode == 1 and words in result.stderr and not list(project.glob("got.*"))
    assert not (project / "ran").exists() and "\x1b" not in result.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    scripts = [*ROOT.glob("*.sh"), *(ROOT / "scripts").rglob("*.sh"), *(ROOT / "scripts").rglob("*.sbatch")]
    assert len(scripts) >= 5
    result = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert result.stdout == ""
