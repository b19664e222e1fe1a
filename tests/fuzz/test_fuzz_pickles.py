"""Whatever the operations of a pickled index are: plain data or a ValueError comes out, and no class is changed."""

import importlib
import pickle
import pickletools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from hyvideo.checkpoint import tensor_index, tensor_reader
from hyvideo.checkpoint.plain_pickle import Name, Record, read_pickle
from hyvideo.checkpoint.tensor_index import PICKLED_INDEX, TensorIndex
from hyvideo.checkpoint.train_state import one_process
from tests.support.fuzzing import fuzz, only_value_errors

ALLOWED = {
    module: tensor_index.ALLOWED.get(module, set()) | tensor_reader.ALLOWED.get(module, set())
    for module in {**tensor_index.ALLOWED, **tensor_reader.ALLOWED}
}
KNOWN = [(module, name) for module, names in sorted(ALLOWED.items()) for name in sorted(names)]
TEXTS = ("name", "parent", "_str", "exists", *"offset __class__ __dict__ __setstate__ __reduce__ /etc".split(), "")


def packed(text: str) -> bytes:
    """The operation that puts a short text on the stack."""
    return b"\x8c" + bytes([len(text)]) + text.encode()


def number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


NAMES = st.sampled_from([f"c{module}\n{name}\n".encode() for module, name in KNOWN])
VALUES = st.one_of(
    NAMES,
    st.sampled_from(TEXTS).map(packed),
    st.integers(-(2**70), 2**70).map(number),
    st.sampled_from([b"N", b"\x88", b"\x89", b")", b"]", b"}"]),
)
MEMO = st.tuples(st.sampled_from([b"q", b"h"]), st.integers(0, 5)).map(lambda pair: pair[0] + bytes([pair[1]]))
ACTS = st.sampled_from([bytes([code]) for code in b"(0123atlduseoRb\x81\x85\x86\x87\x90\x91\x93\x94\x8fQ.\x92\x98\x97"])
OTHERS = st.sampled_from(
    [b"I01\n", b"L5L\n", b"F1\n", b"S'a'\n", b"Pid\n", b"iposix\nmkdir\n", b"\x82\x01", b"G" + bytes(8)]
)
STATES = st.sampled_from(TEXTS[:4]).map(lambda name: b"N}" + packed(name) + b"K\x01s\x86b")
"""A state for slots: what sets attributes of a class."""

PROGRAMS = st.lists(st.one_of(VALUES, VALUES, ACTS, ACTS, MEMO, OTHERS, NAMES.flatmap(lambda n: STATES.map(n.__add__))))


def classes() -> Iterator[tuple[str, Any]]:
    """Everything that a pickle may name."""
    for module, name in KNOWN:
        if module != "pathlib._local":  # of newer Pythons
            yield f"{module}.{name}", getattr(importlib.import_module(module), name, None)


def attributes() -> dict[str, dict]:
    return {name: dict(vars(value)) for name, value in classes() if hasattr(value, "__dict__")}


def assert_plain(value: Any) -> None:
    """Every value reached is data; what is shared is looked at once."""
    seen, waiting = set(), [value]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        assert type(value) in (type(None), bool, int, str, tuple, list, dict, Name, Record)
        if isinstance(value, Record):
            waiting += [value.arguments, value.state]
        elif isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, tuple | list):
            waiting += value


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    with one_process():
        dcp.save({"policy": {"w": torch.ones(2, 3)}, "steps": 3}, checkpoint_id=tmp_path / "step_1", no_dist=True)
    return tmp_path / "step_1"


@fuzz()
@given(PROGRAMS)
def test_any_operations_give_plain_data_or_are_refused(program: list[bytes]):
    before = attributes()
    with only_value_errors("'index'"):
        assert_plain(read_pickle(b"\x80\x04" + b"".join(program) + b".", ALLOWED, "'index'"))
    assert attributes() == before


@fuzz(2)
@given(PROGRAMS, st.data())
def test_any_operations_within_an_index_leave_it_or_are_refused(checkpoint, program, data):
    path = checkpoint / PICKLED_INDEX
    honest, before, index = path.read_bytes(), attributes(), TensorIndex.read(checkpoint)
    place = data.draw(st.sampled_from([position for _, _, position in pickletools.genops(honest)]))
    path.write_bytes(honest[:place] + b"".join(program) + honest[place:])
    with only_value_errors(path):
        changed = TensorIndex.read(checkpoint)
        for tensor in changed.tensors.values():
            assert {part.file for part in tensor.parts} <= {"__0_0.distcp"}
        assert changed.tensors.keys() <= index.tensors.keys() | {*TEXTS}
    path.write_bytes(honest)
    assert attributes() == before
