"""Which code a run is trained by."""

import hashlib
import subprocess
from pathlib import Path

import hyvideo

CODE = "the code in hyvideo/"
"""What its hash is called in messages."""

_PACKAGE = Path(hyvideo.__file__).parent


def code_hash(package: Path = _PACKAGE) -> str:
    """Return 16 digits over the files of the package."""
    code = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        code.update(path.read_bytes())
    return code.hexdigest()[:16]


def code_version(package: Path = _PACKAGE) -> str:
    """Return the hash and, where git knows it, the commit: `1f0c3a5e7b9d2468 (commit b84b4cd-dirty)`."""
    if not (package.parent / ".git").exists():  # else git would answer for a repository around this one
        return code_hash(package)
    git = ["git", "-C", str(package.parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return code_hash(package)
    return f"{code_hash(package)} (commit {commit})"
