"""Videos keep frames, size and colours through mp4; files are whole or absent, and replace nothing special."""

import os
import resource
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from imageio_ffmpeg import count_frames_and_secs, get_ffmpeg_exe

from hyvideo.data.files import check_output, claim_output, nearest_existing, remove, replacing
from hyvideo.data.videos import VideoTooLargeError, read_chosen, read_video, video_length, write_video
from tests.support.limits import limited
from tests.support.rewards import moving_square

VARYING_RATE = ["-vf", "setpts=(N+gt(N\\,4)*7*(N-4))/(12*TB)", "-fps_mode", "vfr"]
"""Options of ffmpeg after which all frames but the first ones come at an eighth of the rate."""


def noise(num_frames):
    return torch.randint(0, 256, (num_frames, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def convert(source, target, *options, start="0"):
    """Make a video of another one, with options of ffmpeg."""
    subprocess.run([get_ffmpeg_exe(), "-ss", start, "-i", source, *options, target], check=True, capture_output=True)


def psnr(a, b):
    return 10 * torch.log10(255**2 / (a.float() - b.float()).square().mean()).item()


@pytest.mark.parametrize(("num_frames", "height", "width"), [(1, 64, 64), (9, 40, 24), (9, 24, 40), (9, 34, 50)])
def test_frames_come_back_in_number_size_order_and_colour(tmp_path, num_frames, height, width):
    frames = moving_square(num_frames, height, width)
    write_video(tmp_path / "video.mp4", frames, fps=24)
    read = read_video(tmp_path / "video.mp4")
    assert read.dtype == torch.uint8 and read.shape == frames.shape and psnr(read, frames) > 28
    assert (read[0, 10, 6].int() - torch.tensor([220, 40, 40])).abs().max() <= 8


def test_chosen_frames_are_those_of_the_whole_video_which_is_compressed_as_asked(tmp_path):
    path = tmp_path / "video.mp4"
    write_video(path, moving_square(9), fps=12)
    assert video_length(path) == (9, 12)
    assert torch.equal(read_video(path, [8, 0, 3, 3]), read_video(path)[[8, 0, 3, 3]])
    with pytest.raises(ValueError, match=r"video\.mp4 .* cannot be decoded"):
        read_video(path, [9])
    for name, how in (("fine", [16]), ("usual", []), ("coarse", [25])):
        write_video(tmp_path / f"{name}.mp4", noise(5), 24, *how)
    fine, usual, coarse = ((tmp_path / f"{name}.mp4").stat().st_size for name in ("fine", "usual", "coarse"))
    assert fine >= usual > coarse


@pytest.mark.parametrize(
    ("start", "made_by", "num_frames"),
    [
        ("0", ["-c", "copy"], 33),  # as our encoder wrote it
        ("0.5", ["-c", "copy"], None),  # an edit list leaves the first frames out
        ("0", ["-pix_fmt", "yuv420p10le", "-c:v", "libx264"], 33),
        ("0", VARYING_RATE, 33),
    ],
    ids=["ours", "edited", "10 bit", "varying rate"],
)
def test_frames_chosen_by_number_are_those_of_the_other_reader(tmp_path, start, made_by, num_frames, monkeypatch):
    write_video(tmp_path / "ours.mp4", moving_square(33), fps=24)
    path = tmp_path / "made.mp4"
    convert(tmp_path / "ours.mp4", path, *made_by, start=start)

    def spread(total: int, fps: float) -> list[int]:
        assert total == (num_frames or total)
        return [0, total // 2, total - 1, total - 1]

    read = [read_chosen(path, spread, own=own) for own in (True, False)]
    assert torch.equal(*read)
    monkeypatch.setattr("hyvideo.data.videos.find_spec", lambda name: None)
    assert torch.equal(read_chosen(path, spread), read[0])


def test_a_chosen_frame_is_read_by_its_number_where_decord_is_installed(tmp_path, monkeypatch):
    pytest.importorskip("decord")
    write_video(tmp_path / "a.mp4", moving_square(9), fps=12)
    monkeypatch.setattr("hyvideo.data.videos.read_video", None)
    assert len(read_chosen(tmp_path / "a.mp4", lambda total, fps: [0, total - 1])) == 2
    (tmp_path / "b.mp4").write_bytes(b"no video")
    with pytest.raises(ValueError, match=r"b\.mp4 .* cannot be decoded"):
        read_chosen(tmp_path / "b.mp4", lambda total, fps: [0])


def test_writing_makes_the_folder_and_replaces_the_old_file_unless_the_encoder_fails(tmp_path, monkeypatch):
    path = tmp_path / "rollouts" / "step 1" / "a.mp4"
    write_video(path, moving_square(3), fps=24)
    write_video(path, moving_square(5), fps=24)
    assert len(read_video(path)) == 5
    before = path.read_bytes()
    with pytest.raises(OSError, match="encoder ended with .* and said .*width not divisible by 2"):
        write_video(path, moving_square(9, 40, 33), fps=24)
    for frames in (noise(9)[:0], noise(9).float(), noise(9)[..., :1]):
        with pytest.raises(ValueError, match="as uint8 .* received torch"):
            write_video(path, frames, fps=24)
    old = tmp_path / "ffmpeg"
    old.write_text("#!/bin/sh\ncat > /dev/null; echo Error writing trailer >&2\n")
    old.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(old))
    with pytest.raises(OSError, match="ended with status 0 and said Error writing trailer"):
        write_video(path, noise(9), fps=24)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("limit", [500, 20000])
def test_a_disk_that_fills_while_a_video_is_written_is_an_error_that_says_so(tmp_path, limit):
    said = "encoder ended with status -25 and said nothing; the disk may be full.*a.mp4"  # SIGXFSZ
    with limited(resource.RLIMIT_FSIZE, limit), pytest.raises(OSError, match=said):
        write_video(tmp_path / "a.mp4", noise(9), fps=24)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"no video" * 100])
def test_a_file_that_is_no_video_or_whose_later_frames_are_damaged_is_an_error_that_names_it(tmp_path, content):
    path = tmp_path / "broken.mp4"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"broken\.mp4 \({len(content)} bytes\) cannot be decoded"):
        read_video(path)
    with pytest.raises(ValueError, match=r"No video at .*missing\.mp4"):
        read_video(tmp_path / "missing.mp4")
    write_video(path, noise(24), fps=24)
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"mdat") + 20_000].ljust(len(content), b"\xff"))
    with pytest.raises(ValueError, match=r"broken\.mp4 .* cannot be decoded"):
        video_length(path)


def test_a_video_that_would_fill_the_memory_is_refused_while_it_is_read(tmp_path, monkeypatch):
    path, size = tmp_path / "long.mp4", 64 * 64 * 3
    write_video(path, moving_square(9), fps=24)
    monkeypatch.setattr("hyvideo.data.videos.MAX_VIDEO_BYTES", 9 * size)
    assert len(read_video(path)) == 9
    monkeypatch.setattr("hyvideo.data.videos.MAX_VIDEO_BYTES", 8 * size)
    with pytest.raises(VideoTooLargeError, match=r"has 9 or more frames of 64x64, over .* GiB when decoded"):
        read_video(path)


MANIFEST = """<?xml version="1.0"?>
<MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" mediaPresentationDuration="PT1S" minBufferTime="PT1S"
 profiles="urn:mpeg:dash:profile:isoff-on-demand:2011"><Period duration="PT1S"><AdaptationSet mimeType="video/mp4">
<Representation id="1" bandwidth="1"><BaseURL>{}</BaseURL></Representation></AdaptationSet></Period></MPD>"""


LISTS = [MANIFEST.format("file://{secret}"), MANIFEST.format("../secret.mp4"), "ffconcat version 1.0\nfile other.mp4\n"]


@pytest.mark.parametrize("content", LISTS, ids=["address", "path", "list"])
def test_a_list_of_other_files_is_no_video_whatever_its_name(tmp_path, content):
    path, secret = tmp_path / "videos" / "a.mp4", tmp_path / "secret.mp4"
    for other in (secret, path.with_name("other.mp4")):
        write_video(other, moving_square(9), fps=9)
    path.write_text(content.replace("{secret}", str(secret)))
    assert count_frames_and_secs(path)[0] > 0  # ffmpeg reads the other file, so the attack is a real one
    for read in (read_video, video_length, lambda path: read_chosen(path, lambda *_: [0])):
        with pytest.raises(ValueError, match=r"a\.mp4 .* cannot be decoded"):
            read(path)


@pytest.mark.parametrize("ending", ["mkv", "webm", "avi", "mov"])
def test_other_containers_are_read_and_frames_of_a_varying_rate_once_each(tmp_path, ending):
    constant, varying = tmp_path / "constant.mp4", tmp_path / "varying.mp4"
    write_video(constant, moving_square(9), fps=12)
    convert(constant, tmp_path / f"a.{ending}")
    assert read_video(tmp_path / f"a.{ending}").shape == (9, 64, 64, 3)
    convert(constant, varying, *VARYING_RATE, "-crf", "1")
    assert video_length(varying)[0] == 9 and psnr(read_video(varying), read_video(constant)) > 40


def claiming(content: bytes, num_frames: int) -> bytes:
    """Return a video whose index says that it has so many frames of one byte each."""
    for name, place, value in ((b"stts", 12, 0), (b"stsc", 16, 0), (b"stsz", 8, 1), (b"stsz", 12, 0)):
        start = content.index(name) + place
        content = content[:start] + struct.pack(">I", value or num_frames) + content[start + 4 :]
    return content.replace(b"ctts", b"free")


PEAK = """
import resource, sys
from pathlib import Path
from hyvideo.data.videos import read_video
try:
    read_video(Path(sys.argv[1]))
except ValueError as error:
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, error)
"""


def test_an_index_of_more_frames_than_the_file_has_takes_little_memory(tmp_path):
    path = tmp_path / "a.mp4"
    write_video(path, moving_square(9), fps=24)
    path.write_bytes(claiming(path.read_bytes(), 20_000_000))
    command = [sys.executable, "-c", PEAK, path]
    said = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True).stdout
    peak, message = said.split(" ", 1)
    assert int(peak) < 500_000, f"{int(peak) / 1e6:.1f} GB for a file of {path.stat().st_size} bytes"
    assert "a.mp4" in message and "cannot be decoded" in message


def test_a_file_of_any_name_is_replaced_when_the_block_ends_and_stays_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "new" / "page.html"
    for text in ("old", "new"):
        with replacing(path) as temporary:
            temporary.write_text(text)
            assert temporary.suffix == ".html" and (text == "old" or path.read_text() == "old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "new" and list(path.parent.iterdir()) == [path]
    beside, long = tmp_path / f".page.{os.getpid()}.tmp.html", tmp_path / f"{'x' * 251}.mp4"
    beside.write_text("the user's")
    for target in (long, tmp_path / "page.html"):
        with replacing(target) as temporary:
            temporary.write_text("new")
        assert target.read_text() == "new"
    assert beside.read_text() == "the user's"
    assert nearest_existing(tmp_path) == nearest_existing(tmp_path / "a" / "b") == tmp_path
    monkeypatch.chdir(tmp_path)
    assert nearest_existing(Path("a")) == tmp_path


SPECIAL: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
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
    with (tmp_path / "log").open("w") as file:
        (tmp_path / "stdout").symlink_to(f"/proc/self/fd/{file.fileno()}")
        with pytest.raises(OSError, match="an open file of a process"):  # though it is an ordinary one
            check_output(tmp_path / "stdout")


def test_an_output_that_is_an_input_by_whatever_name_is_refused(tmp_path):
    (tmp_path / "votes.json").write_text("{}")
    (tmp_path / "link.json").symlink_to("votes.json")
    claim_output(tmp_path / "new.json", [tmp_path / "votes.json", "missing"])
    for name in ("votes.json", "link.json", "../" + tmp_path.name + "/votes.json"):
        with pytest.raises(ValueError, match="is read by this command, and would be lost"):
            claim_output(tmp_path / name, ["missing", tmp_path / "votes.json"])


def test_what_is_removed_is_what_lies_there_and_nothing_that_it_leads_to(tmp_path):
    kept, folder = tmp_path / "kept", tmp_path / "gone" / "folder"
    kept.mkdir()
    folder.mkdir(parents=True)
    for file in (kept / "file", tmp_path / "file"):
        file.touch()
    for pipe in (folder / "pipe", tmp_path / "pipe"):
        os.mkfifo(pipe)
    for link, target in ((folder / "link", kept), (tmp_path / "link", kept), (tmp_path / "lost", "nowhere")):
        link.symlink_to(target)
    for name in ("gone", "pipe", "link", "lost", "file", "never there"):
        remove(tmp_path / name)
    assert list(tmp_path.iterdir()) == [kept] and list(kept.iterdir()) == [kept / "file"]
