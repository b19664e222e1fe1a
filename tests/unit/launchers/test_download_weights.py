"""download_weights.sh says what it does, keeps nothing it could not check, and names what is missing."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import write_program
from tests.support.training import REPOSITORY as ROOT

HF = """#!/usr/bin/env bash
echo "hf $*" >> "$CALLS"
folder="${@: -1}"
mkdir -p "$folder/checkpoint-11352"
echo '{}' > "$folder/model_config.json"
truncate -s "${MODEL_SIZE:-5030000000}" "$folder/checkpoint-11352/model.pth"
"""
CURL = """#!/usr/bin/env bash
echo "curl $*" >> "$CALLS"
while [[ $1 != --output ]]; do shift; done
cp "$TEXT_FILE" "$2"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the script, stub programs `hf` and `curl`, and a scoring text that is not the authors'."""
    shutil.copy(ROOT / "download_weights.sh", tmp_path)
    for name, text in (("hf", HF), ("curl", CURL)):
        write_program(tmp_path / "bin" / name, text)
    (tmp_path / "text.py").write_text('DETAILED_PROMPT_WITH_SPECIAL_TOKEN = "another text"\n')
    return tmp_path


def run(project: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess:
    environment = {"PATH": f"{project / 'bin'}:{os.environ['PATH']}", "PYTHON": sys.executable}
    environment |= {"CALLS": str(project / "calls"), "TEXT_FILE": str(project / "text.py")}
    command = ["bash", str(project / "download_weights.sh"), *arguments]
    return subprocess.run(command, env=environment | settings, cwd=project, capture_output=True, text=True, timeout=60)


def test_a_dry_run_prints_the_commands_and_fetches_nothing(project: Path):
    result = run(project, "--dry-run", "my weights")
    assert result.returncode == 0 and "prompt_template.py" in result.stdout
    assert "+ hf download KwaiVGI/VideoReward --local-dir my\\ weights/VideoReward" in result.stdout
    assert not (project / "calls").exists() and not (project / "my weights").exists()


@pytest.mark.parametrize("root", [[], ["not/yet/there"], ["/not/yet/there"]])
def test_a_dry_run_says_how_much_is_free_where_a_folder_will_be_made(project: Path, root: list[str]):
    result = run(project, "--dry-run", "--all", "480p_t2v", *root)
    assert result.returncode == 0, result.stderr
    said = re.search(r"free where '(\S+)' lies: [\d.,]+[KMGTPE]?\n", result.stdout)
    assert said and said[1] == (root[0] if root else "./ckpts"), result.stdout
    assert not (project / "ckpts").exists()


@pytest.mark.parametrize(("version", "total", "encoders"), [("480p_t2v", 61, 0), ("720p_i2v", 62, 1)])
def test_everything_for_a_version_is_fetched_after_its_size_is_said(project, version, total, encoders):
    shutil.copy(project / "bin" / "hf", project / "bin" / "modelscope")
    lines = run(project, "--all", version, "--dry-run", "w").stdout.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("+"))
    assert any(line.startswith(f"{total} GB in all; free where 'w' lies: ") for line in lines[:first])
    finished = run(project, "--all", version, "w")
    assert "the scoring text was not kept" in finished.stderr  # the last step, with this stub
    calls = (project / "calls").read_text()
    assert f"vae/* --include transformer/{version}/* --local-dir w\n" in calls
    assert calls.count("FLUX.1-Redux-dev") == encoders and "AI-ModelScope/Glyph-SDXL-v2" in calls
    assert calls.index("Qwen2.5-VL") < calls.index("KwaiVGI/VideoReward --local-dir w/VideoReward")


@pytest.mark.parametrize(("version", "second"), [("480p_i2v", "720p_sr_distilled"), ("720p_t2v", "1080p_sr_distilled")])
def test_what_sharpens_a_versions_videos_is_fetched_on_request(project, version, second):
    told = run(project, "--all", version, "--sr", "--dry-run").stdout
    assert f"--include transformer/{second}/\\* --include upsampler/{second}/\\* --local-dir ./ckpts" in told
    assert ("96 GB in all" if "i2v" in version else "95 GB in all") in told
    assert "--sr goes with --all VERSION" in run(project, "--sr").stderr


def test_all_needs_the_program_for_the_glyph_encoder_before_anything_is_fetched(project: Path):
    finished = run(project, "--all", "480p_t2v", MODELSCOPE="no-such-program")
    assert finished.returncode == 1 and "pip install modelscope" in finished.stderr
    assert not (project / "calls").exists()


def test_a_text_that_is_not_the_authors_is_not_kept(project: Path):
    result = run(project)
    assert result.returncode == 1
    assert "has SHA-256" in result.stderr and "the scoring text was not kept" in result.stderr
    assert "hf download KwaiVGI/VideoReward" in (project / "calls").read_text()
    assert not (project / "ckpts" / "VideoReward" / "prompt_template.py").exists()


def test_verify_names_everything_that_is_missing_or_cut_short_and_fetches_nothing(project: Path):
    result = run(project, "--verify", "there")
    assert result.returncode == 1 and "./download_weights.sh there" in result.stderr
    assert "'there/VideoReward' lacks: model_config.json checkpoint-*/ prompt_template.py" in result.stderr
    assert not (project / "calls").exists()
    run(project, MODEL_SIZE="1000")
    result = run(project, "--verify")
    assert result.returncode == 1
    assert "checkpoint-11352/model.pth' has 1000 bytes, expected at least 5000000000" in result.stderr


def test_wrong_arguments_and_a_missing_program_are_named(project: Path):
    for arguments, message in (
        (["--force"], "unknown option '--force'"),
        (["a", "b"], "one ROOT is expected; received 'a' and 'b'"),
        ([], "'no-such-hf' is not installed"),
    ):
        result = run(project, *arguments, HF="no-such-hf")
        assert result.returncode == 1 and message in result.stderr and not (project / "calls").exists()
