"""Ranks forecast what one process does."""

import json

import pytest

from scripts.forecast.__main__ import parse_arguments, write_forecast
from tests.support.ranks import run_on_ranks
from tests.support.training import arguments

SMALL = ["--num_held_out", "6", "--rates", "1e-3"]
SETUPS = {"dp": {"batch_size": 2}, "sharded, sp": {"sp_size": 2, "enable_fsdp": True}}


def forecast_all(runs: list[list[str]]) -> None:
    for argv in runs:
        write_forecast(*parse_arguments(argv))


def test_two_ranks_forecast_what_one_does(root_of_four_heads, prompts_csv, tmp_path):
    alone, *runs = (
        [*arguments(root_of_four_heads, prompts_csv, tmp_path / name, **setup), *SMALL]
        for name, setup in {"alone": {}, **SETUPS}.items()
    )
    run_on_ranks(1, forecast_all, [alone])
    run_on_ranks(2, forecast_all, runs)
    expected, *others = (json.loads((tmp_path / name / "forecast.json").read_text()) for name in ("alone", *SETUPS))
    for found in others:
        assert found["gradient"]["correlation"] == pytest.approx(expected["gradient"]["correlation"], abs=1e-3)
        assert found["groups"] == pytest.approx(expected["groups"], rel=1e-2, abs=1e-3)
        assert found["held_out"]["base"] == pytest.approx(expected["held_out"]["base"], abs=0.02)
