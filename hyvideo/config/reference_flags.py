"""Flags of the reference implementation that have another name here, or set nothing: its commands run as they are."""

import argparse
import os
import sys
from collections.abc import Sequence

RENAMED = {
    "post_train_type": "algorithm",
    "warmup_steps": "lr_warmup_steps",
    "validation_video_length": "validate_video_length",
    "video_length": "validate_video_length",
}
"""The reference's name of a flag -> the name here."""

_SUPERVISED = "it belongs to supervised training, which is not part of this project"

WITHOUT_EFFECT = {
    "num_workers": "prompts are read at once, and need no workers",
    "prefetch_factor": "prompts are read at once, and need no workers",
    "i2v_prob": _SUPERVISED,
    "train_timestep_shift": f"{_SUPERVISED}; rollouts follow --infer_flow_shift_video",
    "flow_snr_type": _SUPERVISED,
    "validation_prompts": "write them into a CSV with a `prompt` column, and name it with --valid_video_csv",
    "debug_grad_flow": "metrics.jsonl has the gradient norms of every update",
    "debug_train_diagnostics_interval": "metrics.jsonl has every update",
}
"""The reference's flags that set nothing here -> why, or what does instead."""


class _Ignore(argparse.Action):
    """Takes a flag without effect, and says so."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Sequence[str],
        option_string: str | None = None,
    ) -> None:
        """Warn, once for all ranks."""
        if os.environ.get("RANK", "0") == "0":
            name = option_string.lstrip("-")
            print(f"{parser.prog}: --{name} has no effect: {WITHOUT_EFFECT[name]}.", file=sys.stderr)


def names_of(name: str) -> list[str]:
    """Return the option strings of a knob: its own name, and those that the reference has for it."""
    return [f"--{name}", *(f"--{theirs}" for theirs, ours in RENAMED.items() if ours == name)]


def add_flags_without_effect(parser: argparse.ArgumentParser) -> None:
    """Let `parser` take, with any values, the reference's flags that set nothing here; its manual leaves them out."""
    for name in WITHOUT_EFFECT:
        parser.add_argument(f"--{name}", nargs="*", action=_Ignore, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
