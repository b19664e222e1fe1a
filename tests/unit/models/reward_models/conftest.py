"""Registers the small rewards of the tests for the time of one test."""

import pytest

from hyvideo.models.reward_models import registry
from tests.support.rewards import Brightness, FileBrightness


@pytest.fixture(autouse=True)
def small_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """`brightness` and `file_brightness` are registered rewards."""
    monkeypatch.setitem(registry._REWARDS, "brightness", Brightness)
    monkeypatch.setitem(registry._REWARDS, "file_brightness", FileBrightness)
