"""Knobs of the machine: model weights and precision, optimizer, ranks."""

from dataclasses import dataclass, field
from typing import Literal


def _default_lora_targets() -> list[str]:
    """Attention and feed-forward projections of the video and the text stream, by diffusers module names."""
    attention = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
    feed_forward = ["ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"]
    return attention + feed_forward


@dataclass
class ModelConfig:
    """Model: which weights are trained, in which precision, fully or through LoRA."""

    pretrained_model_root: str = "./ckpts"
    """Folder of the base model: original HunyuanVideo-1.5 layout, diffusers layout or the bundled tiny model."""

    pretrained_transformer_version: str = "480p_t2v"
    """Transformer version below the root, such as 480p_t2v or 720p_i2v. Layouts with one transformer ignore it."""

    dtype: Literal["bf16", "fp32"] = "bf16"
    """Compute precision of the transformer (autocast). On a GPU encoders and VAE compute in fp16, ByT5 in fp32; the
    CPU always computes in fp32."""

    master_weight_type: Literal["fp32", "bf16"] = "fp32"
    """Precision of the transformer's weights and of their optimizer state. bf16 halves their memory and rounds most
    updates away: use it with use_lora, whose adapters are fp32 always."""

    enable_gradient_checkpointing: bool = True
    """Recompute each transformer block's activations in the backward pass: far less memory, about a third more work."""

    use_lora: bool = False
    """Train low-rank adapters instead of all transformer weights. They need another rate and AdamW:
    configs/lora.yaml."""

    lora_r: int = 8
    """Rank of the adapters."""

    lora_alpha: int = 16
    """Adapter scale: the update is multiplied by lora_alpha / lora_r."""

    lora_dropout: float = 0.0
    """Dropout of the adapters. Only 0 is allowed: the replay must repeat the rollout's log-probabilities. The flag is
    kept for scripts that pass it."""

    lora_target_modules: list[str] = field(default_factory=_default_lora_targets)
    """Linear layers that get an adapter: every module whose path ends in one of these names. The default is attention
    and feed-forward of the blocks; the reference adapts every linear layer."""

    pretrained_lora_path: str | None = None
    """Folder of the adapter to start from (it holds pytorch_lora_weights.safetensors). None: a fresh adapter."""


@dataclass
class OptimizerConfig:
    """Optimizer: step size, decay and clipping."""

    learning_rate: float = 1e-5
    """Step size of AdamW; Muon scales it per matrix."""

    weight_decay: float = 0.01
    """Decoupled weight decay, as a share of the learning rate."""

    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm when they exceed it."""

    use_muon: bool = True
    """Muon for weights with two or more dimensions, AdamW for the rest; otherwise AdamW for all."""

    lr_warmup_steps: int = 0
    """Optimizer updates over which the learning rate rises linearly from 0."""


@dataclass
class ParallelConfig:
    """Ranks: world size = dp_replicate x sharded data parallel x sp_size."""

    sp_size: int = 1
    """Ranks that share the tokens of one video (sequence parallel). Must divide the world size."""

    dp_replicate: int = 1
    """Full copies of the sharded model (HSDP). Must divide the data-parallel degree, world size / sp_size."""

    enable_fsdp: bool = True
    """Shard weights, gradients and optimizer state over the ranks (with one process there is nothing to shard). Without
    it every rank holds the whole model: for small models."""

    reshard_after_forward: bool = True
    """Free a block's gathered weights after each forward pass. False keeps them: less communication, above all in
    rollouts, at the cost of a whole model's memory."""

    cpu_offload: bool = False
    """Keep sharded weights, gradients and optimizer state in host memory: slower; for few GPUs, at least two."""

    encoder_offload: bool = False
    """Keep the text and vision encoders on the CPU except while they encode a round's prompts. Saves 14 GiB of GPU
    memory, costs a transfer per round."""

    activation_checkpointing: Literal["full", "selective"] = "full"
    """What enable_gradient_checkpointing recomputes: the full block, or all but attention, whose output is then kept
    (this saves most of the work for one more tensor per block)."""

    enable_compile: bool = False
    """Compile the transformer's blocks with torch.compile; the first steps take minutes."""

    collective_timeout: int = 1800
    """Seconds after which the run fails if ranks are missing at the start, or one keeps the others waiting later. Over
    several machines torchrun first waits 900 s for all of them to join."""

    stuck_after: int = 900
    """Seconds in one phase of a round after which a rank prints the phase and the stacks of its threads, repeated
    at that interval. 0: never."""
