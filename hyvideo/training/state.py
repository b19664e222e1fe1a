"""Everything that decides a run's future, gathered for a checkpoint and put back."""

import hashlib
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import hyvideo
from hyvideo.algorithms.algorithm import Algorithm
from hyvideo.algorithms.optimizer import Optimization
from hyvideo.checkpoint.tensors import StoredTensors, Tensors, load_tensors, require_dtypes, verify_files
from hyvideo.checkpoint.train_state import PendingSave, SaveError, begin_save, latest_checkpoint, read_facts
from hyvideo.config.outside import as_value_error
from hyvideo.config.settings import SETTINGS
from hyvideo.distributed.collectives import all_or_none, broadcast_from_main, gather, local_shard
from hyvideo.models.adapter import adapter_weights, save_lora
from hyvideo.models.parallelize import forget_gathered_weights, trainable_parameters
from hyvideo.training.collect import GroupSampler
from hyvideo.training.guard import RewardGuard

CONTENT = "the content of"
"""Prefix of the names of file hashes among the settings."""

CODE = "the code in hyvideo/"
"""What the hash of the code that trains is called in messages."""

_PACKAGE = Path(hyvideo.__file__).parent


@dataclass
class RunState:
    """The moving parts of a run; every rank has its shards, and the same numbers.

    Attributes:
        transformer: the policy's network; its trained parameters are saved.
        optimization: its optimizers' moments, the average of the weights and the number of updates made.
        algorithm: has a state of its own, such as an anchor.
        sampler: its position is the number of rounds drawn.
        settings: those that decide the result, by name, and the prompt files' content.
        noted: other facts, by name; a resume reports their changes and refuses none.
        lora: arguments of `lora_config`, None for full fine-tuning.
        collective_timeout: seconds that a thread which writes a checkpoint waits for other ranks'.
        began_at: step at which the run folder's rows begin: 0, or that of another run's checkpoint it continued.
        pending: a checkpoint that is being written during training.
        guard: what it has seen.
    """

    transformer: nn.Module
    optimization: Optimization
    algorithm: Algorithm
    sampler: GroupSampler
    settings: Mapping[str, object]
    noted: Mapping[str, str]
    lora: Mapping[str, Any] | None
    collective_timeout: int | None = None
    began_at: int = 0
    pending: PendingSave | None = None
    guard: RewardGuard | None = None

    @property
    def step(self) -> int:
        """Updates made."""
        return self.optimization.updates

    def save(self, folder: Path, *, keep_last: int | None, keep_every: int = 0, beside_training: bool = False) -> Path:
        """Write a checkpoint into `folder` and return its path; a LoRA run's has the adapter in `lora/` too.

        See `begin_save` for what is kept. With `beside_training` it returns when the tensors are copied, and the
        checkpoint is valid after `finish_save`. All ranks raise a SaveError if one cannot write, or has a weight that
        is not finite.
        """
        self.finish_save()
        forget_gathered_weights(self.transformer)  # those kept by a forward pass without gradients hide the shards
        self._require_finite(folder)
        facts = {
            "round": self.sampler.round,
            "settings": dict(self.settings),
            "noted": dict(self.noted),
            "began_at": self.began_at,
            "lora": self.lora,
            "trained": list(trainable_parameters(self.transformer)),
            "sampler": self.sampler.state_dict(),
            "rate_scale": self.optimization.rate_scale,
            **({"guard": self.guard.facts()} if self.guard else {}),
            **self.algorithm.facts(),
        }
        adapter = None if self.lora is None else adapter_weights(self.transformer)

        def write_adapter(unfinished: Path) -> None:
            if adapter is not None:
                save_lora(self.transformer, unfinished / "lora", adapter)

        self.pending = begin_save(
            folder,
            self.step,
            self.tensors(),
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

    def finish_save(self, *, wait: bool = True) -> None:
        """Complete a save that was begun during training, if there is one; a SaveError as `save`.

        Without `wait` it stays pending unless all ranks have written theirs.
        """
        if self.pending is None or not (wait or all(gather(self.pending.written.done()))):
            return
        pending, self.pending = self.pending, None
        pending.finish()

    def position(self) -> dict[str, Any]:
        """Return what a rollout changes: the position in the prompts and the libraries' random generators."""
        return {"sampler": self.sampler.state_dict(), "rng": rng_state()}

    def rewind(self, position: Mapping[str, Any]) -> None:
        """Go back to where `position` was called; no update may have been made since."""
        self.sampler.load_state_dict(position["sampler"])
        set_rng_state(position["rng"])

    def load(self, checkpoint: Path, *, may_change: Collection[str] = ()) -> list[str]:
        """Put `checkpoint` back: after this the run goes on as if it had never stopped. All ranks call it.

        A ValueError if it is unreadable or damaged, or made with other settings. Returns what differs, one line each
        with both values: settings that `may_change` names, and noted facts.
        """
        with all_or_none():
            changed = changed_settings(checkpoint, self.settings, may_change)
            facts = read_facts(checkpoint)
            changed += _differing(self.noted, facts.get("noted", {}))
        verify_files(checkpoint)
        tensors = self.tensors()
        with all_or_none():
            stored = StoredTensors(checkpoint)
            require_dtypes(stored, tensors)
            saved = stored.metadata.state_dict_metadata
            if missing := sorted(set(tensors) - {"rng"} - {name.partition(".")[0] for name in saved}):
                raise ValueError(
                    f"'{checkpoint}' was made without the {', '.join(missing)} that this run's settings need, and a "
                    f"resume cannot add it: keep the algorithm and its settings, or start a new run."
                )
            if surplus := set(facts.get("trained", ())) - set(tensors["policy"]):
                raise ValueError(
                    f"'{checkpoint}' has {len(surplus)} trained weights that this run would drop, among them "
                    f"{min(surplus)}: keep use_lora and lora_target_modules, or start a new run."
                )
        # A run that was begun without a GPU has no state of its generator.
        tensors["rng"] = {name: value for name, value in tensors["rng"].items() if f"rng.{name}" in saved}
        load_tensors(stored, tensors)
        kinds = (ArithmeticError, LookupError, TypeError, ValueError)
        with as_value_error(f"'{checkpoint}' lacks facts that this run needs to continue", *kinds):
            self._take_over(tensors, facts)
            self.sampler.load_state_dict(facts["sampler"])
            self.optimization.updates = facts["step"]
            self.optimization.rate_scale = float(facts.get("rate_scale", 1.0))
            self.began_at = facts.get("began_at", 0)
            if self.guard and "guard" in facts:
                self.guard.load(facts["guard"])
        set_rng_state(tensors["rng"])
        return changed

    def put_policy_back(self, checkpoint: Path) -> None:
        """Put weights, optimizer and the algorithm's state of an earlier checkpoint back; rounds and steps go on."""
        verify_files(checkpoint)
        tensors = self.tensors()
        del tensors["rng"]
        load_tensors(checkpoint, tensors)
        self._take_over(tensors, read_facts(checkpoint))

    def _take_over(self, tensors: Tensors, facts: Mapping[str, Any]) -> None:
        """Restore what depends on weights and moments that were loaded in place."""
        forget_gathered_weights(self.transformer)
        self.algorithm.load_state(tensors, facts)
        if self.optimization.ema:
            self.optimization.ema.load_state_dict(tensors["ema"], equals_policy=False)

    def _require_finite(self, folder: Path) -> None:
        """Refuse to save a policy that is lost: older, good checkpoints would be deleted in its favour."""
        policy = trainable_parameters(self.transformer)
        lost = [name for name, p in policy.items() if not torch.isfinite(local_shard(p.detach())).all()]
        lost = list(dict.fromkeys(name for names in gather(lost) for name in names))
        if lost:
            good = broadcast_from_main(lambda: latest_checkpoint(folder))
            raise SaveError(
                f"step {self.step} is not saved: {len(lost)} of {len(policy)} trained weights are not finite, first "
                f"{lost[0]}. Last good checkpoint: {good or 'none was saved yet'}. Continue from it with a lower "
                "learning_rate, and --resume_may_change learning_rate."
            )

    def tensors(self) -> Tensors:
        """Return references to all tensors of the state, in groups."""
        unused = [each for each in self.optimization.optimizers if not each.state]
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        optimizer = get_optimizer_state_dict(self.transformer, tuple(self.optimization.optimizers), options=flat)
        for state in (state for each in unused for state in each.state.values()):  # made by an update of length 0
            if "step" in state:
                state["step"].zero_()
        tensors = {
            "policy": {name: p.detach() for name, p in trainable_parameters(self.transformer).items()},
            "optimizer": {name: value for name, value in optimizer.items() if isinstance(value, Tensor)},
            "rng": rng_state(),
        }
        ema = self.optimization.ema
        return tensors | ({"ema": ema.state_dict()} if ema else {}) | self.algorithm.tensors()


def changed_settings(checkpoint: Path, settings: Mapping[str, object], may_change: Collection[str]) -> list[str]:
    """Say which `RunState.settings` differ from a checkpoint's; others than `may_change` names are a ValueError."""
    there = read_facts(checkpoint).get("settings", {})
    differing = [name for name in settings if name in there and there[name] != settings[name]]
    told = _differing(settings, there)
    names = ["train_video_csv" if name.startswith(CONTENT) else name for name in differing]
    refused = [name for name in dict.fromkeys(names) if name not in may_change]
    # A setting that is newer than the checkpoint had no other value than its default there.
    added = [name for name in settings if name in SETTINGS and name not in {*there, *may_change}]
    new = [name for name in added if settings[name] != SETTINGS[name].default]
    if there and not (refused or new):
        return told
    told += [f"{name} is {settings[name]!r}, the checkpoint is older than that setting" for name in new]
    changed = [*refused, *new]
    raise ValueError(
        f"'{checkpoint}' was made with other settings: "
        f"{'; '.join(told) or 'it does not say which'}. batch_size counts the videos of all ranks. Resume with the "
        "config.yaml of its run folder"
        + (f", or change them on purpose with --resume_may_change {' '.join(changed)}." if changed else ".")
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


def code_hash(package: Path = _PACKAGE) -> str:
    """Return 16 digits over the files of the package."""
    code = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        code.update(path.read_bytes())
    return code.hexdigest()[:16]


def code_version(package: Path = _PACKAGE) -> str:
    """Return the hash and, where git knows it, the commit: `1f0c3a5e7b9d2468 (commit b84b4cd-dirty)`."""
    if not (package.parent / ".git").exists():  # else git would answer for a repository around this one
        return code_hash(package)
    git = ["git", "-C", str(package.parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return code_hash(package)
    return f"{code_hash(package)} (commit {commit})"
