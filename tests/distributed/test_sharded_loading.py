"""A network that is sharded before it has memory is filled by each rank from the rows of its own shards."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hyvideo.distributed.collectives import local_shard, whole
from hyvideo.models.adapter import base_weight, draw_adapter, save_lora
from hyvideo.models.loading import load_transformer
from hyvideo.models.parallelize import prepare_policy, shard_weights
from hyvideo.models.weight_files import SafetensorsFolder
from tests.support.equal_runs import assert_same
from tests.support.original_layout import original_transformer
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import ADAPTER, randomize
from tests.support.training import arguments, training_of


@contextmanager
def counted_bytes() -> Iterator[Counter[str]]:
    bytes_read: Counter[str] = Counter()
    read = SafetensorsFolder.read

    def counted(self: SafetensorsFolder, name: str, rows: object) -> Tensor:
        tensor = read(self, name, rows)
        bytes_read["transformer" if "transformer" in Path(self.where).parts else "rest"] += tensor.nbytes
        return tensor

    with patch.object(SafetensorsFolder, "read", counted):
        yield bytes_read


def prepare(transformer: HunyuanVideo15Transformer3DModel, adapter: str | None, sharded: bool) -> None:
    """Make an empty transformer a policy: all weights trained, a fresh adapter, or one from a folder."""
    lora = None if adapter is None else ADAPTER
    start = None if adapter in (None, "fresh") else adapter
    prepare_policy(transformer, gradient_checkpointing=False, lora=lora, pretrained_lora_path=start)
    draw_adapter(transformer, seed=7)
    if sharded:
        shard_weights(transformer, init_device_mesh("cpu", (dist.get_world_size(),)))


def load(root: Path, dtype: torch.dtype, adapter: str | None) -> tuple[dict[str, Tensor], int, int]:
    """Load a policy on this rank: the whole weights, the bytes read, and the bytes of the base's weights held here."""
    make = partial(prepare, adapter=adapter, sharded=dist.is_initialized())
    with counted_bytes() as bytes_read:
        transformer = load_transformer(root, "480p_i2v", dtype=dtype, prepare=make)
    weights = transformer.state_dict()
    held = sum(local_shard(weight).nbytes for name, weight in weights.items() if base_weight(name))
    return {name: whole(weight) for name, weight in weights.items()}, bytes_read["transformer"], held


def load_equal_to(expected: dict[str, Tensor], *arguments: object) -> tuple[int, int]:
    """Load on this rank and compare with `expected`; return the bytes read and held."""
    weights, read, held = load(*arguments)
    assert_same(weights, expected)
    assert all(weights[name].dtype == value.dtype for name, value in expected.items())
    return read, held


@pytest.fixture
def adapter_folder(original_root: Path, tmp_path: Path) -> str:
    transformer = load_transformer(original_root, "480p_i2v")
    prepare(transformer, "fresh", sharded=False)
    randomize(transformer)
    save_lora(transformer, tmp_path / "adapter")
    return str(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("dtype", "adapter"),
    [(torch.float32, None), (torch.float32, "loaded"), (torch.bfloat16, None), (torch.bfloat16, "fresh")],
)
def test_together_the_ranks_hold_the_network_and_each_reads_its_share(original_root, adapter_folder, dtype, adapter):
    """Whatever is trained, in the memory of its master weights, adapters in float32."""
    arguments = (original_root, dtype, adapter_folder if adapter == "loaded" else adapter)
    expected, _, total = load(*arguments)
    base = original_transformer("480p_i2v").to(dtype).state_dict()
    of_base = {base_weight(name): weight for name, weight in expected.items() if base_weight(name)}
    assert_same(of_base, base)
    of_adapter = [weight for name, weight in expected.items() if not base_weight(name)]
    assert bool(of_adapter) == (adapter is not None)
    assert all(weight.dtype == torch.float32 for weight in of_adapter)
    ranks = run_on_ranks(2, load_equal_to, expected, *arguments)
    stored = 4 // dtype.itemsize  # the files are float32
    assert [read for read, _ in ranks] == [stored * held for _, held in ranks]
    assert sum(held for _, held in ranks) == total


def bytes_of_runs(runs: list[list[str]]) -> list[tuple[int, int]]:
    """Build trainings; how many bytes of each transformer this rank has read, and how many it holds."""
    found = []
    for argv in runs:
        with counted_bytes() as bytes_read:
            weights = training_of(argv).policy.transformer.named_parameters()
        held = sum(local_shard(weight).nbytes for name, weight in weights if base_weight(name))
        found.append((bytes_read["transformer"], held))
    return found


def test_a_run_reads_its_shards_alone(tmp_path, root_of_four_heads, prompts_csv):
    shared = {"batch_size": 2, "enable_fsdp": True}
    runs = [
        arguments(root_of_four_heads, prompts_csv, tmp_path / name, **shared, **kind)
        for name, kind in (("full", {}), ("lora", {"use_lora": True}), ("offload", {"cpu_offload": True}))
    ]
    for ranks in zip(*run_on_ranks(2, bytes_of_runs, runs), strict=True):
        assert [read for read, _ in ranks] == [held for _, held in ranks]
        assert max(held for _, held in ranks) < 0.6 * sum(held for _, held in ranks)
