"""CSVs as SAGE-GRPO's release reads them: names as `index`, and images seen from the working directory."""

import logging
from pathlib import Path

import pytest

from hyvideo.data.prompts import read_prompts
from tests.support.training import noisy_image


def test_an_index_may_be_a_name_which_stands_for_one_number_wherever_it_stands(tmp_path: Path):
    (tmp_path / "one.csv").write_text("prompt,index\na cat,cat_01\na dog,3\n")
    (tmp_path / "two.csv").write_text("index,prompt\ncat_02,a cat\ncat_01,a cat\n")
    one, two = (read_prompts([tmp_path / f"{name}.csv"]) for name in ("one", "two"))
    assert one[0].index == two[1].index != two[0].index
    assert one[1].index == 3 and 2**62 <= one[0].index < 2**63
    with pytest.raises(ValueError, match="is already that of"):
        read_prompts([tmp_path / "one.csv", tmp_path / "two.csv"])


def test_an_image_is_taken_from_beside_the_csv_else_from_the_working_directory_which_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "csvs").mkdir()
    for place in (tmp_path / "both.png", tmp_path / "csvs" / "both.png", tmp_path / "here.png"):
        noisy_image(0).save(place)
    path = tmp_path / "csvs" / "prompts.csv"
    path.write_text("prompt,ref_image_path\na cat,both.png\na dog,here.png\n")
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING):
        beside, elsewhere = read_prompts([path])
    assert Path(beside.ref_image_path) == tmp_path / "csvs" / "both.png"
    assert Path(elsewhere.ref_image_path).resolve() == tmp_path / "here.png"
    (told,) = caplog.messages
    assert "line 3" in told and "here.png" in told and "working directory" in told
    with pytest.raises(ValueError, match="lies outside of image_root"):
        read_prompts([path], image_root=tmp_path / "csvs")
    monkeypatch.chdir(tmp_path / "csvs")
    with pytest.raises(ValueError, match="nor 'here.png' in the working directory"):
        read_prompts([path])
