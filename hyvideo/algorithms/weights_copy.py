"""A second set of the trained weights: the anchor of a trust region, an old policy, an average, the base model."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from peft.helpers import rescale_adapter_scale
from torch import Tensor, nn

from hyvideo.config.schema import Config, ModelConfig
from hyvideo.data.host_reads import host_read
from hyvideo.distributed.collectives import as_shard_of, local_shard
from hyvideo.models.parallelize import forget_gathered_weights, trainable_parameters


def starts_at_base(model: ModelConfig) -> bool:
    """Whether the policy is the base model under a fresh adapter, so that the base model needs no copy."""
    return model.use_lora and model.pretrained_lora_path is None


class WeightsCopy:
    """A second copy of the trained weights, swapped with the policy's in place while it computes.

    It serves as the anchor of GRPO, the old policy of NFT, the average of the weights and the base model to compare
    with. With LoRA only the adapters are copied. Of sharded weights each rank copies and swaps its own shards.

    Args:
        parameters: the trained ones, by name; copied now, so the copy starts at the policy.
        offload: keep the copy in host memory (pinned when the policy is on a GPU) outside `in_place_of_policy`.
        weights_change: called before weights are swapped, so that none gathered from other ranks is used afterwards.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        offload: bool,
        weights_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._parameters = dict(parameters)
        self._weights_change = weights_change
        self._copy: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            shard = local_shard(parameter.detach())
            pinned = offload and shard.device.type != "cpu"
            device = "cpu" if offload else shard.device
            self._copy[name] = torch.empty_like(shard, device=device, pin_memory=pinned).copy_(shard)
        on = {local_shard(parameter.detach()).device for parameter in self._parameters.values()}
        self._in_host_memory = torch.cuda.is_available() and {device.type for device in on} == {"cpu"}
        self.equals_policy = True

    @torch.no_grad()
    def refresh(self, decay: float = 0.0) -> None:
        """Copy the policy again, or move to `decay * copy + (1 - decay) * policy`."""
        for name, parameter in self._parameters.items():
            shard, copy = local_shard(parameter), self._copy[name]
            if decay:
                with host_read("an average that rests in host memory follows every update"):
                    copy.lerp_(shard.to(copy.device), 1 - decay)
            else:
                copy.copy_(shard, non_blocking=True)
        self.equals_policy = decay == 0 or self.equals_policy

    def policy_moved(self) -> None:
        """Note that the policy was updated: the two differ from now on."""
        self.equals_policy = False

    @contextmanager
    def in_place_of_policy(self) -> Iterator[None]:
        """Let the policy's module compute with the copied weights; meanwhile the copy holds the policy's."""
        exchanged: list[str] = []
        self._weights_change()
        try:
            for name in self._parameters:
                self._exchange(name)
                exchanged.append(name)
            yield
        finally:
            if self._in_host_memory:  # shards that the GPU may still be reading
                torch.cuda.synchronize()
            self._weights_change()
            for name in exchanged:
                self._exchange(name)

    @torch.no_grad()
    def _exchange(self, name: str) -> None:
        """Swap the values of one shard and its copy."""
        shard, copy = local_shard(self._parameters[name]), self._copy[name]
        incoming = copy.to(shard.device, non_blocking=True, copy=True)
        copy.copy_(shard, non_blocking=True)
        shard.copy_(incoming)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the copied weights by name, sharded as the policy's (references, where they are on its device)."""
        return {
            name: as_shard_of(parameter.detach(), self._copy[name].to(local_shard(parameter.detach()).device))
            for name, parameter in self._parameters.items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor], *, equals_policy: bool) -> None:
        """Restore what `state_dict` returned, and whether no update has happened since the last refresh."""
        for name, copy in self._copy.items():
            copy.copy_(local_shard(state[name]))
        self.equals_policy = equals_policy


class BaseModel(WeightsCopy):
    """The base model under a fresh adapter, which is the policy with its adapter's output times 0.

    Nothing is copied. (The library's own call to disable adapters would afterwards train what was frozen.)
    """

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__({}, offload=False)
        self._transformer = transformer

    def load_state_dict(self, state: Mapping[str, Tensor], *, equals_policy: bool) -> None:
        """Restore nothing: a checkpoint's policy has left the base model, whichever anchor it had."""
        self.equals_policy = False

    @contextmanager
    def in_place_of_policy(self) -> Iterator[None]:
        """Let the policy's module compute as the base model."""
        with rescale_adapter_scale(self._transformer, 0.0):
            yield


def copy_policy(transformer: nn.Module, *, offload: bool) -> WeightsCopy:
    """Copy the trained weights as they are; with `offload` the copy rests in host memory."""
    forget = partial(forget_gathered_weights, transformer)
    return WeightsCopy(trainable_parameters(transformer), offload=offload, weights_change=forget)


def build_ema(config: Config, transformer: nn.Module) -> WeightsCopy | None:
    """Begin the average of the trained weights at the policy as it is; None when `ema_decay` asks for none."""
    return copy_policy(transformer, offload="ema" in config.parallel.offload) if config.optimizer.ema_decay else None
