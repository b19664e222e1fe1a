"""Fixtures of the end-to-end tests: a command line in an empty folder."""

from pathlib import Path

import pytest

from tests.support.command_line import CommandLine


@pytest.fixture
def command_line(tmp_path: Path) -> CommandLine:
    """Runs the entry files in an empty folder."""
    (tmp_path / "here").mkdir()
    (tmp_path / "outputs_of_commands").mkdir()
    return CommandLine(tmp_path / "here", tmp_path / "outputs_of_commands")
