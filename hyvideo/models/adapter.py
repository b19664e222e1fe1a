"""The LoRA adapter of a policy: made, loaded, checked, merged and saved, under diffusers' name and in its file."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
from accelerate.utils import set_module_tensor_to_device
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from diffusers.utils import logging as diffusers_logging
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import get_peft_model_state_dict
from pydantic import AfterValidator, BaseModel, Field, FiniteFloat
from pydantic_core import from_json
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from hyvideo.config.outside import as_value_error, read_file
from hyvideo.config.schema import ModelConfig
from hyvideo.data.randomness import seed_for
from hyvideo.distributed.collectives import whole
from hyvideo.models.lora_keys import PEFT, PIPELINE, adapter_to_diffusers, modules_of_original, naming_of

ADAPTER = "default"
ALL_LINEAR = "all-linear"
ADAPTER_FILE = "pytorch_lora_weights.safetensors"
PEFT_FILE, PEFT_SETTINGS = "adapter_model.safetensors", "adapter_config.json"

_MISFITS = (
    *(OSError, RuntimeError, ValueError, TypeError, SafetensorError, re.error),
    *(ArithmeticError, AttributeError, LookupError, AssertionError),
)
"""What the libraries fail with on an adapter of another form."""

_ABOUT = ("auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights", "peft_version", "revision")
"""Settings that say where an adapter is from, or how it was initialised: they are left out."""


def _not_zero(alpha: float) -> float:
    if alpha == 0:
        raise ValueError("an adapter with alpha 0 changes nothing")
    return alpha


def _quick(pattern: str) -> str:
    """Refuse a regular expression that might search forever: repeated groups, or many repetitions but of digits."""
    if re.search(r"\)[*+?{]", pattern) or len(re.findall(r"(?<!\\d)[*+?{]", pattern)) > 4:
        raise ValueError(f"the pattern {pattern[:80]!r} repeats too much: name the modules")
    return re.compile(pattern).pattern


_Pattern = Annotated[str, AfterValidator(_quick)]
_Patterns = list[str] | _Pattern | None
_Rank = Annotated[int, Field(ge=1, le=8192)]


class _LoraSettings(BaseModel, strict=True, extra="allow"):
    """Settings in an adapter's file that are passed on; some could run code, hang, or exhaust the memory."""

    peft_type: str = "LORA"
    task_type: str | None = None
    r: _Rank = 8
    lora_alpha: Annotated[int | FiniteFloat, AfterValidator(_not_zero)] = 8
    lora_dropout: FiniteFloat = 0.0
    target_modules: _Patterns = None
    exclude_modules: _Patterns = None
    layers_pattern: _Patterns = None
    layers_to_transform: list[int] | int | None = None
    rank_pattern: dict[_Pattern, _Rank] = {}
    alpha_pattern: dict[_Pattern, int | FiniteFloat] = {}
    bias: str = "none"
    use_rslora: bool = False
    use_dora: bool = False


def lora_facts(model: ModelConfig) -> dict[str, Any] | None:
    """Return the arguments of `lora_config` that the settings ask for; None for full fine-tuning."""
    if not model.use_lora:
        return None
    return {"rank": model.lora_r, "alpha": model.lora_alpha, "target_modules": list(model.lora_target_modules)}


def configured_adapter(model: ModelConfig) -> LoraConfig | None:
    """Return the adapter that the settings ask for; None for full fine-tuning."""
    facts = lora_facts(model)
    return facts and lora_config(**facts)


def lora_config(rank: int, alpha: int, target_modules: Sequence[str]) -> LoraConfig:
    """Return the adapter's configuration; the modules are named by the end of their path here or in the original.

    `all-linear` alone stands for every linear layer but `proj_out`, where the ranks of a video join its tokens.
    The second matrix starts at zero, so the policy starts as the base model. A ValueError refuses an absurd alpha.
    """
    if not abs(alpha) < 2**64:
        raise ValueError(f"the alpha of an adapter is {alpha!r:.40}, expected less than 2^64.")
    theirs = {name: modules_of_original(name) for name in target_modules}
    chosen = list(target_modules)
    if chosen == [ALL_LINEAR]:
        chosen = _linear_layers()
    elif any(theirs.values()):  # PEFT takes names, or one pattern
        chosen = "|".join(pattern or rf"(.*\.)?{re.escape(name)}" for name, pattern in theirs.items())
    return LoraConfig(r=rank, lora_alpha=alpha, target_modules=chosen, init_lora_weights=True)


@cache
def _linear_layers() -> str:
    """Return a pattern of the names of a transformer's linear layers but the last, whatever its depth."""
    with torch.device("meta"):
        shallow = HunyuanVideo15Transformer3DModel(num_layers=1, num_refiner_layers=1, use_meanflow=True)
    names = [name for name, module in shallow.named_modules() if isinstance(module, nn.Linear) and name != "proj_out"]
    return "|".join(re.sub(r"(?<=_blocks)\\\.0", r"\\.\\d+", re.escape(name)) for name in names)


def base_weight(name: str) -> str | None:
    """Return the base model's name of an adapted network's weight; None for a weight of the adapter."""
    return None if "lora_" in name else name.replace(".base_layer.", ".")


def draw_adapter(transformer: HunyuanVideo15Transformer3DModel, seed: int) -> None:
    """Give an adapter that has no memory yet its first values, on the CPU; one that was loaded keeps its own.

    The distribution is PEFT's: the first matrix uniform within 1 / sqrt(inputs), the second zero. Each matrix has a
    seed of its own, so that the values do not depend on how the network is made or shared among ranks.
    """
    for name, parameter in list(transformer.named_parameters()):
        if "lora_" not in name or not parameter.is_meta:
            continue
        value = torch.zeros(parameter.shape, dtype=parameter.dtype)
        if "lora_A" in name:
            limit = 1 / math.sqrt(parameter.shape[1])
            value.uniform_(-limit, limit, generator=torch.Generator().manual_seed(seed_for(seed, "adapter", name)))
        set_module_tensor_to_device(transformer, name, "cpu", value=value)


def check_lora(path: str | Path) -> Path:
    """Return the adapter's file: `path`, or one in that folder or in `lora` below it, or raise a ValueError."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"lora path: there is nothing at '{path}'.")
    if path.is_file() and path.suffix == ".safetensors":
        return _readable(path)
    places = [path / inner / ADAPTER_FILE for inner in (".", "lora", f"lora/{ADAPTER}")] + [path / PEFT_FILE]
    for place in places:
        if place.is_file():
            return _readable(place)
    held = ", ".join(sorted(place.name for place in path.glob("*.safetensors"))[:3])
    raise ValueError(
        f"lora path: no adapter at '{places[0]}', nor {PEFT_FILE} there, nor in lora below it. Name the folder that "
        f"holds one, or a .safetensors file{held and f' ({held} is there)'}."
    )


def _readable(path: Path) -> Path:
    """Return a safetensors file that is whole, or raise a ValueError; of its weights nothing is read."""
    what = f"lora path: '{path}' is no whole safetensors file"
    with as_value_error(what, SafetensorError, OSError, advice="Download it again."), safe_open(path, framework="pt"):
        return path


def load_lora(transformer: HunyuanVideo15Transformer3DModel, folder: str | Path) -> None:
    """Add the adapter in a folder or file: one that `save_lora` wrote, or one of another program (docs/weights.md).

    The latter gets one rank and one alpha, as `adapter_to_diffusers` says. A network on the meta device gets the
    adapter's values too, on the CPU. A ValueError says that there is no readable adapter, or that it was made for
    another model.
    """
    path, empty, named = check_lora(folder), transformer.device.type == "meta", None
    if not empty:
        load_lora(without_memory(transformer), folder)  # the file's settings may ask for far more than its tensors need
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            note = (file.metadata() or {}).get(LORA_ADAPTER_METADATA_KEY)
        named = naming_of(tensors)
        beside = path.with_name(PEFT_SETTINGS)
        if note is None and not any(name.endswith(".alpha") for name in tensors):
            if beside.exists():
                note = read_file(beside).decode()
            elif named and named[0] == PEFT:
                raise ValueError(f"its alpha stands in {PEFT_SETTINGS}, which is not beside it. Copy it there")
        settings = None
        if note is not None:
            if named and named[0] == PIPELINE:
                note = json.dumps({name.removeprefix(PIPELINE): value for name, value in from_json(note).items()})
            read, usual = _LoraSettings.model_validate_json(note), LoraConfig().to_dict()
            extra = {name: value for name, value in (read.model_extra or {}).items() if name not in _ABOUT}
            if others := [name for name, value in extra.items() if value != usual.get(name)]:
                raise ValueError(f"it sets {', '.join(others[:5])[:200]}, which this project does not read")
            settings = read.model_dump(exclude_unset=True, include=set(_LoraSettings.model_fields))
        if named:
            tensors, settings = adapter_to_diffusers(tensors, settings, transformer.state_dict())
        _require_finite(tensors)
        with without_diffusers_logs(), torch.device("meta") if empty else nullcontext():
            transformer.load_lora_adapter(
                tensors, adapter_name=ADAPTER, prefix=None, metadata=settings, low_cpu_mem_usage=empty
            )
    except torch.OutOfMemoryError:
        raise
    except _MISFITS as error:
        raise ValueError(
            f"lora path: the adapter in '{path}'{named and f', named as in {named[1]},' or ''} does not fit this "
            f"transformer: {str(error)[:1000]}"
        ) from error
    held = set(get_peft_model_state_dict(transformer, adapter_name=ADAPTER))
    if differing := sorted(set(tensors) - held or held - set(tensors)):
        surplus = set(tensors) - held
        told = "does not fit this transformer, which has no place for" if surplus else "is not whole: it lacks"
        raise ValueError(
            f"lora path: the adapter in '{path}' {told} {', '.join(differing[:3])} ({len(differing)} weights in all). "
            "Expected a whole adapter of this base model."
        )
    lent = [name for name, p in transformer.named_parameters() if p.is_meta and base_weight(name) is None]
    for name in lent:
        value = tensors[name.replace(f".{ADAPTER}.", ".")]
        set_module_tensor_to_device(transformer, name, "cpu", value=value, dtype=value.dtype)


def _require_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise a ValueError unless there are tensors, all of them of real numbers and some named as those of LoRA here."""
    if not any(".lora_B." in name and tensor.ndim > 1 for name, tensor in tensors.items()):
        raise ValueError(
            f"it holds {', '.join(sorted(tensors))[:200] or 'no tensors'}; expected matrices <module>.lora_A.weight "
            "and <module>.lora_B.weight, or the names of another program in docs/weights.md. Rename them"
        )
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not torch.isfinite(tensor.float()).all():
            raise ValueError(f"{name[:200]} is of {tensor.dtype}, or has values that are not finite")


def without_memory(transformer: HunyuanVideo15Transformer3DModel) -> HunyuanVideo15Transformer3DModel:
    """Return a network as `transformer` without an adapter, on the meta device."""
    with torch.device("meta"):
        return HunyuanVideo15Transformer3DModel.from_config(dict(transformer.config))


def check_same_adapter(transformer: HunyuanVideo15Transformer3DModel, wanted: LoraConfig, folder: str) -> None:
    """Refuse an adapter that differs from the run's settings: by these its checkpoints are read again."""
    loaded = transformer.peft_config[ADAPTER]
    differing = [
        f"{flag} is {getattr(wanted, name)}, the adapter has {getattr(loaded, name)}"
        for flag, name in (("lora_r", "r"), ("lora_alpha", "lora_alpha"))
        if getattr(wanted, name) != getattr(loaded, name)
    ]
    adapted = {name for name, module in transformer.named_modules() if isinstance(module, LoraLayer)}
    plain = {name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)}
    plain -= {name for name in plain if name.startswith(tuple(f"{outer}." for outer in adapted))}
    chosen = {name for name in plain | adapted if check_target_module_exists(wanted, name)}
    if chosen != adapted:
        differing.append(
            f"lora_target_modules chooses {len(chosen)} modules, the adapter has {len(adapted)}, "
            f"which differ in {', '.join(sorted(chosen ^ adapted)[:3])}"
        )
    if loaded.rank_pattern or loaded.alpha_pattern:
        differing.append("the adapter's modules have several ranks or alphas")
    if differing:
        raise ValueError(
            f"pretrained_lora_path: the adapter in '{folder}' has other settings than the run: {'; '.join(differing)}. "
            "Set these flags to the adapter's."
        )


def merge_lora(transformer: HunyuanVideo15Transformer3DModel) -> None:
    """Add the adapter of `transformer`, if it has one, to its weights, in place."""
    if ADAPTER in getattr(transformer, "peft_config", {}):
        transformer.fuse_lora()
        transformer.unload_lora()


def save_lora(
    transformer: HunyuanVideo15Transformer3DModel, folder: str | Path, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write the adapter to `folder` as diffusers does (`pytorch_lora_weights.safetensors`, config in its metadata).

    `weights` are `adapter_weights`, needed where those in `transformer` are sharded. A disk that fails is an OSError.
    """
    if weights is not None:
        unsharded = without_memory(transformer)
        with torch.device("meta"):
            unsharded.add_adapter(transformer.peft_config[ADAPTER], adapter_name=ADAPTER)
        unsharded.load_state_dict(dict(weights), strict=False, assign=True)
        transformer = unsharded
    try:
        with without_diffusers_logs():
            transformer.save_lora_adapter(str(folder), adapter_name=ADAPTER)
    except SafetensorError as error:
        raise OSError(f"cannot write an adapter to '{folder}': {error}") from error


def adapter_weights(transformer: nn.Module) -> dict[str, Tensor]:
    """Return the adapter's whole weights by parameter name, on every rank (all ranks call it)."""
    return {name: whole(p.detach()) for name, p in transformer.named_parameters() if "lora_" in name}


@contextmanager
def without_diffusers_logs() -> Iterator[None]:
    """Silence diffusers: it warns that guiders are experimental, and logs what it raises, line by line of a network."""
    verbosity = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity(diffusers_logging.CRITICAL)
    try:
        yield
    finally:
        diffusers_logging.set_verbosity(verbosity)
