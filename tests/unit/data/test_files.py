"""Files that appear whole or not at all, what may be replaced by them, and what is removed."""

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from hyvideo.data.files import check_output, claim_output, nearest_existing, remove, replacing


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


def listen_at(path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(str(path))


SPECIAL: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a socket": listen_at,
    "a link to a device": lambda path: path.symlink_to("/dev/null"),
    "a link to a process's output": lambda path: path.symlink_to("/proc/self/fd/1"),
}


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
def test_a_pipe_a_socket_and_a_device_are_not_replaced_by_a_file(tmp_path, make):
    path = tmp_path / "out.html"
    make(path)
    before = path.lstat()
    with pytest.raises(OSError, match="it is a .*out.html"), replacing(path) as temporary:
        temporary.write_text("page")
    assert (path.lstat().st_ino, stat.S_IFMT(path.lstat().st_mode)) == (before.st_ino, stat.S_IFMT(before.st_mode))
    assert list(tmp_path.iterdir()) == [path]


def test_an_open_file_of_a_process_keeps_its_link_even_where_it_is_an_ordinary_one(tmp_path):
    with (tmp_path / "log").open("w") as file:
        (tmp_path / "stdout").symlink_to(f"/proc/self/fd/{file.fileno()}")
        with pytest.raises(OSError, match="an open file of a process"):
            check_output(tmp_path / "stdout")


def test_a_name_that_fills_a_folders_entry_can_be_written_and_a_file_of_the_user_beside_it_stays(tmp_path):
    path, beside = tmp_path / f"{'x' * 251}.mp4", tmp_path / f".page.{os.getpid()}.tmp.html"
    beside.write_text("the user's")
    for target in (path, tmp_path / "page.html"):
        with replacing(target) as temporary:
            temporary.write_text("new")
        assert target.read_text() == "new"
    assert beside.read_text() == "the user's"


def test_an_output_that_is_an_input_by_whatever_name_is_refused(tmp_path):
    (tmp_path / "votes.json").write_text("{}")
    (tmp_path / "link.json").symlink_to("votes.json")
    claim_output(tmp_path / "new.json", [tmp_path / "votes.json", "missing"])
    for name in ("votes.json", "link.json", "../" + tmp_path.name + "/votes.json"):
        with pytest.raises(ValueError, match="is read by this command, and would be lost"):
            claim_output(tmp_path / name, ["missing", tmp_path / "votes.json"])


def test_what_is_removed_is_what_lies_there_and_nothing_that_it_leads_to(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    gone = tmp_path / "gone"
    gone.mkdir()
    (gone / "folder").mkdir()
    (gone / "folder" / "link").symlink_to(kept)
    os.mkfifo(gone / "folder" / "pipe")
    os.mkfifo(tmp_path / "pipe")
    for name, target in (("link", kept), ("lost", "nowhere")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "file").touch()
    for name in ("gone", "pipe", "link", "lost", "file", "never there"):
        remove(tmp_path / name)
    assert list(tmp_path.iterdir()) == [kept] and list(kept.iterdir()) == [kept / "file"]


def test_the_nearest_existing_place_of_a_path_to_come_is_found(tmp_path, monkeypatch):
    assert nearest_existing(tmp_path) == tmp_path
    assert nearest_existing(tmp_path / "a" / "b") == tmp_path
    monkeypatch.chdir(tmp_path)
    assert nearest_existing(Path("a")) == tmp_path
