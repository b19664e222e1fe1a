"""The tutorial, block by block in its order, as somebody reads it: files written, commands typed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from hyvideo.observability.metrics import read_metrics
from tests.support.programs import write_shown_files

ROOT = Path(__file__).parents[2]


def test_every_block_of_the_tutorial_works_in_its_order(tmp_path: Path):
    for name in ("assets", "configs", "hyvideo", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Makefile", "generate.py", "post_train.py", "requirements.txt"):
        shutil.copy2(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    tutorial = ROOT / "docs" / "tutorial.md"
    write_shown_files(tutorial, tmp_path)
    blocks = re.findall(r"^```bash\n(.*?)^```$", tutorial.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    script = ["touch -h .venv/.installed", *blocks]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "MAKE", "ARGS"))}
    command = ["bash", "-eux", "-o", "pipefail", "-c", "\n".join(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    made = tmp_path / "outputs" / "tutorial"
    assert re.search(r"^step 4/4, 00:00 left \| reward", done.stdout + done.stderr, re.MULTILINE)
    assert all("own/best" in row for row in read_metrics(made / "farther" / "metrics.jsonl"))
    assert "<h3>own/best</h3>" in (made / "farther" / "report.html").read_text(encoding="utf-8")
    assert "warm" in (made / "evaluation" / "evaluation.md").read_text(encoding="utf-8")
    assert (made / "comparison.html").is_file() and (made / "first" / "report.html").is_file()
