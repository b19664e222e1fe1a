"""Everything that decides a run's future, gathered for a checkpoint and put back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from hyvideo.checkpoint.train_state import Tensors, load_tensors, read_facts, save_train_state
from hyvideo.data.samplers import GroupSampler
from hyvideo.grpo.kl_controller import KLController
from hyvideo.models.parallelize import save_lora, trainable_parameters
from hyvideo.training.anchor import Anchor

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass
class RunState:
    """The moving parts of a run.

    Attributes:
        transformer: the policy; its trained parameters are saved.
        optimizers: AdamW, or Muon and AdamW.
        anchor: None when the trust region has no position term.
        controller: KL coefficient; None when `kl_weight` is 0.
        sampler: its position is the number of rounds drawn.
        config_hash: of the settings that decide the result; a resumed run must have the same.
        lora: arguments of `lora_config`, None for full fine-tuning.
        step: updates made.
        round: rounds finished.
    """

    transformer: nn.Module
    optimizers: Sequence[Optimizer]
    anchor: Anchor | None
    controller: KLController | None
    sampler: GroupSampler
    config_hash: str
    lora: Mapping[str, Any] | None
    step: int = 0
    round: int = 0

    def save(self, folder: Path, *, keep_last: int | None, round_start: int | None = None) -> Path:
        """Write a checkpoint into `folder` and return its path; a LoRA run's has the adapter in `lora/` too.

        Args:
            folder: the run's `checkpoints`.
            keep_last: checkpoints to keep.
            round_start: where `max_steps` ended the run within a round, the step at which that round began.
        """
        facts = {
            "round": self.round,
            "round_start": round_start,
            "config_hash": self.config_hash,
            "lora": self.lora,
            "trained": list(trainable_parameters(self.transformer)),
            "sampler": self.sampler.state_dict(),
            "controller": self.controller.state_dict() if self.controller else None,
            "anchor_equals_policy": self.anchor.equals_policy if self.anchor else None,
        }

        def write_adapter(unfinished: Path) -> None:
            if self.lora is not None:
                save_lora(self.transformer, unfinished / "lora")

        return save_train_state(
            folder, self.step, self._tensors(), facts, keep_last=keep_last, write_more=write_adapter
        )

    def load(self, checkpoint: Path) -> None:
        """Put `checkpoint` back: after this the run goes on as if it had never stopped.

        Raises:
            ValueError: unreadable, or made with other settings.
        """
        facts = read_facts(checkpoint)
        if facts["config_hash"] != self.config_hash:
            raise ValueError(
                f"'{checkpoint}' was made with other settings (hash {facts['config_hash']}, this run has "
                f"{self.config_hash}). Resume with the config.yaml of its run folder, or start a new run from it."
            )
        tensors = self._tensors()
        load_tensors(checkpoint, tensors)
        self._restore_optimizers(tensors["optimizer"])
        if self.anchor is not None:
            self.anchor.load_state_dict(tensors["anchor"], equals_policy=facts["anchor_equals_policy"])
        if self.controller is not None:
            self.controller.load_state_dict(facts["controller"])
        self.sampler.load_state_dict(facts["sampler"])
        set_rng_state(tensors["rng"])
        self.step, self.round = facts["step"], facts["round"]

    def _tensors(self) -> Tensors:
        """Return references to all tensors of the state, in groups."""
        optimizer = get_optimizer_state_dict(self.transformer, tuple(self.optimizers), options=_FLAT)
        tensors = {
            "policy": {name: p.detach() for name, p in trainable_parameters(self.transformer).items()},
            "optimizer": {name: value for name, value in optimizer.items() if isinstance(value, Tensor)},
            "rng": rng_state(),
        }
        if self.anchor is not None:
            tensors["anchor"] = self.anchor.state_dict()
        return tensors

    def _restore_optimizers(self, moments: Mapping[str, Tensor]) -> None:
        """Give the optimizers their moments back; learning rate and decay stay those of the config."""
        options = get_optimizer_state_dict(self.transformer, tuple(self.optimizers), options=_FLAT)
        set_optimizer_state_dict(self.transformer, tuple(self.optimizers), {**options, **moments}, options=_FLAT)


def rng_state() -> dict[str, Tensor]:
    """Return the state of the libraries' own random generators (ours are seeded anew for every tensor)."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Tensor]) -> None:
    """Restore what `rng_state` returned."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
