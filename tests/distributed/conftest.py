"""Fixtures of the tests on several ranks: a tiny random model whose heads divide by 4."""

from pathlib import Path

import pytest

from tests.support.tiny_model import save_tiny_model


@pytest.fixture(scope="session")
def root_of_four_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random model with four attention heads. Read only."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny4") / "model", num_heads=4)
