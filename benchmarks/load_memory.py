"""Host memory of loading a transformer of HunyuanVideo-1.5's width from the original layout.

Writes random bfloat16 weights (shards of at most 2 GB), loads them in fresh processes, prints the peak of each, and
deletes them. 54 layers are the real model (16.7 GB on the disk), 27 half of it. With several processes the network is
sharded by FSDP2 on the CPU, and each reads its own rows.

Example: `python -m benchmarks.load_memory --num_layers 27`
"""

import argparse
import json
import resource
import shutil
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate import init_empty_weights
from diffusers import HunyuanVideo15Transformer3DModel
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyvideo.config.flags import Parser
from hyvideo.config.schema import ModelConfig
from hyvideo.models.adapter import draw_adapter, lora_config
from hyvideo.models.conversion import original_tensors
from hyvideo.models.loading import load_transformer
from hyvideo.models.original_config import original_transformer_config
from hyvideo.models.parallelize import prepare_policy, shard_weights
from hyvideo.planning.networks import made_in

WEIGHTS = "diffusion_pytorch_model{suffix}.safetensors"


def write_checkpoint(_: int, root: Path, num_layers: int) -> None:
    """Write `root/transformer/480p_t2v` with random weights; `_` is the number that `spawn` gives its only process."""
    with init_empty_weights(), made_in(torch.bfloat16):
        empty = HunyuanVideo15Transformer3DModel(num_layers=num_layers, task_type="t2v")
    folder = root / "transformer" / "480p_t2v"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(original_transformer_config(empty.config)))
    tensors = dict(original_tensors(empty.state_dict()))
    shards = split_torch_state_dict_into_shards(tensors, filename_pattern=WEIGHTS, max_shard_size="2GB")
    for file, names in shards.filename_to_tensors.items():
        save_file({name: torch.randn_like(tensors[name], device="cpu") for name in names}, folder / file)
    index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
    (folder / f"{WEIGHTS.format(suffix='')}.index.json").write_text(json.dumps(index))


def measure(rank: int, root: Path, processes: int, port: int, lora_r: int) -> None:
    """Load in this process and print its peak beyond what it held before."""
    mesh = None
    if processes > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=processes)
        mesh = init_device_mesh("cpu", (processes,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.perf_counter()
    transformer = load_transformer(root, dtype=torch.bfloat16, prepare=partial(_prepare, mesh=mesh, lora_r=lora_r))
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    held = sum((p.to_local() if processes > 1 else p).nbytes for p in transformer.parameters())
    print(
        f"process {rank}: holds {held / 1e9:.2f} GB, peak {peak / 1e9:.2f} GB beyond the {before / 1e9:.2f} GB before: "
        f"{peak / held:.3f} of what it holds, {seconds:.0f} s",
        flush=True,
    )
    if processes > 1:
        dist.destroy_process_group()


def _prepare(transformer: HunyuanVideo15Transformer3DModel, mesh: DeviceMesh | None, lora_r: int) -> None:
    """Add an adapter where one is wanted, and shard over several processes."""
    if lora_r:
        lora = lora_config(lora_r, lora_r, ModelConfig().lora_target_modules)
        prepare_policy(transformer, gradient_checkpointing=False, lora=lora)
        draw_adapter(transformer, seed=0)
    if mesh is not None:
        shard_weights(transformer, mesh)


def main() -> int:
    """Write, load, print, delete; returns the exit status (2 when there is too little room)."""
    parser = Parser("load_memory", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--num_layers", type=int, default=27)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--lora_r", type=int, default=0, help="add an adapter of this rank; default none")
    parser.add_argument("--folder", type=Path, default=Path("outputs/load_memory"), help="for the weights; deleted")
    parser.add_argument("--port", type=int, default=29531, help="on which several processes meet")
    arguments = parser.parse_args()
    if arguments.folder.exists():
        print(f"load_memory: '{arguments.folder}' exists; name a new folder.", file=sys.stderr)
        return 2
    try:
        # Not in this process: its peak would be the one that the loaders start from.
        mp.spawn(write_checkpoint, (arguments.folder, arguments.num_layers))
        settings = (arguments.folder, arguments.processes, arguments.port, arguments.lora_r)
        mp.spawn(measure, settings, nprocs=arguments.processes)
    finally:
        shutil.rmtree(arguments.folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
