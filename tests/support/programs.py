"""Small programs that stand in for real ones, and those that a document shows."""

import re
from pathlib import Path


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def write_shown_files(document: Path, folder: Path) -> None:
    """Write the blocks of Python and YAML whose first line names a file."""
    blocks = r"^```(?:python|yaml)\n(# (\S+/\S+)\n.*?)^```$"
    for block, name in re.findall(blocks, document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(block, encoding="utf-8")
