"""Everything that decides a run's future, gathered for a checkpoint and put back."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import Optimizer

from hyvideo.checkpoint.manifest import verify_files
from hyvideo.checkpoint.train_state import (
    PendingSave,
    SaveError,
    Tensors,
    begin_save,
    latest_checkpoint,
    load_tensors,
    read_facts,
    require_dtypes,
    tensor_names,
)
from hyvideo.data.samplers import GroupSampler
from hyvideo.distributed.collectives import all_or_none, from_main, gather, local_shard
from hyvideo.grpo.kl_controller import KLController
from hyvideo.models.adapter import adapter_weights, save_lora
from hyvideo.models.parallelize import forget_gathered_weights, trainable_parameters
from hyvideo.training.anchor import Anchor

CONTENT = "the content of"
"""Prefix of the names of file hashes among the settings."""

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass
class RunState:
    """The moving parts of a run; every rank has its shards, and the same numbers.

    Attributes:
        transformer: the policy; its trained parameters are saved.
        optimizers: AdamW, or Muon and AdamW.
        anchor: None when the trust region has no position term.
        controller: KL coefficient; None when `kl_weight` is 0.
        sampler: its position is the number of rounds drawn.
        settings: those that decide the result, by name, and the prompt files' content.
        config_hash: of the configuration's settings among them.
        noted: what else may matter and may change at a resume, by name: it is recorded, and a change is told.
        lora: arguments of `lora_config`, None for full fine-tuning.
        collective_timeout: seconds that a thread which writes a checkpoint waits for other ranks'.
        step: updates made.
        round: rounds finished.
        began_at: step at which the run folder's rows begin: 0, or that of another run's checkpoint it continued.
        pending: a checkpoint that is being written during training.
    """

    transformer: nn.Module
    optimizers: Sequence[Optimizer]
    anchor: Anchor | None
    controller: KLController | None
    sampler: GroupSampler
    settings: Mapping[str, object]
    config_hash: str
    noted: Mapping[str, str]
    lora: Mapping[str, Any] | None
    collective_timeout: int | None = None
    step: int = 0
    round: int = 0
    began_at: int = 0
    pending: PendingSave | None = None

    def save(
        self,
        folder: Path,
        *,
        keep_last: int | None,
        keep_every: int = 0,
        round_start: int | None = None,
        beside_training: bool = False,
    ) -> Path:
        """Write a checkpoint into `folder` and return its path; a LoRA run's has the adapter in `lora/` too.

        Args:
            folder: the run's `checkpoints`.
            keep_last: checkpoints to keep.
            keep_every: also keep the first at or after each multiple of this many steps; 0: none.
            round_start: where `max_steps` ended the run within a round, the step at which that round began.
            beside_training: return when the tensors are copied; the checkpoint is valid after `finish_save`.

        Raises:
            SaveError: it could not be written, on any rank, or a weight is not finite; all raise it.
        """
        self.finish_save()
        forget_gathered_weights(self.transformer)  # those kept by a forward pass without gradients hide the shards
        self._require_finite(folder)
        facts = {
            "round": self.round,
            "round_start": round_start,
            "config_hash": self.config_hash,
            "settings": dict(self.settings),
            "noted": dict(self.noted),
            "began_at": self.began_at,
            "lora": self.lora,
            "trained": list(trainable_parameters(self.transformer)),
            "sampler": self.sampler.state_dict(),
            "controller": self.controller.state_dict() if self.controller else None,
            "anchor_equals_policy": self.anchor.equals_policy if self.anchor else None,
        }
        adapter = adapter_weights(self.transformer) if self.lora is not None else {}

        def write_adapter(unfinished: Path) -> None:
            """Add the adapter as diffusers reads it."""
            if self.lora is not None:
                save_lora(self.transformer, unfinished / "lora", adapter)

        self.pending = begin_save(
            folder,
            self.step,
            self._tensors(),
            facts,
            keep_last=keep_last,
            keep_every=keep_every,
            write_more=write_adapter,
            beside_training=beside_training,
            collective_timeout=self.collective_timeout,
        )
        target = self.pending.target
        if not beside_training:
            self.finish_save()
        return target

    def finish_save(self) -> None:
        """Complete a save that was begun during training, if there is one.

        Raises:
            SaveError: it could not be written, on any rank; all raise it.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.finish()

    def before_round(self) -> dict[str, Any]:
        """Return what a rollout changes: the position in the prompts and the libraries' random generators."""
        return {"sampler": self.sampler.state_dict(), "rng": rng_state()}

    def give_round_up(self, before: Mapping[str, Any]) -> None:
        """Go back to where `before_round` was called; no update may have been made since."""
        self.sampler.load_state_dict(before["sampler"])
        set_rng_state(before["rng"])

    def load(self, checkpoint: Path, *, may_change: Collection[str] = ()) -> list[str]:
        """Put `checkpoint` back: after this the run goes on as if it had never stopped. All ranks call it.

        Args:
            checkpoint: a finished checkpoint's folder.
            may_change: names of settings that may differ from the checkpoint's.

        Returns:
            What differs: one line per setting or note, with both values.

        Raises:
            ValueError: unreadable or damaged, or made with other settings.
        """
        with all_or_none():
            changed = changed_settings(checkpoint, self.settings, self.config_hash, may_change)
            facts = read_facts(checkpoint)
            changed += _differing(self.noted, facts.get("noted", {}))
        verify_files(checkpoint)
        tensors = self._tensors()
        with all_or_none():
            require_dtypes(checkpoint, tensors)
            saved = tensor_names(checkpoint)
            self._require_kl_state(checkpoint, facts, "anchor" in tensors, saved)
            if surplus := set(facts.get("trained", ())) - set(tensors["policy"]):
                raise ValueError(
                    f"'{checkpoint}' has {len(surplus)} trained weights that this run would drop, among them "
                    f"{min(surplus)}: keep use_lora and lora_target_modules, or start a new run."
                )
        # A run that was begun without a GPU has no state of its generator.
        tensors["rng"] = {name: value for name, value in tensors["rng"].items() if f"rng.{name}" in saved}
        load_tensors(checkpoint, tensors)
        forget_gathered_weights(self.transformer)
        try:
            if self.anchor is not None:
                self.anchor.load_state_dict(tensors.get("anchor", {}), equals_policy=facts["anchor_equals_policy"])
            if self.controller is not None:
                self.controller.load_state_dict(facts["controller"])
            self.sampler.load_state_dict(facts["sampler"])
            self.step, self.round = facts["step"], facts["round"]
            self.began_at = facts.get("began_at", 0)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"'{checkpoint}' lacks facts that a run needs to continue, or they are damaged: {error!r}."
            ) from error
        set_rng_state(tensors["rng"])
        return changed

    def _require_kl_state(
        self, checkpoint: Path, facts: Mapping[str, Any], has_anchor: bool, saved: Collection[str]
    ) -> None:
        """Refuse a checkpoint without the anchor or controller of this run, whose KL settings may have been changed."""
        missing = "anchor" if has_anchor and not any(name.startswith("anchor.") for name in saved) else None
        if missing is None and self.controller is not None and facts.get("controller") is None:
            missing = "KL controller"
        if missing:
            raise ValueError(
                f"'{checkpoint}' was made without the {missing} that this run's KL settings need, and a resume cannot "
                "add it: keep kl_weight, use_dual_kl, dual_kl_moving_weight and use_moving_KL, or start a new run."
            )

    def _require_finite(self, folder: Path) -> None:
        """Refuse to save a policy that is lost: older, good checkpoints would be deleted in its favour."""
        policy = trainable_parameters(self.transformer)
        lost = [name for name, p in policy.items() if not torch.isfinite(local_shard(p.detach())).all()]
        lost = list(dict.fromkeys(name for names in gather(lost) for name in names))
        if lost:
            good = from_main(lambda: latest_checkpoint(folder))
            raise SaveError(
                f"step {self.step} is not saved: {len(lost)} of {len(policy)} trained weights are not finite, first "
                f"{lost[0]}. Last good checkpoint: {good or 'none was saved yet'}. Continue from it with a lower "
                "learning_rate, and --resume_may_change learning_rate."
            )

    def _tensors(self) -> Tensors:
        """Return references to all tensors of the state, in groups."""
        unused = [each for each in self.optimizers if not each.state]
        optimizer = get_optimizer_state_dict(self.transformer, tuple(self.optimizers), options=_FLAT)
        for state in (state for each in unused for state in each.state.values()):  # made by an update of length 0
            if "step" in state:
                state["step"].zero_()
        tensors = {
            "policy": {name: p.detach() for name, p in trainable_parameters(self.transformer).items()},
            "optimizer": {name: value for name, value in optimizer.items() if isinstance(value, Tensor)},
            "rng": rng_state(),
        }
        if self.anchor is not None and (anchor := self.anchor.state_dict()):
            tensors["anchor"] = anchor
        return tensors


def changed_settings(
    checkpoint: Path, settings: Mapping[str, object], config_hash: str, may_change: Collection[str]
) -> list[str]:
    """Say which settings differ from a checkpoint's; refuse one of a run that trains something else, unless told to.

    Args:
        checkpoint: a finished checkpoint's folder.
        settings: this run's, as `RunState.settings`.
        config_hash: this run's.
        may_change: names of settings that may differ.

    Raises:
        ValueError: another setting differs, or the checkpoint's facts cannot be read.
    """
    facts = read_facts(checkpoint)
    received, there = facts.get("config_hash"), facts.get("settings", {})
    differing = [name for name in settings if name in there and there[name] != settings[name]]
    told = _differing(settings, there)
    names = ["train_video_csv" if name.startswith(CONTENT) else name for name in differing]
    refused = [name for name in dict.fromkeys(names) if name not in may_change]
    if not refused and (differing or received == config_hash):
        return told
    raise ValueError(
        f"'{checkpoint}' was made with other settings (hash {received}, this run has {config_hash}): "
        f"{'; '.join(told) or 'it does not say which'}. batch_size counts the videos of all ranks. Resume with the "
        "config.yaml of its run folder"
        + (f", or change them on purpose with --resume_may_change {' '.join(refused)}." if refused else ".")
    )


def _differing(here: Mapping[str, object], there: Mapping[str, object]) -> list[str]:
    """Say what has other values in a checkpoint; what it does not know does not differ."""
    return [
        f"{name} is {here[name]!r}, the checkpoint has {there[name]!r}"
        for name in here
        if name in there and there[name] != here[name]
    ]


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
