"""A network that is sharded before it has memory is filled by each rank from the rows of its own shards."""

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from hyvideo.distributed.collectives import local_shard
from hyvideo.models.loading import load_transformer
from hyvideo.models.weight_files import SafetensorsFolder
from tests.support.original_layout import original_transformer
from tests.support.ranks import run_on_ranks
from tests.support.training import arguments, trainer_of

WORLD_SIZE = 2


def shard(transformer: nn.Module) -> None:
    """Shard every block and the rest, as a run does."""
    for block in transformer.transformer_blocks:
        fully_shard(block)
    fully_shard(transformer)


def count_bytes() -> Counter[str]:
    """Count from now on, in this process, what is read of a model's components."""
    bytes_read: Counter[str] = Counter()
    read = SafetensorsFolder.read

    def counted(self: SafetensorsFolder, name: str, rows: object) -> Tensor:
        tensor = read(self, name, rows)
        bytes_read["transformer" if "transformer" in Path(self.where).parts else "rest"] += tensor.nbytes
        return tensor

    SafetensorsFolder.read = counted
    return bytes_read


def load_on_rank(rank: int, root: str, folder: str) -> None:
    """Be one rank: load, and save what was read and what the whole network is."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD_SIZE)
    bytes_read = count_bytes()
    transformer = load_transformer(root, "480p_i2v", dtype=torch.float32, parallelize=shard)
    local = sum(parameter.to_local().nbytes for parameter in transformer.parameters())
    whole = {name: tensor.full_tensor() for name, tensor in transformer.state_dict().items()}
    torch.save({"read": bytes_read["transformer"], "local": local, "whole": whole}, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture
def ranks(original_root: Path, tmp_path: Path) -> list[dict]:
    """What every rank has after loading."""
    mp.spawn(load_on_rank, args=(str(original_root), str(tmp_path)), nprocs=WORLD_SIZE)
    return [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(WORLD_SIZE)]


def test_together_the_ranks_hold_the_network_and_each_reads_its_share_alone(ranks: list[dict]):
    expected = original_transformer("480p_i2v").state_dict()
    for rank in ranks:
        assert rank["whole"].keys() == expected.keys()
        assert [name for name in expected if not torch.equal(rank["whole"][name], expected[name])] == []
        assert rank["read"] == rank["local"]
    total = sum(tensor.nbytes for tensor in expected.values())
    assert sum(rank["read"] for rank in ranks) == total


def bytes_of_a_run(argv: list[str]) -> tuple[int, int]:
    """Build a run's trainer; how many bytes of the transformer this rank has read, and how many it holds."""
    bytes_read = count_bytes()
    transformer = trainer_of(argv).state.transformer
    return bytes_read["transformer"], sum(local_shard(parameter).nbytes for parameter in transformer.parameters())


def test_a_run_reads_its_shards_alone(tmp_path: Path, root_of_four_heads: Path, prompts_csv: Path):
    argv = arguments(root_of_four_heads, prompts_csv, tmp_path / "run", batch_size=2, enable_fsdp=True)
    ranks = run_on_ranks(2, bytes_of_a_run, argv)
    assert [read for read, _ in ranks] == [held for _, held in ranks]
    assert max(held for _, held in ranks) < 0.6 * sum(held for _, held in ranks)
