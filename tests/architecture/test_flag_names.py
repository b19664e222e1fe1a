"""Flag names are a promise to users' scripts: the committed list may grow, and nothing in it may go."""

from pathlib import Path
from typing import get_args

import pytest

from hyvideo.config.flags import ALIASES
from hyvideo.config.settings import SETTINGS
from hyvideo.grpo.kl_controller import Schedule
from hyvideo.grpo.timesteps import Placement

FROZEN = Path(__file__).parent / "flags.txt"


def test_no_flag_was_removed_or_renamed_and_every_new_one_is_on_the_list():
    frozen = set(FROZEN.read_text(encoding="utf-8").split())
    assert sorted(frozen - set(SETTINGS) - set(ALIASES)) == [], "users' scripts pass these flags: keep the names"
    assert sorted(set(SETTINGS) - frozen) == [], f"add the new flags to {FROZEN.name}: from then on their names stay"


@pytest.mark.parametrize(("name", "known"), [("kl_schedule", Schedule), ("sde_window", Placement)])
def test_choices_of_a_flag_are_those_of_the_code_behind_it(name: str, known: object):
    assert {*SETTINGS[name].choices} == {*get_args(known)}
