"""A fingerprint tells weights apart by name, size and sampled content, wherever they lie."""

import shutil
from pathlib import Path

import pytest

from hyvideo.models.fingerprint import fingerprint

LARGE = 2**23 + 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files, one of them too large to be read whole."""
    (tmp_path / "weights" / "sub").mkdir(parents=True)
    (tmp_path / "weights" / "large.bin").write_bytes(bytes(LARGE))
    (tmp_path / "weights" / "sub" / "small.bin").write_bytes(bytes(2**21))
    return tmp_path / "weights"


def test_a_copy_elsewhere_is_the_same(folder: Path, tmp_path: Path):
    assert fingerprint([shutil.copytree(folder, tmp_path / "copy")]) == fingerprint([folder])


def test_when_weights_were_downloaded_does_not_count(folder: Path):
    before = fingerprint([folder])
    note = folder / ".cache" / "huggingface" / "download" / "large.bin.metadata"
    note.parent.mkdir(parents=True)
    note.write_text("1795372069.1")
    assert fingerprint([folder]) == before


@pytest.mark.parametrize("place", [0, 2**20 + 3, 2**21 - 1])
def test_one_byte_of_a_small_file_changes_it(folder: Path, place: int):
    before = fingerprint([folder])
    content = bytearray(2**21)
    content[place] = 1
    (folder / "sub" / "small.bin").write_bytes(content)
    assert fingerprint([folder]) != before


def test_a_large_file_is_sampled_from_its_first_byte_to_its_last(folder: Path):
    found = {fingerprint([folder])}
    for start, stop in ((0, 1), (LARGE // 2, LARGE // 2 + 2**18), (LARGE - 1, LARGE)):
        content = bytearray(LARGE)
        content[start:stop] = b"\1" * (stop - start)
        (folder / "large.bin").write_bytes(content)
        found.add(fingerprint([folder]))
    assert len(found) == 4


def test_names_sizes_and_the_order_of_folders_count(folder: Path, tmp_path: Path):
    before, other = fingerprint([folder]), tmp_path / "other"
    assert fingerprint([folder, other]) == before  # not there
    other.mkdir()
    (other / "file").write_bytes(b"x")
    assert fingerprint([folder, other]) != fingerprint([other, folder])
    (folder / "large.bin").rename(folder / "renamed.bin")
    assert fingerprint([folder]) != before
    renamed = fingerprint([folder])
    (folder / "renamed.bin").write_bytes(bytes(LARGE + 1))
    assert fingerprint([folder]) != renamed
