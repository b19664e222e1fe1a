"""A command does not write over what it reads."""

import pytest

from scripts import plan, rehearse


@pytest.mark.parametrize("form", ["--config={}", "--config {}"])
@pytest.mark.parametrize("main", [plan.main, rehearse.main], ids=["plan", "rehearse"])
def test_a_planner_does_not_write_over_the_settings_that_it_reads(tmp_path, capsys, main, form):
    settings = tmp_path / "run.yaml"
    settings.write_text("eta: 0.4\n")
    assert main(["--world_size", "8", "--json", str(settings), *form.format(settings).split()]) == 2
    assert "is read by this command" in capsys.readouterr().err and settings.read_text() == "eta: 0.4\n"
