"""Ranks forecast what one process does."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.forecast.__main__ import parse_arguments, write_forecast
from tests.support.ranks import run_on_ranks
from tests.support.training import arguments

SMALL = ["--num_held_out", "6", "--rates", "1e-3"]


def forecast_of(argv: list[str]) -> None:
    """Forecast as one of the ranks."""
    write_forecast(*parse_arguments(argv))


@pytest.fixture(scope="module")
def alone(root_of_four_heads: Path, prompts_csv: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The forecast of one process."""
    folder = tmp_path_factory.mktemp("alone")
    run_on_ranks(1, forecast_of, [*arguments(root_of_four_heads, prompts_csv, folder), *SMALL])
    return json.loads((folder / "forecast.json").read_text())


@pytest.mark.parametrize(
    "setup",
    [{"batch_size": 2}, {"sp_size": 2, "enable_fsdp": True}],
    ids=["dp", "sharded, sp"],
)
def test_two_ranks_forecast_what_one_does(setup, alone, root_of_four_heads, prompts_csv, tmp_path):
    argv = arguments(root_of_four_heads, prompts_csv, tmp_path / "ranks", **setup)
    run_on_ranks(2, forecast_of, [*argv, *SMALL])
    found = json.loads((tmp_path / "ranks" / "forecast.json").read_text())
    assert found["gradient"]["correlation"] == pytest.approx(alone["gradient"]["correlation"], abs=1e-3)
    assert found["groups"] == pytest.approx(alone["groups"], rel=1e-2, abs=1e-3)
    assert found["held_out"]["base"] == pytest.approx(alone["held_out"]["base"], abs=0.02)
