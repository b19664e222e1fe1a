"""LoRA adapters under the names of other programs <-> under those of diffusers.

An adapter adds `alpha / rank * B @ A` to a weight. Renaming keeps A and B, with two exceptions: where the weight's rows
are exchanged so are B's, and a fused query, key and value (the refiner's in the original layout, all in ComfyUI) is one
adapter there and three here. The fused one that we write stacks the three A and has the three B on its diagonal, with
three times rank and alpha: the same sum, and exact to split again. A fused B that is not diagonal is cut into three,
and each gets the whole A.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import torch
from peft.utils.other import get_pattern_key
from torch import Tensor
from torch.nn.functional import pad

from hyvideo.models.conversion import TRANSFORMER_MODULES, Part, transformer_part

_ENDINGS = ("lora_A.weight", "lora_B.weight")
_MATTERS = ("bias", "init_lora_weights", "lora_dropout", "peft_type", "task_type")
_HIGHEST_RANK, _MOST_PADDING = 8192, 8

PEFT, PIPELINE, _KOHYA = "base_model.model.", "transformer.", "lora_unet_"
_PROGRAMS = {_KOHYA: "kohya or musubi-tuner", "lora_transformer_": "OneTrainer", PEFT: "PEFT"}
_PROGRAMS |= {"diffusion_model.": "ComfyUI", PIPELINE: "a diffusers pipeline"}
"""Prefix of an adapter's names -> what writes it. After one that ends with `_`, a module's path has `_` for dots."""

_TENSOR = re.compile(r"(.+?)\.(lora_A|lora_down|lora\.down|lora_B|lora_up|lora\.up|alpha)(?:\.default)?(?:\.weight)?")
_MATRICES = {"lora_A": 0, "lora_down": 0, "lora.down": 0, "lora_B": 1, "lora_up": 1, "lora.up": 1}
_COMFYUI = (
    (r"_attn_(qkv|proj)$", r"_attn.\1"),
    (r"_mod\.linear$", "_mod.lin"),
    (r"mlp\.fc1$", "mlp.0"),
    (r"mlp\.fc2$", "mlp.2"),
    (r"(_in|t_embedder)\.mlp\.0$|(c_embedder)\.linear_1$", r"\1\2.in_layer"),
    (r"(_in|t_embedder)\.mlp\.2$|(c_embedder)\.linear_2$", r"\1\2.out_layer"),
)
"""The original's modules -> those of ComfyUI's network, as its `HunyuanVideo.process_unet_state_dict` renames them."""

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


def naming_of(names: Iterable[str]) -> tuple[str, str] | None:
    """Return the prefix of an adapter's names and what writes them; None if they are this project's own, or unknown."""
    names = list(names)
    for prefix, program in _PROGRAMS.items():
        if any(name.startswith(prefix) for name in names):
            return prefix, program
    roots = tuple({f"{theirs.partition('.')[0]}." for _, theirs in TRANSFORMER_MODULES})
    if any(name.startswith(roots) for name in names):
        return "", "the original layout"
    if any(match and not name.endswith(_ENDINGS) for name in names if (match := _TENSOR.fullmatch(name))):
        return "", "diffusers with other endings"
    return None


def adapter_to_diffusers(
    tensors: Adapter, settings: Mapping[str, Any] | None, weights: Mapping[str, Tensor]
) -> tuple[Adapter, Settings]:
    """Rename an adapter of another program; return its tensors under diffusers names, and their settings.

    All its modules get one rank and one alpha, with which training can continue. The rank is the largest; smaller
    adapters are padded with zeros, which training leaves zero. The alpha keeps the scale `alpha / rank` that all
    modules share. If they share none, or if alpha would not be a positive whole number, it is the rank, and every B is
    multiplied by its own scale. None of this changes `alpha / rank * B @ A`, up to rounding in float32.

    Args:
        tensors: matrices A `[r, in]` and B `[out, r]`, under any of the names in docs/weights.md. A scalar `alpha` may
            stand beside them.
        settings: those of a LoraConfig, for modules without an alpha of their own. Without either, alpha is the rank.
        weights: the diffusers transformer's state dict, of which only names and shapes matter.

    A ValueError names the key that does not fit, what was expected and what to do.
    """
    prefix, _ = naming_of(tensors) or ("", "")
    places = _places(weights, flat=prefix.endswith("_"))
    if (settings or {}).get("use_dora"):
        raise ValueError("it sets use_dora; expected plain LoRA. Merge it in its own program")
    found: dict[str, tuple[Tensor, Tensor, float]] = {}
    for name, (down, up, scale) in _read(tensors, settings, prefix, places).items():
        for module, part in places[name].items():
            rows, columns = weights[f"{module}.weight"].shape
            rank = len(down)
            if (down.shape[1], len(up)) != (columns, rows * part.count):
                raise ValueError(
                    f"{prefix}{name} has matrices of {list(down.shape)} and {list(up.shape)}; expected [rank, "
                    f"{columns}] and [{rows * part.count}, rank]. Use an adapter of this base model"
                )
            piece_down, piece_up = down, torch.cat([up[start:stop] for start, stop in part.rows(0, rows, rows)])
            if part.count > 1 and rank % part.count == 0 and up.any():
                blocks = [stripe.chunk(part.count, 1)[i] for i, stripe in enumerate(up.chunk(part.count))]
                if torch.equal(up, torch.block_diag(*blocks)):  # three adapters in one
                    piece_down, piece_up = down.chunk(part.count)[part.index], blocks[part.index]
                    if not (piece_down.any() or piece_up.any()):
                        continue
            if module in found:
                raise ValueError(f"{prefix}{name} adapts {module}, which another of its names adapts too. Remove one")
            found[module] = (piece_down, piece_up, scale)
    return _of_one_rank(found, settings or {})


def _read(
    tensors: Adapter, settings: Mapping[str, Any] | None, prefix: str, places: Iterable[str]
) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Return A, B and scale of every module by its name without prefix."""
    given: dict[str, dict[int, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _TENSOR.fullmatch(key.removeprefix(prefix))
        if match is None or not key.startswith(prefix):
            raise ValueError(
                f"{key[:200]} is no matrix or alpha of plain LoRA on the transformer; expected only names like "
                f"{prefix}MODULE.lora_A.weight, .lora_B.weight (or lora_down, lora_up) and .alpha. Remove it, or train "
                "the adapter again as plain LoRA without text encoders"
            )
        if match[1] not in places:
            nearest = get_close_matches(match[1][:200], places, 1, 0)[0]
            raise ValueError(
                f"{key[:200]} is of a module this transformer lacks; expected names like {prefix}{nearest}. Check that "
                "the adapter was made for this version of HunyuanVideo-1.5"
            )
        if given.setdefault(match[1], {}).setdefault(_MATRICES.get(match[2], 2), tensor) is not tensor:
            raise ValueError(f"{key[:200]} stands beside the same tensor with another ending. Remove one")
    found = {}
    for name, members in given.items():
        pair = [members[part] for part in (0, 1) if part in members]
        matrices = len(pair) == 2 and all(matrix.is_floating_point() and matrix.ndim == 2 for matrix in pair)
        if not matrices or not 0 < len(pair[0]) == pair[1].shape[1] <= _HIGHEST_RANK:
            held = " and ".join(f"{matrix.dtype} {list(matrix.shape)}" for matrix in pair)
            raise ValueError(
                f"{prefix}{name} has {held or 'nothing'}; expected floating-point matrices lora_A [rank, in] and "
                f"lora_B [out, rank] (or lora_down and lora_up) of rank 1 to {_HIGHEST_RANK}. Copy the file again"
            )
        down, up = pair
        found[name] = (down, up, _scale(members.get(2), settings, name, len(down)))
    return found


def _scale(alpha: Tensor | None, settings: Mapping[str, Any] | None, name: str, rank: int) -> float:
    """Return what B @ A of a module is multiplied by: the file's alpha over the rank, else as the settings say."""
    if alpha is not None:
        if alpha.numel() != 1 or not 0 < abs(float(alpha)) < 2**64:
            raise ValueError(f"{name}.alpha is {alpha.flatten()[:3].tolist()}; expected one number that is not 0")
        return float(alpha) / rank
    if settings is None:
        return 1.0
    ranks, alphas = (settings.get(f"{kind}_pattern") or {} for kind in ("rank", "alpha"))
    expected = ranks.get(get_pattern_key(ranks.keys(), name), settings.get("r", 8))
    if expected != rank:
        raise ValueError(
            f"{name} has rank {rank}, and the adapter's settings say {expected}. Use the file's own settings"
        )
    value = alphas.get(get_pattern_key(alphas.keys(), name), settings.get("lora_alpha", 8))
    return value / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _of_one_rank(
    found: Mapping[str, tuple[Tensor, Tensor, float]], settings: Mapping[str, Any]
) -> tuple[Adapter, Settings]:
    """Pad to the largest rank, and choose the alpha; what `adapter_to_diffusers` returns."""
    rank = max(down.shape[0] for down, _, _ in found.values())
    alpha = max(1, round(next(scale for _, _, scale in found.values()) * rank))
    if not all(math.isclose(scale * rank, alpha, rel_tol=2e-7) for _, _, scale in found.values()):
        alpha = rank
    size = sum(down.numel() + up.numel() for down, up, _ in found.values())
    padded = sum(rank * (down.shape[1] + up.shape[0]) for down, up, _ in found.values())
    if padded > _MOST_PADDING * size:
        raise ValueError(
            f"its ranks go up to {rank}, with which all modules would take {padded / size:.0f} times its memory; "
            f"expected at most {_MOST_PADDING} times. Train or resize it with ranks that differ less"
        )
    renamed = {}
    for module, (down, up, scale) in found.items():
        factor = scale * rank / alpha
        up = up if math.isclose(factor, 1, rel_tol=2e-7) else up.float() * factor
        renamed[f"{module}.{_ENDINGS[0]}"] = pad(down, (0, 0, 0, rank - down.shape[0]))
        renamed[f"{module}.{_ENDINGS[1]}"] = pad(up, (0, rank - up.shape[1]))
    exact = "|".join(map(re.escape, sorted(found)))  # a list would match by endings: norm_out.linear is several modules
    one = {"r": rank, "lora_alpha": alpha, "target_modules": exact, "rank_pattern": {}, "alpha_pattern": {}}
    return renamed, {name: settings[name] for name in _MATTERS if name in settings} | one


def _original(module: str) -> Part:
    """Return the part of the original layout's module that a diffusers module is."""
    part = transformer_part(f"{module}.weight")
    return replace(part, name=part.name.removesuffix(".weight"))


def _fused(module: str) -> Part:
    """Return the part of the original layout's module, where all queries, keys and values are fused."""
    part = _original(module)
    match = re.fullmatch(r"(.+_attn_)([qkv])", part.name)
    return Part(f"{match[1]}qkv", "qkv".index(match[2]), 3) if match else part


def _comfyui(module: str) -> Part:
    """Return the part of ComfyUI's module."""
    part = _fused(module)
    name = part.name
    for pattern, theirs in _COMFYUI:
        name = re.sub(pattern, theirs, name)
    return replace(part, name=name)


def _places(weights: Mapping[str, Tensor], *, flat: bool) -> dict[str, dict[str, Part]]:
    """Return every name that a linear layer has in some program -> the diffusers modules that are parts of it."""
    places: dict[str, dict[str, Part]] = {}
    for name, weight in weights.items():
        if name.endswith(".weight") and weight.ndim == 2:
            module = name.removesuffix(".weight")
            for part in (Part(module), _original(module), _fused(module), _comfyui(module)):
                places.setdefault(part.name.replace(".", "_") if flat else part.name, {})[module] = part
    return places


def adapter_to_original(tensors: Adapter, settings: Mapping[str, Any]) -> tuple[Adapter, Settings]:
    """Give an adapter original keys: the inverse of `adapter_to_diffusers`, with the same arguments and errors."""
    renamed, ranks, alphas = {}, {}, {}
    for name, (down, up, alpha) in _joined(tensors, settings, _original).items():
        renamed[f"{name}.{_ENDINGS[0]}"], renamed[f"{name}.{_ENDINGS[1]}"] = down, up
        ranks[name], alphas[name] = down.shape[0], alpha
    return renamed, _settings(settings, ranks, alphas)


def adapter_to_kohya(tensors: Adapter, settings: Mapping[str, Any], *, comfyui: bool) -> Adapter:
    """Return the tensors `lora_unet_MODULE.lora_down.weight`, `.lora_up.weight` and `.alpha` of an adapter.

    The modules are those of ComfyUI's network or, without `comfyui`, the original's, which musubi-tuner has.
    """
    written = {}
    for name, (down, up, alpha) in _joined(tensors, settings, _comfyui if comfyui else _original).items():
        key = f"{_KOHYA}{name.replace('.', '_')}"
        written |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up, f"{key}.alpha": torch.tensor(alpha)}
    return written


def _joined(
    tensors: Adapter, settings: Mapping[str, Any], place: Callable[[str], Part]
) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Return A, B and alpha by the names that `place` gives; a part of a fused module without an adapter has zeros."""
    groups: dict[str, list[tuple[Tensor, Tensor, float] | None]] = {}
    modules = {name.rpartition(".lora_")[0] for name in tensors}
    for module, (down, up, scale) in _read(tensors, settings, "", modules).items():
        part = place(module)
        up = up.roll(up.shape[0] // 2, 0) if part.swapped else up
        groups.setdefault(part.name, [None] * part.count)[part.index] = (down, up, scale)
    joined = {}
    for name, members in groups.items():
        scale = max((member[2] for member in members if member), key=abs)
        down, up, _ = next(member for member in members if member)
        parts = [member or (torch.zeros_like(down), torch.zeros_like(up), scale) for member in members]
        ups = [up if own == scale else up.float() * (own / scale) for _, up, own in parts]
        whole = torch.cat([down for down, _, _ in parts])
        joined[name] = (whole, torch.block_diag(*ups), scale * len(whole))
    return joined


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
