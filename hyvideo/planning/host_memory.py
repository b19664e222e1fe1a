"""Host memory of a process: what it reads there before it is on the GPU, and what stays."""

from dataclasses import dataclass

from hyvideo.algorithms.algorithm import algorithm_class
from hyvideo.algorithms.weights_copy import starts_at_base
from hyvideo.config.schema import Config
from hyvideo.distributed.layout import layout_of
from hyvideo.planning.networks import Networks
from hyvideo.planning.traffic import ParameterCounts
from hyvideo.training.build import DTYPES


@dataclass(frozen=True)
class HostMemory:
    """Bytes of networks in one process's host memory, the process itself and what it computes with left out.

    Attributes:
        loading: the most before the run begins; what belongs on the GPU is read there tensor by tensor, but reward
            networks and adapters are made here first (`hyvideo.training.build.open_run`).
        training: what stays: offloaded shards, anchor, rewards and encoders, and the copy that `async_save` writes.
    """

    loading: int
    training: int


def host_memory(
    config: Config, networks: Networks, parameters: ParameterCounts, *, world_size: int, checkpoint_bytes: int
) -> HostMemory:
    """Work out the host memory of one process.

    `checkpoint_bytes` are of one checkpoint: trained weights, optimizer states, and the algorithm's copies of them.
    """
    parallel, size = config.parallel, DTYPES[config.model.master_weight_type].itemsize
    sharded = parallel.enable_fsdp and (world_size > 1 or "weights" in parallel.offload)
    shards = layout_of(config, world_size).num_shards if sharded else 1
    resting = networks.reward_bytes if "reward" in parallel.offload else 0
    trained = (4 if config.model.use_lora else size) * parameters.trained  # adapters are float32 always
    kept = 0
    if "weights" in parallel.offload:
        kept = checkpoint_bytes + size * parameters.total  # the weights that are not trained, and gradients
    elif "anchor" in parallel.offload:
        kept = trained * algorithm_class(config.grpo.algorithm).num_copies(config)
    if config.optimizer.ema_decay and "ema" in parallel.offload and "weights" not in parallel.offload:
        kept += trained
    if config.rollout.base_interval and not starts_at_base(config.model):
        kept += trained
    kept += checkpoint_bytes if config.run.async_save else 0
    adapter = parameters.trained if config.model.use_lora else 0  # whole in every process, in float32
    base = size * (parameters.total - adapter) // shards if sharded and "weights" in parallel.offload else 0
    resting += networks.encoder_bytes if "encoders" in parallel.offload else 0
    return HostMemory(
        loading=max(networks.reward_bytes, resting + 4 * adapter + base),
        training=kept // shards + resting,
    )
