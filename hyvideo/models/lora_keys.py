"""LoRA adapters under the original names of the transformer's modules <-> under those of diffusers.

An adapter adds `alpha / rank * B @ A` to a weight. Renaming keeps A and B, with two exceptions: where the weight's rows
are exchanged so are B's, and the refiner's fused query, key and value are one adapter there and three here. The fused
one stacks the three A and has the three B on its diagonal, with three times rank and alpha: the same sum, and exact to
split again.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from peft.utils.other import get_pattern_key
from torch import Tensor

from hyvideo.models.conversion import TRANSFORMER_MODULES, Part, transformer_part

_ENDINGS = ("lora_A.weight", "lora_B.weight")
_MATTERS = ("bias", "init_lora_weights", "lora_dropout", "peft_type", "task_type")

Adapter = dict[str, Tensor]
Settings = dict[str, Any]
"""Content of a `peft.LoraConfig`."""


def modules_of_original(target: str) -> str | None:
    """Return the pattern of the modules that the original calls `target`, by the end of their path; None for our names.

    Example: `img_attn_q` is `transformer_blocks`, any number, `attn.to_q`, and not the text refiner's `to_q`.
    """
    if any(f".{ours}".endswith(f".{target}") for ours, _ in TRANSFORMER_MODULES):
        return None
    found, length = [], target.count(".") + 1
    for ours, theirs in TRANSFORMER_MODULES:
        parts = theirs.split(".")
        end = re.escape(".".join(parts[-length:])).replace(r"\#", r"(\d+)")
        if length <= len(parts) and (match := re.fullmatch(end, target)):
            numbers = [r"\d+"] * ".".join(parts[:-length]).count("#") + list(match.groups())
            pattern = re.escape(ours)
            for number in numbers:
                pattern = pattern.replace(r"\#", number, 1)
            found.append(pattern)
    return "|".join(found) or None


def has_original_keys(names: Iterable[str]) -> bool:
    """Whether an adapter's tensors are named as the original transformer's modules are."""
    return any(name.startswith(("double_blocks.", "txt_in.", "byt5_in.", "final_layer.", "img_in.")) for name in names)


def adapter_to_diffusers(
    tensors: Adapter, settings: Mapping[str, Any] | None, weights: Iterable[str]
) -> tuple[Adapter, Settings]:
    """Rename an adapter with original keys; return its tensors under diffusers names, and their settings.

    Its tensors are `<original module>.lora_A.weight` `[r, in]` and `.lora_B.weight` `[out, r]`, and its settings those
    of a LoraConfig (None: the ranks of the tensors, and an alpha equal to them). `weights` are the names of the
    diffusers transformer's tensors.
    """
    modules = _modules(tensors, settings or {})
    places: dict[str, list[tuple[str, Part]]] = {}
    for name in weights:
        if name.endswith(".weight"):
            part = transformer_part(name)
            places.setdefault(part.name.removesuffix(".weight"), []).append((name.removesuffix(".weight"), part))
    if unknown := sorted(set(modules) - set(places)):
        raise ValueError(f"it has adapters of modules this transformer lacks: {', '.join(unknown[:5])}")
    renamed, ranks, alphas = {}, {}, {}
    for original in modules:
        down, up = (tensors[f"{original}.{ending}"] for ending in _ENDINGS)
        alpha = _alpha(settings, original, down.shape[0])
        for module, part in places[original]:
            rank, rows = down.shape[0] // part.count, up.shape[0] // part.count
            piece_up = torch.cat([up[start:stop] for start, stop in part.rows(0, rows, rows)]).clone()
            blocks = [up[i * rows : (i + 1) * rows, i * rank : (i + 1) * rank] for i in range(part.count)]
            piece_down, own = down.clone(), slice(part.index * rank, (part.index + 1) * rank)
            if part.count > 1 and up.any() and torch.equal(up, torch.block_diag(*blocks)):  # three adapters in one
                piece_down, piece_up = down[own].clone(), piece_up[:, own].clone()
            renamed[f"{module}.{_ENDINGS[0]}"], renamed[f"{module}.{_ENDINGS[1]}"] = piece_down, piece_up
            ranks[module] = piece_down.shape[0]
            alphas[module] = alpha * piece_down.shape[0] / down.shape[0]
    exact = "|".join(map(re.escape, sorted(ranks)))  # a list would match by endings: norm_out.linear is several modules
    return renamed, _settings(settings or {}, ranks, alphas) | {"target_modules": exact}


def adapter_to_original(tensors: Adapter, settings: Mapping[str, Any]) -> tuple[Adapter, Settings]:
    """Give an adapter original keys: the inverse of `adapter_to_diffusers`, with the same arguments and errors."""
    groups: dict[str, dict[int, tuple[str, Part]]] = {}
    for module in _modules(tensors, settings):
        part = transformer_part(f"{module}.weight")
        groups.setdefault(part.name.removesuffix(".weight"), {})[part.index] = (module, part)
    renamed, ranks, alphas = {}, {}, {}
    for original, members in groups.items():
        downs, ups, scales = [], [], set()
        for _, (module, part) in sorted(members.items()):
            down, up = (tensors[f"{module}.{ending}"] for ending in _ENDINGS)
            downs.append(down)
            ups.append(up.roll(up.shape[0] // 2, 0) if part.swapped else up)
            scales.add(_alpha(settings, module, down.shape[0]) / down.shape[0])
        count = next(iter(members.values()))[1].count
        if len(members) != count or len(scales) != 1:
            raise ValueError(
                f"{original} is one module in the original layout; its adapter needs all {count} of query, key and "
                f"value with one scale. Received {', '.join(module for module, _ in members.values())}."
            )
        renamed[f"{original}.{_ENDINGS[0]}"] = torch.cat(downs)
        renamed[f"{original}.{_ENDINGS[1]}"] = torch.block_diag(*ups)
        ranks[original] = sum(down.shape[0] for down in downs)
        alphas[original] = scales.pop() * ranks[original]
    return renamed, _settings(settings, ranks, alphas)


def _modules(tensors: Iterable[str], settings: Mapping[str, Any]) -> list[str]:
    """Return the adapted modules; a ValueError unless it is plain LoRA: two matrices for each, and nothing else."""
    if kinds := [name for name in ("use_dora", "use_rslora") if settings.get(name)]:
        raise ValueError(f"it sets {', '.join(kinds)}; adapters with original keys must be plain LoRA")
    modules = list(dict.fromkeys(name.rpartition(".lora_")[0] for name in tensors))
    if surplus := sorted(set(tensors) ^ {f"{module}.{ending}" for module in modules for ending in _ENDINGS}):
        raise ValueError(f"each module needs exactly lora_A.weight and lora_B.weight; see {', '.join(surplus[:5])}")
    return modules


def _alpha(settings: Mapping[str, Any] | None, module: str, rank: int) -> float:
    """Return the alpha of one module's adapter."""
    if settings is None:
        return rank
    patterns = settings.get("alpha_pattern") or {}
    return patterns.get(get_pattern_key(patterns.keys(), module), settings["lora_alpha"])


def _settings(old: Mapping[str, Any], ranks: Mapping[str, int], alphas: Mapping[str, float]) -> Settings:
    """Return settings that name every module, and those whose rank or alpha is not the usual one."""
    rank = old.get("r") or max(ranks.values(), default=1)
    alpha = old.get("lora_alpha") or rank
    return {name: old[name] for name in _MATTERS if name in old} | {
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(ranks),
        "rank_pattern": {f"^{re.escape(module)}": value for module, value in ranks.items() if value != rank},
        "alpha_pattern": {
            f"^{re.escape(module)}": int(value) if value == int(value) else value
            for module, value in alphas.items()
            if value != alpha
        },
    }
