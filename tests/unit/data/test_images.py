"""Images are read whole or named; prompts and model must agree about having them."""

import struct
import zlib
from pathlib import Path

import pytest
from PIL import ExifTags, Image

from hyvideo.data.images import check_images, check_task, read_image
from hyvideo.data.prompts import Prompt
from tests.support.training import noisy_image


def test_images_are_read_as_rgb_and_upright(tmp_path):
    noisy_image(0).convert("L").save(tmp_path / "grey.png")
    image = read_image(str(tmp_path / "grey.png"))
    assert (image.mode, image.size) == ("RGB", (48, 40))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # held upright: rows are columns
    noisy_image(0).save(tmp_path / "upright.jpg", exif=exif)
    assert read_image(str(tmp_path / "upright.jpg")).size == (40, 48)


def hidden(mode: str) -> Image.Image:
    """Return an image whose left half is green under a layer that lets nothing of it through, its right half red."""
    image = Image.new("RGBA", (8, 4), (255, 0, 0, 255))
    image.paste((0, 255, 0, 0), (0, 0, 4, 4))
    return image if mode == "RGBA" else image.convert("LA") if mode == "LA" else image.quantize(4)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
@pytest.mark.parametrize("kind", ["png", "webp"])
def test_what_an_image_hides_is_white_and_no_colour_that_nobody_has_seen(tmp_path, mode, kind):
    hidden(mode).save(tmp_path / f"a.{kind}", lossless=True)
    image = read_image(str(tmp_path / f"a.{kind}"))
    right = (76, 76, 76) if mode == "LA" else (255, 0, 0)
    assert (image.mode, image.getpixel((0, 0)), image.getpixel((7, 3))) == ("RGB", (255, 255, 255), right)
    image = Image.new("RGBA", (2, 2), (0, 0, 0, 51))
    image.save(tmp_path / f"pale.{kind}", lossless=True)
    assert read_image(str(tmp_path / f"pale.{kind}")).getpixel((0, 0)) == (204, 204, 204)


def test_a_colour_that_a_file_names_as_transparent_is_white(tmp_path):
    Image.new("RGB", (2, 2), (0, 255, 0)).save(tmp_path / "a.png", transparency=(0, 255, 0))
    assert read_image(str(tmp_path / "a.png")).getpixel((0, 0)) == (255, 255, 255)


def mistyped(path: Path, place: int, kind: int) -> str:
    """Write a turned photo whose EXIF has one byte changed."""
    exif = Image.Exif()
    exif[ExifTags.Base.BitsPerSample], exif[ExifTags.Base.Make] = (8, 8, 8), "Camera"
    exif[ExifTags.Base.Orientation], exif[ExifTags.Base.XResolution] = 6, 72.0
    noisy_image(0).save(path, exif=exif)
    content = bytearray(path.read_bytes())
    content[content.index(b"Exif\0\0") + 6 + place] = kind
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize(("place", "kind"), [(11, 6), (23, 1), (47, 13), (49, 1)])
def test_an_image_with_a_wrong_exif_tag_is_named(tmp_path, place, kind):
    path = mistyped(tmp_path / "a.jpg", place, kind)
    with pytest.raises(ValueError, match=f"image '{path}' cannot be read"):
        read_image(path)


@pytest.mark.parametrize("kind", [1, 2])
def test_an_orientation_that_is_no_number_turns_nothing(tmp_path, kind):
    path = mistyped(tmp_path / "a.jpg", 37, kind)
    assert read_image(path).size == (48, 40)


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "absent"])
def test_a_damaged_image_is_named(tmp_path, damage):
    path = tmp_path / "image.png"
    noisy_image(0).save(path)
    content = path.read_bytes()
    path.write_bytes({"cut": content[: len(content) // 2], "text": b"no image"}.get(damage, b""))
    if damage == "absent":
        path.unlink()
    with pytest.raises(ValueError, match=f"image '{path}' cannot be read"):
        read_image(str(path))
    with pytest.raises(ValueError, match=f"image '{path}' cannot be read"):
        check_images([Prompt("a cat", 0, None, str(path))])


def test_prompts_are_those_the_model_takes():
    plain, started = Prompt("a cat", 3, None, None), Prompt("a dog", 4, None, "a.png")
    check_task([plain], "t2v")
    check_task([started], "i2v")
    with pytest.raises(ValueError, match="1 of 2 prompts without an image .*, the first being index 3: 'a cat'"):
        check_task([started, plain], "i2v")
    with pytest.raises(ValueError, match="1 of 2 prompts with an image .*, the first being index 4: 'a dog'"):
        check_task([plain, started], "t2v")


def test_an_image_that_would_fill_the_memory_is_refused_before_it_is_decoded(tmp_path):
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 40_000, 30_000, 8, 2, 0, 0, 0)), (b"IDAT", b""), (b"IEND", b"")]
    content = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    with pytest.raises(ValueError, match="cannot be read"):
        read_image(str(tmp_path / "bomb.png"))


def test_the_limit_is_our_own(tmp_path, monkeypatch):
    noisy_image(0).save(tmp_path / "a.png")
    monkeypatch.setattr("hyvideo.data.images.MAX_PIXELS", 48 * 40)
    assert read_image(str(tmp_path / "a.png")).size == (48, 40)
    monkeypatch.setattr("hyvideo.data.images.MAX_PIXELS", 48 * 40 - 1)
    with pytest.raises(ValueError, match="it has 48 x 40 pixels, more than 1919"):
        read_image(str(tmp_path / "a.png"))


@pytest.mark.parametrize("kind", ["gif", "bmp", "tiff", "ppm", "eps"])
def test_other_formats_and_16_bits_are_refused(tmp_path, kind):
    noisy_image(0).save(tmp_path / f"a.{kind}")
    with pytest.raises(ValueError, match="Expected a whole PNG, JPEG or WebP file"):
        read_image(str(tmp_path / f"a.{kind}"))
    Image.new("I;16", (8, 8), 40000).save(tmp_path / "deep.png")
    with pytest.raises(ValueError, match="deep.png' cannot be read: it has 16 bits per value"):
        read_image(str(tmp_path / "deep.png"))
