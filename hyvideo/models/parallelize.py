"""Recipe that turns a loaded transformer into a trainable policy over ranks.

In this order: attention (`hyvideo.models.attention`, which splits a video's tokens), what is frozen, LoRA and what is
recomputed (`prepare_policy`), compilation (`compile_blocks`), sharded weights (`shard_weights`).
"""

import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Literal

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from peft import LoraConfig
from peft.tuners.tuners_utils import cast_adapter_dtype
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hyvideo.distributed.collectives import local_shard
from hyvideo.models.adapter import ADAPTER, check_same_adapter, load_lora
from hyvideo.models.transformer import EqualRows

Recomputed = Literal["full", "selective", "cheap", "elementwise"]
"""What of a block is computed again in the backward pass, see `prepare_policy`."""


def prepare_policy(
    transformer: HunyuanVideo15Transformer3DModel,
    *,
    gradient_checkpointing: bool,
    recompute: Recomputed = "full",
    lora: LoraConfig | None = None,
    pretrained_lora_path: str | None = None,
) -> HunyuanVideo15Transformer3DModel:
    """Make `transformer` ready for training, in place.

    Full fine-tuning trains every weight that can receive a gradient; with `lora` only the adapters, which are float32
    whatever the network is: bfloat16 would round most of their updates away. Dropout of the network stays off in
    rollout and replay alike (`eval` mode): the two must agree exactly.

    With `gradient_checkpointing` every block is recomputed in the backward pass, instead of keeping its activations:
    all of it (`recompute` `full`), all but what attention returned (`selective`), or also not the products that narrow
    their input (`cheap`), as the second layer of a feed-forward network does: each time much work for one tensor per
    block. `elementwise` also keeps all other products but those that widen an adapter's few channels: eight tensors
    more for the rest of the work. `pretrained_lora_path` is the adapter to start from; it needs `lora`.
    """
    transformer.eval().requires_grad_(False)
    if lora is None:
        transformer.requires_grad_(True)
    elif pretrained_lora_path is None:
        transformer.add_adapter(lora, adapter_name=ADAPTER)
    else:
        load_lora(transformer, pretrained_lora_path)
        check_same_adapter(transformer, lora, pretrained_lora_path)
        for name, parameter in transformer.named_parameters():
            parameter.requires_grad_("lora_" in name)
    if lora is not None:
        cast_adapter_dtype(transformer, ADAPTER)
    _freeze_unreached(transformer)
    if gradient_checkpointing:
        _recompute_blocks(transformer, recompute)
    return transformer


_aten = torch.ops.aten
ATTENTION_OPS = [
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""What scaled dot-product attention dispatches to."""

PRODUCTS = [_aten.mm.default, _aten.addmm.default]
"""What a linear layer dispatches to."""


def _recompute_blocks(transformer: HunyuanVideo15Transformer3DModel, recompute: Recomputed) -> None:
    """Let every block keep only its inputs, and what `recompute` leaves out, for the backward pass.

    The checkpoint lies inside the block's hooks, where it can be compiled with the block and weights are gathered
    around it once. No random number is drawn inside (`eval` mode), so no generator's state is kept.
    """
    kept = {
        "full": None,
        "selective": ATTENTION_OPS,
        "cheap": partial(_keep_costly, 1),
        "elementwise": partial(_keep_costly, 8),
    }[recompute]
    options = {"context_fn": partial(create_selective_checkpoint_contexts, kept)} if kept else {}
    for block in transformer.transformer_blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **options)


def _keep_costly(
    widest: int, context: SelectiveCheckpointContext, operation: OpOverload, *args: Any, **kwargs: Any
) -> Any:
    """Keep what attention returned, and products whose output is less than `widest` times as wide as their input.

    The work of a product per element that is kept is the width of its input.
    """
    costly = operation in PRODUCTS and widest * args[-1].shape[0] > args[-1].shape[1]
    kept = costly or operation in ATTENTION_OPS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


COMPILED_VARIANTS = 64
"""Variants of a block that may be compiled: last block, validation's size, and how the rows share lengths."""


def compile_blocks(transformer: HunyuanVideo15Transformer3DModel) -> None:
    """Compile every block's computation in place: after `prepare_policy`, before `shard_weights`.

    Rollout, anchor and replay call the same graph, which is the one with gradients. PyTorch would fuse a graph without
    gradients in another way, and by this rounding in bf16 the ratios of a replay would be off by as much as the clip
    range (seen on an H200). All blocks share what is compiled, except the last, whose condition stream ends. A graph
    takes texts of any length. The library's limit of 8 variants is lifted, beyond which it would go on uncompiled
    without an error.
    """
    torch._dynamo.config.recompile_limit = max(COMPILED_VARIANTS, torch._dynamo.config.recompile_limit)
    condition = ("context_embedder", "context_embedder_2", "image_embedder", "cond_type_embed")
    embedders = (("x_embedder",), condition, ("time_embed",))
    reached = [any(_is_trained(getattr(transformer, name)) for name in names) for names in embedders]
    for block in transformer.transformer_blocks:
        block.forward = partial(_call_compiled, torch.compile(block.forward), tuple(reached))
        reached[:2] = [any(reached) or _is_trained(block)] * 2


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _call_compiled(
    compiled: Callable[..., tuple[Tensor, Tensor]],
    reached: Sequence[bool],
    tokens: Tensor,
    condition: Tensor,
    embedded: Tensor,
    equal_rows: Sequence[EqualRows] | None,
    rotary: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Call a compiled block; `reached` says which of its three first inputs a gradient reaches in training.

    Without gradients the graph is the same, and what it keeps for a backward pass is freed when this returns.
    """
    with_gradient = torch.is_grad_enabled()
    if not with_gradient:
        streams = zip((tokens, condition, embedded), reached, strict=True)
        tokens, condition, embedded = (stream.detach().requires_grad_(trained) for stream, trained in streams)
    torch._dynamo.maybe_mark_dynamic(condition, 1)
    for rows in equal_rows or ():
        torch._dynamo.maybe_mark_dynamic(rows.valid, 0)
    with torch.enable_grad():
        tokens, condition = compiled(tokens, condition, embedded, equal_rows, rotary)
    return (tokens, condition) if with_gradient else (tokens.detach(), condition.detach())


def shard_weights(
    transformer: HunyuanVideo15Transformer3DModel,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
    whole: Collection[nn.Parameter] = (),
) -> None:
    """Shard weights, gradients and optimizer state over `mesh` in place (FSDP2); weights move to the mesh's device.

    Weights on the meta device get memory there, or with `cpu_offload` in host memory: shards to be filled.
    Gradients are averaged over the mesh in float32. What lies outside of the blocks (2 % of the weights, among them the
    timestep and condition embeddings) is gathered in its own dtype, so that timesteps and the condition stream keep
    theirs.

    The mesh has one axis to shard over, or two: copies, and shards of each. `compute_dtype` is that in which the
    blocks' weights are gathered (None: their own). Without `reshard_after_forward` what was gathered stays until it
    changes: no communication from one denoising step to the next, for the memory of a whole model. With `cpu_offload`
    shards, gradients and optimizer state are kept in host memory. The weights `whole` are not sharded.
    """
    shared = {
        "ignored_params": set(whole),
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if cpu_offload else OffloadPolicy(),
    }
    in_blocks = MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False)
    for block in transformer.transformer_blocks:
        fully_shard(block, mp_policy=in_blocks, reshard_after_forward=reshard_after_forward, **shared)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # nobody writes into it
    around = MixedPrecisionPolicy(None, torch.float32, cast_forward_inputs=False)
    fully_shard(transformer, mp_policy=around, reshard_after_forward=reshard_after_forward, **shared)
    if transformer.device.type == "meta":
        weights = transformer.named_parameters()
        given = {name: local_shard(weight.detach()) for name, weight in weights if not weight.is_meta}
        transformer.to_empty(device="cpu" if cpu_offload else mesh.device_type)
        for name, shard in given.items():  # an adapter's
            local_shard(transformer.get_parameter(name).detach()).copy_(shard)


def forget_gathered_weights(transformer: nn.Module) -> None:
    """Free all gathered weights, so that the next forward pass sees what has been written to the shards since."""
    for module in transformer.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name: what the optimizer, the anchor and a checkpoint hold."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _freeze_unreached(transformer: HunyuanVideo15Transformer3DModel) -> None:
    """Freeze what can never receive a gradient.

    The last block's condition stream ends there (its keys and values reach the video, its queries do not), the vision
    embedder sees no tokens in text-to-video, and a key's bias shifts all logits of a softmax alike (the refiner has no
    key norm), so its true gradient is 0 and Adam would follow noise.
    """
    last = transformer.transformer_blocks[-1]
    ends = (last.attn.add_q_proj, last.attn.norm_added_q, last.attn.to_add_out, last.ff_context)
    unseen = () if transformer.config.task_type == "i2v" else (transformer.image_embedder,)
    for module in (*ends, *unseen):
        module.requires_grad_(False)
    for block in transformer.context_embedder.token_refiner.refiner_blocks:
        if isinstance(block.attn.to_k, nn.Linear) and block.attn.to_k.bias is not None:
            block.attn.to_k.bias.requires_grad_(False)
