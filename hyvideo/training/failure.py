"""What ends a program too early, put into words: its exit status, and for exhausted GPU memory what needs less."""

import signal
import traceback

import torch
import torch.distributed as dist

from hyvideo.algorithms.optimizer import NonFiniteUpdateError
from hyvideo.checkpoint.train_state import SaveError
from hyvideo.config.outside import complain, in_words
from hyvideo.config.schema import EVERY_PHASE, Config
from hyvideo.config.settings import SETTINGS, Setting, value_of
from hyvideo.data.files import FULL, LOCK
from hyvideo.models.reward_models.registry import RewardFailureError
from hyvideo.observability.phase_timer import BETWEEN
from hyvideo.training.run import Run
from hyvideo.training.stop_signal import LOST, listened_preemptions


def exit_status(error: Exception, run: Run | None) -> int:
    """Say what went wrong before `run` was open (None) or in it, and return the exit status of `post_train.py`.

    A SystemExit where it is wrong on this rank alone: the others wait for it, and the launcher ends them. Where nobody
    foresaw it, the error itself is raised, with a note of what was saved.
    """
    if isinstance(error, torch.OutOfMemoryError):
        if run is None:
            complain(f"post_train.py: {out_of_memory_loading(error)}")
        else:
            told = out_of_memory(error, run.timer.phase, run.state.step, run.mesh.rank, run.config)
            run.journal.console.error(told)
        raise SystemExit(1) from None
    if run is None:
        if not isinstance(error, ValueError | OSError):
            raise error
        complain(f"post_train.py: {in_words(error)}", once=dist.is_initialized())  # in a group all say the same
        return 2
    console = run.journal.console
    if isinstance(error, NonFiniteUpdateError | RewardFailureError | SaveError):
        # Their message says everything: no traceback, but that of a custom reward that failed on this rank.
        cause = error.__cause__
        if isinstance(error, RewardFailureError) and cause and not isinstance(cause, RewardFailureError):
            traceback.print_exception(cause)
        if run.mesh.is_main:
            for number in listened_preemptions():  # torchrun sends SIGTERM when the first rank has ended
                signal.signal(number, signal.SIG_IGN)
            console.error(str(error))
            run.journal.write_report()
        return 1
    advice = "Earlier checkpoints are intact. Make space, then continue with --resume_from_checkpoint latest."
    if not (isinstance(error, OSError) and error.errno in FULL):
        error.add_note(advice := run.whereabouts())
        lost = isinstance(error, RuntimeError) and "/gloo/" in str(error)  # which has no error class of its own
        if lost or isinstance(error, dist.DistError | torch.AcceleratorError):
            traceback.print_exception(error)
            raise SystemExit(LOST) from None
        if not isinstance(error, OSError) or (run.folder.path / LOCK).exists():
            raise error
    console.error(f"{in_words(error)}. {advice}")
    raise SystemExit(1) from None


def out_of_memory_loading(error: torch.OutOfMemoryError) -> str:
    """Return the message for a GPU that cannot hold the models."""
    return (
        f"out of GPU memory while the models were loaded: {_cause(error)} More ranks (smaller shards), "
        "use_lora (and with it alone master_weight_type bf16), offload encoders and reward need less. "
        "`python -m scripts.plan` with the run's flags says what fits."
    )


def out_of_memory(error: torch.OutOfMemoryError, phase: str, step: int, rank: int, config: Config) -> str:
    """Return the message for a GPU that was exhausted in a phase of `PhaseTimer`, after `step` updates."""
    named = [
        f"{name} (now {value_of(config, name)})"
        for name in settings_that_free("validation" if phase == BETWEEN else phase)
    ]
    used = ""
    if torch.cuda.is_available():
        peak, total = torch.cuda.max_memory_allocated(), torch.cuda.get_device_properties().total_memory
        used = f" Peak {peak / 2**30:.1f} of {total / 2**30:.1f} GiB."
    return (
        f"out of GPU memory on rank {rank} in phase '{phase}', update {step + 1}: {_cause(error)}{used} Settings that "
        f"need less, in this order: {', '.join(named)}. `python -m scripts.plan` with the run's flags says what fits. "
        "Continue with --resume_from_checkpoint latest, and --resume_may_change with the names of the changed settings."
    )


def settings_that_free(phase: str) -> list[str]:
    """Return the settings that lower the peak of a phase, in the order in which to try them.

    Settings of this phase alone come first, then those of all phases, and last those of all phases that change the
    result. Within each, sizes come before switches, because they can be lowered as far as it takes.
    """
    found = [setting for setting in SETTINGS.values() if phase in setting.frees]

    def place(setting: Setting) -> tuple[bool, bool, bool]:
        of_all = setting.frees == EVERY_PHASE
        return of_all, of_all and setting.decides, setting.kind is bool or bool(setting.choices)

    return [setting.name for setting in sorted(found, key=place)]


def _cause(error: torch.OutOfMemoryError) -> str:
    """The first line of what the allocator said."""
    return str(error).strip().splitlines()[0]
