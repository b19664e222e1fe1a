"""Fuzz tests may not fill the machine."""

from collections.abc import Iterator

import pytest

from tests.support.limits import bounded_memory


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    with bounded_memory():
        yield
