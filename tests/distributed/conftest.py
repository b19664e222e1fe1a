"""Fixtures of the tests on several ranks: a tiny random model whose heads divide by 4."""

from pathlib import Path

import pytest
import torch

from tests.support.tiny_model import build_transformer, save_tiny_model


@pytest.fixture(scope="session")
def root_of_four_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random model with four attention heads. Read only.

    No weight of its transformer starts at 0. Adam's first steps depend only on the signs of the gradients, so such a
    weight would differ between setups where rounding turns a sign.
    """
    transformer = build_transformer(num_attention_heads=4)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in transformer.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return save_tiny_model(tmp_path_factory.mktemp("tiny4") / "model", transformer)
