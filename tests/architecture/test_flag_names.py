"""Flag names are a promise to users' scripts: the committed list may grow, and nothing in it may go."""

from pathlib import Path

from hyvideo.config.knobs import KNOBS

FROZEN = Path(__file__).parent / "flags.txt"


def frozen_names() -> list[str]:
    """The names on the committed list."""
    return FROZEN.read_text(encoding="utf-8").split()


def test_no_flag_was_removed_or_renamed():
    gone = sorted(set(frozen_names()) - set(KNOBS))
    assert gone == [], "users' scripts pass these flags: keep the names"


def test_every_new_flag_is_on_the_list():
    new = sorted(set(KNOBS) - set(frozen_names()))
    assert new == [], f"add the new flags to {FROZEN.name}: from then on their names stay"


def test_the_list_is_sorted_and_has_no_name_twice():
    assert frozen_names() == sorted(set(frozen_names()))
