"""What a VideoReward folder declares: `model_config.json`, the newest checkpoint and the scoring text."""

import ast
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, FiniteFloat
from pydantic.dataclasses import dataclass

from hyvideo.config.outside import check_files, read_file
from hyvideo.models.model_folder import check_component, local_folder, read_json, readable

METRICS = ("VQ", "MQ", "TA")
"""Visual quality, motion quality, text alignment: the order of the reward tokens in the scoring text."""

TEXT_SHA256 = "fdb6309bac618dd0c8b1b589d3a0970a974f7856eecbb355a190b2dce54af700"
"""Hash of the published scoring text `detailed_special`."""

_TEXT_NAME = "DETAILED_PROMPT_WITH_SPECIAL_TOKEN"
_LOG = logging.getLogger(__name__)


_Positive = Annotated[FiniteFloat, Field(gt=0)]


@dataclass(frozen=True, config=ConfigDict(strict=True))
class VideoAlignSettings:
    """A VideoReward folder, read and checked.

    Attributes:
        checkpoint: the newest `checkpoint-*` folder.
        base: folder or hub name of the Qwen2-VL whose configuration the network has.
        output_dim: outputs of the reward head, 1 or 3.
        lora: arguments of `peft.LoraConfig` for the adapters of the checkpoint, None where it has none.
        without_lora: a linear layer whose module path contains one of these has no adapter.
        fps: frames per second that are shown to the network.
        num_frames: a fixed number of frames instead of `fps`, or None.
        max_pixels: bound on height x width of a shown frame.
        statistics: metric -> (mean, std) of its raw score, by which it is normalised; 0 and 1 where the file has none.
        text: the scoring text with its placeholder `{text_prompt}`.
    """

    checkpoint: Path
    base: str
    output_dim: Literal[1, 3]
    lora: Mapping[str, Any] | None
    without_lora: tuple[str, ...]
    fps: _Positive
    num_frames: Annotated[int, Field(ge=2)] | None
    max_pixels: Annotated[int, Field(ge=1, lt=2**26)]
    statistics: Mapping[str, tuple[FiniteFloat, _Positive]]
    text: str


def read_settings(root: Path) -> VideoAlignSettings:
    """Read the VideoReward folder `root`; its base model is `root/base`, or what `model_config.json` names.

    A file that is missing, unreadable or of another kind than the released VideoReward's is a ValueError.
    """
    path = local_folder(root, "VideoAlign") / "model_config.json"
    check_files(root)
    check_component(root / "base")  # which may be a link
    with readable(root, "VideoReward"):
        content = read_json(path)
        data, model, lora = (content[key] for key in ("data_config", "model_config", "peft_lora_config"))
        _check_kind(data, model, lora)
        numbered = [path for path in root.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
        adapters = {"r": lora["lora_r"], "lora_alpha": lora["lora_alpha"], "use_rslora": lora["use_rslora"]}
        inference = content.get("inference_config")
        return VideoAlignSettings(
            checkpoint=max(numbered, key=lambda path: int(path.name.removeprefix("checkpoint-"))),
            base=str(root / "base") if (root / "base").is_dir() else model["model_name_or_path"],
            output_dim=model["output_dim"],
            lora=adapters if lora["lora_enable"] else None,
            without_lora=(*(lora["lora_namespan_exclude"] or ()), *(() if lora["vision_lora"] else ("visual",))),
            fps=data["fps"],
            num_frames=data["num_frames"],
            max_pixels=data["max_frame_pixels"],
            statistics={
                metric: (0.0, 1.0) if inference is None else (inference[f"{metric}_mean"], inference[f"{metric}_std"])
                for metric in METRICS
            },
            text=_read_scoring_text(root),
        )


def _read_scoring_text(root: Path) -> str:
    """Return the text that asks the network for its scores, which belongs to the weights and lies beside them.

    `detailed_special.txt` is read as it is; otherwise the constant of `prompt_template.py`, which is parsed, never run.
    """
    plain, module = root / "detailed_special.txt", root / "prompt_template.py"
    path = next((path for path in (plain, module) if path.is_file()), None)
    if path is None:
        raise ValueError(
            f"VideoAlign: no scoring text in {root}: expected detailed_special.txt, or prompt_template.py of the "
            "checkpoint's authors (checkpoints-download.md says where it is)."
        )
    text = read_file(path, 2**20).decode("utf-8") if path == plain else _text_constant(path)
    wanted = ["{text_prompt}", *(f"<|{metric}_reward|>" for metric in METRICS)]
    if wrong := [part for part in wanted if text.count(part) != 1]:
        raise ValueError(f"VideoAlign: the scoring text in {path} must contain {', '.join(wrong)} exactly once.")
    if hashlib.sha256(text.encode()).hexdigest() != TEXT_SHA256:
        _LOG.warning("VideoAlign: the scoring text in %s is not the published one; scores will differ from it.", path)
    return text


def _check_kind(data: Mapping[str, Any], model: Mapping[str, Any], lora: Mapping[str, Any]) -> None:
    """Refuse checkpoints of another kind than the released one, which would be scored wrongly."""
    expected = {
        "eval_dim": (data["eval_dim"], list(METRICS)),
        "prompt_template_type": (data["prompt_template_type"], "detailed_special"),
        "sample_type": (data.get("sample_type", "uniform"), "uniform"),
        "reward_token": (model["reward_token"], "special"),
        "use_special_tokens": (model["use_special_tokens"], True),
        "lora_target_modules": (lora["lora_target_modules"], None),
        "num_lora_modules": (lora.get("num_lora_modules", -1), -1),
    }
    for key, (received, value) in expected.items():
        if received != value:
            raise ValueError(f"model_config.json: expected {key} {value!r}, received {received!r}")


def _text_constant(module: Path) -> str:
    """Return the scoring text of a Python file without running it."""
    for node in ast.parse(read_file(module, 2**20)).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            if any(isinstance(target, ast.Name) and target.id == _TEXT_NAME for target in node.targets):
                return node.value.value
    raise ValueError(f"VideoAlign: {module} has no text constant {_TEXT_NAME}.")
