"""An error of all ranks is said once, and the message of an exhausted GPU names phase, update, rank and a way out."""

import io
from contextlib import redirect_stderr

import pytest
import torch

from hyvideo.config.schema import EVERY_PHASE, Config
from hyvideo.config.settings import SETTINGS
from hyvideo.observability.phase_timer import BETWEEN, PHASES
from hyvideo.training.failure import exit_status, out_of_memory, out_of_memory_loading, settings_that_free
from tests.support.ranks import run_on_ranks


@pytest.mark.parametrize("phase", EVERY_PHASE)
def test_each_phase_has_a_size_of_its_own_that_is_tried_first(phase: str):
    first, *others = settings_that_free(phase)
    assert SETTINGS[first].frees != EVERY_PHASE and SETTINGS[first].kind is int
    assert others[-1] == "sample_n_frames"  # the only one that changes the videos


def test_the_phases_are_those_of_the_timer():
    assert EVERY_PHASE == (*PHASES, "validation")


def test_the_message_names_phase_update_rank_and_present_values():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    text = out_of_memory(error, "update", 41, 3, Config())
    assert "rank 3 in phase 'update', update 42: CUDA out of memory. Tried to allocate 2.00 GiB." in text
    assert "mini_batch_size_per_update (now 1), activation_checkpointing (now full)" in text
    assert "more" not in text
    assert "validation_fixed_size (now " in out_of_memory(error, BETWEEN, 41, 3, Config())


def test_a_gpu_that_cannot_hold_the_models_is_told_what_needs_less():
    text = out_of_memory_loading(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"))
    assert "while the models were loaded: CUDA out of memory. Tried to allocate 2.00 GiB. More ranks" in text
    assert "use_lora (and with it alone master_weight_type bf16), offload encoders and reward need less" in text
    assert text.endswith("says what fits.")


def told(error: Exception) -> tuple[int, str]:
    with redirect_stderr(io.StringIO()) as said:
        return exit_status(error, None), said.getvalue()


def test_what_is_wrong_on_all_ranks_is_said_by_the_first_alone():
    assert run_on_ranks(2, told, ValueError("no prompts")) == [(2, "post_train.py: no prompts\n"), (2, "")]
