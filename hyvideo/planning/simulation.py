"""One rank of a run on ranks and tensors that do not exist: the real code, the real sizes, nothing computed.

Sharding, checkpointing, attention, optimizers and the anchor are the run's own, on the pretended device; collectives
return at once.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor, nn

from hyvideo.algorithms.optimizer import build_optimizers
from hyvideo.config.schema import Config
from hyvideo.distributed.collectives import local_shard
from hyvideo.distributed.mesh import Mesh, mesh_of
from hyvideo.models.diffusers_logging import without_diffusers_logs
from hyvideo.models.parallelize import forget_gathered_weights, trainable_parameters
from hyvideo.planning.networks import made_in
from hyvideo.planning.own_process import in_own_process
from hyvideo.planning.pretend_backend import NAME
from hyvideo.planning.pretend_device import PretendDevice
from hyvideo.training.build import DTYPES, is_sharded, make_policy_of


@dataclass(frozen=True)
class SimulatedCase:
    """What is simulated.

    Attributes:
        transformer: config of the diffusers transformer; its `num_layers` may be lowered.
        latent_shape: `(C, F', H', W')` of one video.
        num_text: text tokens of a prompt.
        rollout_rows: rows of one forward pass of the rollout, guidance's included.
        update_rows: rows of one forward and backward pass of the update.
        validation: latents of one video and rows of one forward pass of validation; None: there is no validation.
    """

    transformer: Mapping[str, Any]
    latent_shape: tuple[int, int, int, int]
    num_text: int
    rollout_rows: int
    update_rows: int
    validation: tuple[tuple[int, int, int, int], int] | None = None

    def with_depth(self, num_layers: int) -> "SimulatedCase":
        """Return the case with another number of transformer blocks."""
        return replace(self, transformer={**self.transformer, "num_layers": num_layers})


@dataclass(frozen=True)
class Peaks:
    """Bytes of the transformer, its gradients, optimizer states and activations on one rank, the anchor left out.

    Attributes:
        weights: this rank's shard of the weights.
        states: its shard of the optimizer states.
        trained: its shard of the trained weights, which is what an anchor takes.
        rollout: the most in use in the rollout's forward pass, weights and states included; likewise below.
        anchor: the most in the anchor's forward pass, over the update's rows.
        backward: the most in a forward and backward pass, gradients included.
        optimizer: the most while the gradient is clipped and the weights are moved.
        validation: the most in validation's forward pass; 0 without one.
        gathered: weights that a forward pass without gradients leaves gathered from other ranks.
    """

    weights: int
    states: int
    trained: int
    rollout: int
    anchor: int
    backward: int
    optimizer: int
    validation: int = 0
    gathered: int = 0


def simulate(config: Config, case: SimulatedCase, world_size: int) -> Peaks:
    """Run a rollout's and a validation's forward pass and an update on rank 0 of `world_size` ranks that do not exist.

    Raises:
        ValueError: the ranks do not divide as `config.parallel` says.
    """
    return in_own_process(_simulate, config, case, world_size)


def _simulate(config: Config, case: SimulatedCase, world_size: int) -> Peaks:
    with ExitStack() as stack:
        stack.enter_context(fake_ranks(world_size))
        memory = PretendDevice()
        mesh = mesh_of(config, NAME)
        stack.enter_context(memory)
        transformer = policy_network(config, case.transformer, mesh)
        parameters = trainable_parameters(transformer)
        weights = memory.current
        optimizers = build_optimizers(parameters, config.optimizer)
        peaks, dtype = {}, DTYPES[config.model.dtype]
        with torch.device(NAME), torch.autocast(NAME, dtype, enabled=dtype != torch.float32):
            passes = {"rollout": (case.latent_shape, case.rollout_rows)}
            passes |= {"anchor": (case.latent_shape, case.update_rows)}
            passes |= {"validation": case.validation} if case.validation else {}
            for shape, rows in set(passes.values()):
                memory.restart()
                with torch.no_grad():
                    _velocity(transformer, shape, case.num_text, rows)
                peaks |= {name: memory.peak for name, sizes in passes.items() if sizes == (shape, rows)}
            after_passes = memory.current
            forget_gathered_weights(transformer)
            gathered = after_passes - memory.current
            for _ in range(2):  # the second micro-batch finds the gradients of the first
                memory.restart()
                _velocity(transformer, case.latent_shape, case.num_text, case.update_rows).square().mean().backward()
            peaks["backward"] = memory.peak
        memory.restart()
        before = memory.current
        nn.utils.clip_grad_norm_(parameters.values(), config.optimizer.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
        states = memory.current - before
        peaks = {phase: peak + states for phase, peak in peaks.items()} | {"optimizer": memory.peak}
        trained = sum(local_shard(parameter).nbytes for parameter in parameters.values())
    return Peaks(weights=weights, states=states, trained=trained, gathered=gathered, **peaks)


@contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[None]:
    """Be one rank of a process group without other ranks."""
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def policy_network(
    config: Config, network: Mapping[str, Any], mesh: Mesh | None = None
) -> HunyuanVideo15Transformer3DModel:
    """Make the policy as a run does, on the pretended device, or without a mesh on meta.

    An adapter is always a new one.
    """
    config = replace(config, model=replace(config.model, pretrained_lora_path=None))
    model = config.model
    with without_diffusers_logs(), made_in(DTYPES[model.master_weight_type]), torch.device("meta"):
        transformer = HunyuanVideo15Transformer3DModel.from_config(dict(network))
    with made_in(DTYPES[model.master_weight_type]):
        make_policy_of(transformer, config, mesh or Mesh(), draw=False)
    if mesh is not None and not is_sharded(config, mesh):
        give_memory(transformer)
    return transformer


def give_memory(network: nn.Module, device: str = NAME) -> None:
    """Put a network's weights from the meta device on the pretended one, or in pretended host memory (`cpu`)."""

    def made(weight: Tensor) -> Tensor:
        """Return a weight of the same shape and dtype that has memory."""
        return torch.empty(weight.shape, dtype=weight.dtype, device=device)

    for module in network.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(made(weight), weight.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = made(buffer)


def _velocity(
    transformer: HunyuanVideo15Transformer3DModel, latent_shape: tuple[int, ...], num_text: int, rows: int
) -> Tensor:
    """Call the transformer for `rows` rows of unlike length, as prompts have."""
    settings, (_, *size) = transformer.config, latent_shape
    return transformer(
        hidden_states=torch.empty(rows, settings.in_channels, *size),
        timestep=torch.empty(rows),
        timestep_r=torch.empty(rows) if settings.use_meanflow else None,
        encoder_hidden_states=[torch.empty(max(1, num_text - row), settings.text_embed_dim) for row in range(rows)],
        encoder_hidden_states_2=[torch.empty(0, settings.text_embed_2_dim)] * rows,
        return_dict=False,
    )[0].float()
