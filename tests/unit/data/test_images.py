"""Images are read whole or named; prompts and model must agree about having them."""

from pathlib import Path

import pytest

from hyvideo.data.images import check_images, read_image
from hyvideo.data.prompts import Prompt
from tests.support.training import noisy_image


def test_images_are_read_as_rgb(tmp_path: Path):
    noisy_image(0).convert("L").save(tmp_path / "grey.png")
    assert (read_image(str(tmp_path / "grey.png")).mode, read_image(str(tmp_path / "grey.png")).size) == (
        "RGB",
        (48, 40),
    )


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "absent"])
def test_a_damaged_image_is_named(tmp_path: Path, damage: str):
    path = tmp_path / "image.png"
    noisy_image(0).save(path)
    content = path.read_bytes()
    path.write_bytes({"cut": content[: len(content) // 2], "text": b"no image"}.get(damage, b""))
    if damage == "absent":
        path.unlink()
    with pytest.raises(ValueError, match=f"image '{path}' cannot be read"):
        read_image(str(path))
    with pytest.raises(ValueError, match=f"image '{path}' cannot be read"):
        check_images([Prompt("a cat", 0, None, str(path))], "i2v")


def test_prompts_are_those_the_model_takes(tmp_path: Path):
    noisy_image(0).save(tmp_path / "a.png")
    plain, started = Prompt("a cat", 3, None, None), Prompt("a dog", 4, None, str(tmp_path / "a.png"))
    check_images([plain], "t2v")
    check_images([started], "i2v")
    with pytest.raises(ValueError, match="1 of 2 prompts without an image, the first being index 3: 'a cat'"):
        check_images([started, plain], "i2v")
    with pytest.raises(ValueError, match="1 of 2 prompts with an image, the first being index 4"):
        check_images([plain, started], "t2v")
