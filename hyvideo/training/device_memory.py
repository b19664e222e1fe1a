"""Error messages for exhausted GPU memory: the phase, the peak, and settings that need less."""

import torch

from hyvideo.config.knobs import KNOBS, Knob, value_of
from hyvideo.config.schema import Config
from hyvideo.config.setting import EVERY_PHASE
from hyvideo.observability.phase_timer import BETWEEN


def out_of_memory_loading(error: torch.OutOfMemoryError) -> str:
    """Return the message for a GPU that cannot hold the models."""
    return (
        f"out of GPU memory while the models were loaded: {_cause(error)} More ranks (smaller shards), "
        "use_lora (and with it alone master_weight_type bf16), encoder_offload and reward_offload need less. "
        "`python -m scripts.plan` with the run's flags says what fits."
    )


def out_of_memory(error: torch.OutOfMemoryError, phase: str, step: int, rank: int, config: Config) -> str:
    """Return the message for a GPU that was exhausted in a phase of `PhaseTimer`, after `step` updates."""
    knobs = [
        f"{name} (now {value_of(config, name)})"
        for name in settings_that_free("validation" if phase == BETWEEN else phase)
    ]
    used = ""
    if torch.cuda.is_available():
        peak, total = torch.cuda.max_memory_allocated(), torch.cuda.get_device_properties().total_memory
        used = f" Peak {peak / 2**30:.1f} of {total / 2**30:.1f} GiB."
    return (
        f"out of GPU memory on rank {rank} in phase '{phase}', update {step + 1}: {_cause(error)}{used} Settings that "
        f"need less, in this order: {', '.join(knobs)}. `python -m scripts.plan` with the run's flags says what fits. "
        "Continue with --resume_from_checkpoint latest, and --resume_may_change with the names of the changed settings."
    )


def settings_that_free(phase: str) -> list[str]:
    """Return the settings that lower the peak of a phase, in the order in which to try them.

    Settings of this phase alone come first, then those of all phases, and last those of all phases that change the
    result. Within each, sizes come before switches, because they can be lowered as far as it takes.
    """
    found = [knob for knob in KNOBS.values() if phase in knob.facts.frees]

    def place(knob: Knob) -> tuple[bool, bool, bool]:
        """Return the key by which a setting is sorted."""
        of_all = knob.facts.frees == EVERY_PHASE
        return of_all, of_all and knob.facts.decides, knob.kind is bool or bool(knob.choices)

    return [knob.name for knob in sorted(found, key=place)]


def _cause(error: torch.OutOfMemoryError) -> str:
    """The first line of what the allocator said."""
    return str(error).strip().splitlines()[0]
