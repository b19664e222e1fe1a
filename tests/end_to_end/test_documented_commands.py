"""Every command of the documents, typed as it stands there; those that need more than a laptop are listed with why."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hyvideo.observability.metrics import read_metrics
from tests.architecture.test_documents import ROOT, commands
from tests.support.programs import write_shown_files

ELSEWHERE = {
    "make test": "this suite; CI types it in a fresh clone",
    "hf download": "needs the network",
    "modelscope download": "needs the network",
    r"\./download_weights.sh$": "needs the network; tests/unit/launchers/test_download_weights.py runs it without",
    r"\./download_weights.sh --verify": "needs downloaded weights",
    r"python -m scripts.check_weights --model_path ckpts": "needs downloaded weights",
    ".*configs/sage_8gpu.yaml --train_video_csv": "needs 8 GPUs and downloaded weights",
    r"(REWARD_TOKEN=secret )?\./run_post_train.sh --train_video_csv": "needs 8 GPUs and downloaded weights",
    ".*videoalign_local": "needs downloaded weights",
    ".* ckpts ": "needs downloaded weights",
    "python -m benchmarks.videoalign_parity": "needs downloaded weights and the original project",
    "NODE_IP_LIST=": "needs two machines; tests/distributed/test_two_nodes.py starts two nodes of one",
    ".* sbatch ": "needs SLURM; tests/unit/launchers/test_slurm_train.py runs the script without it",
    ".*report winrates": "needs people's votes; tests/end_to_end/test_report.py has some",
    "for list in VBench": "needs downloaded weights and VBench-2.0",
    "pip install wandb": "needs the network",
    "pip install -e": "would change this environment",
    "docker build": "needs a Docker daemon",
    ".*--trackers tensorboard wandb": "needs wandb; tests/unit/observability/test_trackers.py tries it if it is there",
}
DOCUMENTS = [ROOT / "README.md", *(path for path in sorted(ROOT.glob("*.md")) if path.name != "README.md")]
DOCUMENTS += [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "assets").rglob("*.md"))]
"""The README comes first: others go on from the runs it makes."""
OTHERS = [path for path in DOCUMENTS if path.name != "tutorial.md"]  # which is typed whole, below


def commands_of(document: Path) -> list[str]:
    return [" ".join(command.split()) for command in commands(document.read_text(encoding="utf-8"))]


def why_elsewhere(command: str) -> str | None:
    return next((reason for pattern, reason in ELSEWHERE.items() if re.match(pattern, command)), None)


def type_in(folder: Path, script: str) -> str:
    """Type commands one after the other; returns all that they print."""
    ours = ("PYTEST", "MAKE", "ARGS")  # what `make test-slow ARGS=...` would hand on to a `make` of the document
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    command = ["bash", "-eux", "-o", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as a clone would have it, with this environment as its own."""
    folder = tmp_path_factory.mktemp("clone")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("document", OTHERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_of_a_document_run_as_they_stand_there(clone: Path, document: Path):
    typed = [command for command in commands_of(document) if why_elsewhere(command) is None]
    type_in(clone, "\n".join([". .venv/bin/activate", *typed]))


def test_what_is_left_out_is_still_in_a_document_and_the_readme_leaves_out_the_suite_alone():
    every = [command for document in DOCUMENTS for command in commands_of(document)]
    assert [pattern for pattern in ELSEWHERE if not any(re.match(pattern, command) for command in every)] == []
    assert [command for command in commands_of(ROOT / "README.md") if why_elsewhere(command)] == ["make test"]


@pytest.mark.slow
def test_every_block_of_the_tutorial_works_in_its_order(tmp_path: Path):
    """As somebody reads it: files written, commands typed."""
    for name in ("assets", "configs", "hyvideo", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Makefile", "generate.py", "post_train.py", "requirements.txt"):
        shutil.copy2(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    tutorial = ROOT / "docs" / "tutorial.md"
    write_shown_files(tutorial, tmp_path)
    blocks = re.findall(r"^```bash\n(.*?)^```$", tutorial.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    script = ["touch -h .venv/.installed", *blocks]
    printed = type_in(tmp_path, "\n".join(script))
    made = tmp_path / "outputs" / "tutorial"
    assert re.search(r"^step 4/4, 00:00 left \| reward", printed, re.MULTILINE)
    assert all("own/best" in row for row in read_metrics(made / "farther" / "metrics.jsonl"))
    assert "<h3>own/best</h3>" in (made / "farther" / "report.html").read_text(encoding="utf-8")
    assert "warm" in (made / "evaluation" / "evaluation.md").read_text(encoding="utf-8")
    assert (made / "comparison.html").is_file() and (made / "first" / "report.html").is_file()
