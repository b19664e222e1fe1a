"""A fingerprint tells weights apart by name, size and sampled content, wherever they lie."""

import shutil
from pathlib import Path

import pytest

from hyvideo.models.fingerprint import fingerprint

LARGE = 2**23 + 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "weights" / "sub").mkdir(parents=True)
    (tmp_path / "weights" / "large.bin").write_bytes(bytes(LARGE))
    (tmp_path / "weights" / "sub" / "small.bin").write_bytes(bytes(2**21))
    return tmp_path / "weights"


def test_where_weights_lie_and_when_they_were_downloaded_does_not_count(folder, tmp_path):
    before = fingerprint([folder])
    linked = tmp_path / "linked"
    shutil.copytree(folder, linked, ignore=shutil.ignore_patterns("sub"))
    assert fingerprint([linked]) != before
    (linked / "sub").symlink_to(folder / "sub")  # as one large encoder that several models share
    for same in (shutil.copytree(folder, tmp_path / "copy"), linked):
        assert fingerprint([same]) == before
    note = folder / ".cache" / "huggingface" / "download" / "large.bin.metadata"
    note.parent.mkdir(parents=True)
    note.write_text("1795372069.1")
    assert fingerprint([folder]) == before


def test_a_small_file_is_read_whole_and_a_large_one_sampled_from_its_first_byte_to_its_last(folder):
    found = [fingerprint([folder])]
    in_small = [(place, place + 1) for place in (0, 2**20 + 3, 2**21 - 1)]
    in_large = [(0, 1), (LARGE // 2, LARGE // 2 + 2**18), (LARGE - 1, LARGE)]
    for name, size, changes in (("sub/small.bin", 2**21, in_small), ("large.bin", LARGE, in_large)):
        for start, stop in changes:
            content = bytearray(size)
            content[start:stop] = b"\1" * (stop - start)
            (folder / name).write_bytes(content)
            found.append(fingerprint([folder]))
    assert len(set(found)) == len(found) == 7


def test_names_sizes_and_the_order_of_folders_count(folder, tmp_path):
    before, other = fingerprint([folder]), tmp_path / "other"
    assert fingerprint([folder, other]) == before  # not there
    other.mkdir()
    (other / "file").write_bytes(b"x")
    assert fingerprint([folder, other]) != fingerprint([other, folder])
    (folder / "large.bin").rename(folder / "renamed.bin")
    renamed = fingerprint([folder])
    (folder / "renamed.bin").write_bytes(bytes(LARGE + 1))
    assert len({before, renamed, fingerprint([folder])}) == 3
