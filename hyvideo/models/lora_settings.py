"""The settings in an adapter's file: checked, because some could run code, hang, or exhaust the memory."""

import re
from typing import Annotated, Any

from peft import LoraConfig
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat

_ABOUT = ("auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights", "peft_version", "revision")
"""Settings that say where an adapter is from, or how it was initialised: they are left out."""


def _quick(pattern: str) -> str:
    """Refuse a regular expression that might search forever: repeated groups, or many repetitions."""
    if re.search(r"\)[*+?{]", pattern) or len(re.findall(r"[*+?{]", pattern)) > 4:
        raise ValueError(f"the pattern {pattern[:80]!r} repeats too much: name the modules")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern[:80]!r} is not a pattern: {error}") from error
    return pattern


_Pattern = Annotated[str, AfterValidator(_quick)]
_Patterns = list[str] | _Pattern | None
_Rank = Annotated[int, Field(ge=1, le=8192)]


class _LoraSettings(BaseModel):
    """The settings that are passed on, as a `peft.LoraConfig` has them."""

    model_config = ConfigDict(strict=True, extra="allow")
    peft_type: str = "LORA"
    task_type: str | None = None
    r: _Rank = 8
    lora_alpha: int | FiniteFloat = 8
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


def read_lora_settings(note: str) -> dict[str, Any]:
    """Read the settings of an adapter from the JSON text in its file, as arguments of `peft.LoraConfig`.

    Raises:
        ValueError: not JSON, a setting of a wrong type or out of bounds, or one that this project does not read.
    """
    settings = _LoraSettings.model_validate_json(note)
    usual = LoraConfig().to_dict()
    extra = {name: value for name, value in (settings.model_extra or {}).items() if name not in _ABOUT}
    if others := [name for name, value in extra.items() if value != usual.get(name)]:
        raise ValueError(f"it sets {', '.join(others[:5])[:200]}, which this project does not read")
    return settings.model_dump(exclude_unset=True, include=set(_LoraSettings.model_fields))
