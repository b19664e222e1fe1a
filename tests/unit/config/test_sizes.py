"""Sizes of videos as they are typed."""

import pytest

from hyvideo.config.sizes import parse_size


def test_a_size_is_height_then_width():
    assert parse_size("352x624") == (352, 624)


@pytest.mark.parametrize(
    "text", ["", "352", "352X624", "352x", "x624", "0x16", "-16x16", "352x624x3", "352 x 624", "1e3x64", "٣x٣"]
)
def test_anything_else_is_refused_with_what_was_received(text):
    with pytest.raises(ValueError, match="HEIGHTxWIDTH") as error:
        parse_size(text)
    assert repr(text) in str(error.value)
