"""Storages are counted once, from when they are made until they are freed."""

import torch

from hyvideo.planning.peak_memory import PeakMemory

MIB = 2**20


def test_the_peak_is_the_most_that_was_alive_at_one_time_and_a_new_one_begins_at_what_is_in_use():
    with PeakMemory() as memory:
        first = torch.empty(MIB, dtype=torch.uint8)
        second = torch.empty(2 * MIB, dtype=torch.uint8)
        del first
        third = torch.empty(MIB, dtype=torch.uint8)
    assert memory.peak == 3 * MIB and memory.current == 3 * MIB
    del second, third
    assert memory.current == 0
    with PeakMemory() as memory:  # views and changes in place take nothing
        whole = torch.zeros(MIB, dtype=torch.uint8)
        views = [whole[:10], whole.view(2, -1), whole.add_(1)]
    assert len(views) == 3 and memory.peak == MIB
    with PeakMemory() as memory:
        kept = torch.empty(MIB, dtype=torch.uint8)
        torch.empty(4 * MIB, dtype=torch.uint8)
        memory.peak = memory.current
        assert memory.peak == MIB
        torch.empty(MIB, dtype=torch.uint8)
    assert kept.numel() == MIB and memory.peak == 2 * MIB


def test_a_storage_that_is_resized_counts_with_its_new_size():
    resize = torch.UntypedStorage.resize_
    with PeakMemory() as memory:
        tensor = torch.zeros(MIB, dtype=torch.uint8)
        tensor.untyped_storage().resize_(0)
        assert memory.current == 0
        tensor.untyped_storage().resize_(2 * MIB)
    assert memory.peak == 2 * MIB
    assert torch.UntypedStorage.resize_ is resize, "it leaves storages as they were"
