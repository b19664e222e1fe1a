"""Prompt CSVs and their images: prompts come out, or a ValueError that names the file; nothing else is touched."""

import io
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hyvideo.data.images import MAX_PIXELS, read_image
from hyvideo.data.prompts import COLUMNS, read_prompts
from tests.support.fuzzing import damaged, fuzz, only_value_errors

ALPHABET = st.text(st.sampled_from("prompt,index,seed,ref_image_path\n\r\"\0 \t'15-é\ufeff"), max_size=60)
IMAGES = ("inside.png", "../secret.png", "link.png", "folder/a.png", "loop", "pipe", "folder", "../root/inside.png")
CELLS = st.one_of(
    st.sampled_from(["a cat", "", "0", "7", "-1", "9" * 19, "9" * 5000, "٣", "1.0", "1e3", "nan", "\0", "~", "."]),
    st.sampled_from([*IMAGES, "/etc/passwd", "/dev/zero", "inside.png\0", "a" * 300, "../" * 400 + "etc/passwd"]),
    st.sampled_from(["=1+1", "\u2028", "\ufeff", "\r", "\n", '"', ",", "x" * 140_000]),
    st.text(max_size=8),
)
HEADERS = st.one_of(
    st.permutations(COLUMNS), st.lists(st.one_of(st.sampled_from(COLUMNS), CELLS), min_size=1, max_size=5)
)


@st.composite
def csv_texts(draw: st.DrawFn) -> bytes:
    """A header and rows, written in one of the ways that programs write them, and some that none does."""
    header = draw(HEADERS)
    rows = draw(st.lists(st.lists(CELLS, min_size=0, max_size=len(header) + draw(st.integers(0, 1))), max_size=4))
    separator, end = (
        draw(st.sampled_from([",", ",", ",", ", ", ";", "\t"])),
        draw(st.sampled_from(["\n", "\r\n", "\r"])),
    )
    quoting = draw(st.sampled_from(["all", "all", "none", "open"]))
    lines = []
    for row in [header, *rows]:
        quoted = {"all": ['"' + c.replace('"', '""') + '"' for c in row], "none": row, "open": [f'"{c}' for c in row]}
        lines.append(separator.join(quoted[quoting]))
    mark = draw(st.sampled_from(["", "", "\ufeff", "\ufeff\ufeff"]))
    encoding = draw(st.sampled_from(["utf-8", "utf-8", "utf-8", "utf-16", "utf-32-be", "latin-1", "cp1252"]))
    return (mark + end.join(lines)).encode(encoding, "surrogatepass" if "utf" in encoding else "replace")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of images with ways out of it: links to a file and to a folder, a loop, a pipe."""
    folder = tmp_path / "root"
    (tmp_path / "elsewhere").mkdir()
    folder.mkdir()
    for file in (tmp_path / "secret.png", tmp_path / "elsewhere" / "a.png", folder / "inside.png"):
        file.write_bytes(b"x")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "folder").symlink_to(tmp_path / "elsewhere")
    (folder / "loop").symlink_to(folder / "loop")
    os.mkfifo(folder / "pipe")
    (folder / "prompts.csv").touch()
    return folder


def listing(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.lstat().st_size) for path in folder.rglob("*") if path.name != "prompts.csv")


@fuzz()
@given(
    st.one_of(
        csv_texts(),
        csv_texts(),
        st.binary(max_size=60),
        ALPHABET.map(lambda text: b"prompt,index,seed\n" + text.encode()),
        ALPHABET.map(str.encode),
    ),
    st.booleans(),
)
def test_any_csv_gives_prompts_or_a_value_error_that_names_the_file(root: Path, content: bytes, confined: bool):
    (root / "prompts.csv").write_bytes(content)
    before = listing(root.parent)
    with only_value_errors("prompts.csv"):
        prompts = read_prompts([root / "prompts.csv"], image_root=root if confined else None)
        assert prompts and all(prompt.text == prompt.text.strip() != "" for prompt in prompts)
        assert len({prompt.index for prompt in prompts}) == len(prompts)
        assert all(0 <= number < 2**63 for p in prompts for number in (p.index, p.seed) if number is not None)
        images = [Path(prompt.ref_image_path) for prompt in prompts if prompt.ref_image_path]
        assert all(image.is_file() for image in images)
        assert not confined or all(image.resolve().is_relative_to(root) for image in images)
    assert listing(root.parent) == before


@fuzz(5)
@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\r")).map(str.strip).filter(bool),
        min_size=1,
        max_size=4,
    )
)
def test_any_texts_written_as_csv_come_back(tmp_path: Path, texts: list[str]):
    quoted = ['"' + text.replace('"', '""') + '"' for text in texts]
    (tmp_path / "prompts.csv").write_bytes("\n".join(["prompt", *quoted]).encode())
    assert [prompt.text for prompt in read_prompts([tmp_path / "prompts.csv"])] == texts


def image_file(kind: str, mode: str) -> bytes:
    """A small image as a file of one kind, with what such files carry beside the pixels."""
    stream = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.linear_gradient("L").resize((9, 7)).convert(mode).save(stream, kind, exif=exif, icc_profile=b"x" * 200)
    return stream.getvalue()


FILES = [image_file(kind, mode) for kind, mode in (("PNG", "P"), ("PNG", "RGBA"), ("JPEG", "RGB"), ("WEBP", "RGBA"))]


@fuzz(2)
@given(st.one_of(st.sampled_from(FILES).flatmap(damaged), st.binary(max_size=40)))
def test_any_image_is_read_whole_or_refused_by_name(tmp_path: Path, content: bytes):
    (tmp_path / "any.png").write_bytes(content)
    with only_value_errors("any.png"):
        image = read_image(str(tmp_path / "any.png"))
        assert image.mode == "RGB" and image.width * image.height <= MAX_PIXELS
