"""Files that appear whole or not at all."""

from pathlib import Path

import pytest

from hyvideo.data.files import nearest_existing, replacing


def test_a_file_is_replaced_when_the_block_ends(tmp_path):
    path = tmp_path / "new" / "page.html"
    for text in ("old", "new"):
        with replacing(path) as temporary:
            temporary.write_text(text)
            assert temporary.suffix == ".html" and (text == "old" or path.read_text() == "old")
    assert path.read_text() == "new" and list(path.parent.iterdir()) == [path]


def test_a_block_that_fails_leaves_the_old_file_alone_in_its_folder(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_the_nearest_existing_place_of_a_path_to_come_is_found(tmp_path, monkeypatch):
    assert nearest_existing(tmp_path) == tmp_path
    assert nearest_existing(tmp_path / "a" / "b") == tmp_path
    monkeypatch.chdir(tmp_path)
    assert nearest_existing(Path("a")) == tmp_path
