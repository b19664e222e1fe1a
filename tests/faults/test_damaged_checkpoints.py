"""Whatever happens to the bytes of a checkpoint: it loads as it was saved, or says that it cannot."""

import random
from pathlib import Path

import pytest
import torch

from hyvideo.checkpoint.tensors import MANIFEST, load_tensors, verify_files
from hyvideo.checkpoint.train_state import begin_save, latest_checkpoint, read_facts

FACTS = {"round": 4, "sampler": {"position": 12}}


def tensors(seed: int) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "policy": {"weight": torch.randn(7, 5, generator=generator), "bias": torch.randn(7, generator=generator)},
        "optimizer": {"step": torch.tensor(3.0)},
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    begin_save(tmp_path / "checkpoints", 1, tensors(1), FACTS).finish()
    return begin_save(tmp_path / "checkpoints", 2, tensors(2), FACTS).finish()


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Flip a bit, cut the end off, write a page of zeros, or append something."""
    place = chance.randrange(len(content))
    before, after = content[:place], content[place + 1 :]
    zeros = bytes(min(512, len(content) - place))
    flipped = before + bytes([content[place] ^ 1 << chance.randrange(8)]) + after
    longer = content + chance.randbytes(chance.randrange(1, 64))
    return chance.choice((flipped, before, before + zeros + content[place + 512 :], longer))


def load(checkpoint: Path) -> None:
    """Load as a resumed run does and compare with what was saved; a ValueError says that damage was found."""
    found = latest_checkpoint(checkpoint.parent)
    assert found is not None and found.name in ("step_1", "step_2")
    facts = read_facts(found)
    verify_files(found)
    received = tensors(99)
    load_tensors(found, received)
    saved = tensors(facts["step"])
    assert {name: facts[name] for name in FACTS} == FACTS
    for group in saved:
        assert all(torch.equal(received[group][name], saved[group][name]) for name in saved[group])


def inject(checkpoint: Path, count: int) -> int:
    """Damage one file `count` times, restoring it after each; returns how often the damage was found."""
    chance, found = random.Random(0), 0
    files = [*sorted(path for path in checkpoint.iterdir() if path.is_file()), checkpoint.parent / "latest"]
    for number in range(count):
        path = files[number % len(files)]
        content = path.read_bytes()
        path.write_bytes(changed := damaged(content, chance))
        try:
            load(checkpoint)
        except ValueError as error:
            found += 1
            assert str(checkpoint.parent) in str(error)
        else:
            assert changed == content or path.name in (MANIFEST, "latest"), f"damage {number}, of {path.name}, passed"
        path.write_bytes(content)
    load(checkpoint)
    return found


@pytest.mark.parametrize(("count", "least"), [(60, 50), pytest.param(5000, 4000, marks=pytest.mark.slow)])
def test_damage_of_any_file_is_found_or_harmless(checkpoint: Path, count: int, least: int):
    assert inject(checkpoint, count) >= least
