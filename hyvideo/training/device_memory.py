"""Error messages for exhausted GPU memory: the phase, the peak, and settings that need less."""

import torch

from hyvideo.config.knobs import value_of
from hyvideo.config.schema import Config
from hyvideo.observability.phase_timer import BETWEEN

KNOBS_OF_PHASE = {
    "rollout": ("rollout_micro_batch_size", "encoder_offload", "reference_mode_offload", "reward_offload"),
    "reward": ("reward_batch_size", "encoder_offload", "reward_offload"),
    "anchor": ("mini_batch_size_per_update", "encoder_offload", "reward_offload"),
    "update": (
        "mini_batch_size_per_update",
        "enable_gradient_checkpointing",
        "activation_checkpointing",
        "encoder_offload",
        "reward_offload",
        "reference_mode_offload",
    ),
    BETWEEN: (
        "validation_fixed_size",
        "validate_video_length",
        "rollout_micro_batch_size",
        "reward_batch_size",
        "encoder_offload",
        "reward_offload",
    ),
}
"""Phase -> settings that lower its peak without changing the method, the strongest first."""

KNOBS_OF_ALL = ("enable_fsdp", "reshard_after_forward", "sp_size", "sample_n_frames")
"""Settings that lower every phase's peak."""


def out_of_memory_loading(error: torch.OutOfMemoryError) -> str:
    """Return the message for a GPU that cannot hold the models."""
    return (
        f"out of GPU memory while the models were loaded: {_cause(error)} More ranks (smaller shards), "
        "use_lora (and with it alone master_weight_type bf16), encoder_offload and reward_offload need less. "
        "`python -m scripts.plan` with the run's flags says what fits."
    )


def out_of_memory(error: torch.OutOfMemoryError, phase: str, step: int, rank: int, config: Config) -> str:
    """Return the message for an exhausted GPU.

    Args:
        error: what the allocator said.
        phase: of `PhaseTimer`.
        step: updates made.
        rank: whose GPU it is.
        config: names the present values.
    """
    knobs = [f"{name} (now {value_of(config, name)})" for name in (*KNOBS_OF_PHASE[phase], *KNOBS_OF_ALL)]
    used = ""
    if torch.cuda.is_available():
        peak, total = torch.cuda.max_memory_allocated(), torch.cuda.get_device_properties().total_memory
        used = f" Peak {peak / 2**30:.1f} of {total / 2**30:.1f} GiB."
    return (
        f"out of GPU memory on rank {rank} in phase '{phase}', update {step + 1}: {_cause(error)}{used} Settings that "
        f"need less, in this order: {', '.join(knobs)}. `python -m scripts.plan` with the run's flags says what fits. "
        "Continue with --resume_from_checkpoint latest, and --resume_may_change with the names of the changed settings."
    )


def _cause(error: torch.OutOfMemoryError) -> str:
    """The first line of what the allocator said."""
    return str(error).strip().splitlines()[0]
