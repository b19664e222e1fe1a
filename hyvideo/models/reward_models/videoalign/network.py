"""What a VideoReward folder holds: its settings and scoring text, and the network, loaded strictly.

The network is Qwen2-VL with live adapters and a reward head at three special tokens.
"""

import ast
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from accelerate import init_empty_weights
from peft import LoraConfig, inject_adapter_in_model
from pydantic import ConfigDict, Field, FiniteFloat
from pydantic.dataclasses import dataclass
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, Qwen2VLConfig, Qwen2VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLVisionRotaryEmbedding

from hyvideo.config.outside import check_file, check_files, read_file
from hyvideo.models.model_folder import check_component, local_folder, read_json, readable
from hyvideo.models.weight_files import check_precision, read_pickled

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
        expected = {
            "eval_dim": (data["eval_dim"], list(METRICS)),
            "prompt_template_type": (data["prompt_template_type"], "detailed_special"),
            "sample_type": (data.get("sample_type", "uniform"), "uniform"),
            "reward_token": (model["reward_token"], "special"),
            "use_special_tokens": (model["use_special_tokens"], True),
            "lora_target_modules": (lora["lora_target_modules"], None),
            "num_lora_modules": (lora.get("num_lora_modules", -1), -1),
        }
        for key, (received, value) in expected.items():  # another kind would be scored wrongly
            if received != value:
                raise ValueError(f"model_config.json: expected {key} {value!r}, received {received!r}")
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
    text = read_file(path, 2**20).decode("utf-8")
    if path == module:
        assigned = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)]
        values = {target.id: node.value for node in assigned for target in node.targets if isinstance(target, ast.Name)}
        text = str(ast.literal_eval(values[_TEXT_NAME]))
    wanted = ["{text_prompt}", *(f"<|{metric}_reward|>" for metric in METRICS)]
    if wrong := [part for part in wanted if text.count(part) != 1]:
        raise ValueError(f"VideoAlign: the scoring text in {path} must contain {', '.join(wrong)} exactly once.")
    if hashlib.sha256(text.encode()).hexdigest() != TEXT_SHA256:
        _LOG.warning("VideoAlign: the scoring text in %s is not the published one; scores will differ from it.", path)
    return text


class _VisionAngles(Qwen2VLVisionRotaryEmbedding):
    """Rotary angles in the network's own precision, as the original has them; the library's are always float32."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[N, head size]` of the positions `[2, N]` (row, column)."""
        angles = position_ids[..., None].to(self.inv_freq.dtype) * self.inv_freq
        return self.recomposition_frequencies(angles.cos()), self.recomposition_frequencies(angles.sin())


class RewardNetwork(nn.Module):
    """Qwen2-VL whose last hidden state at three tokens becomes three scores.

    With `output_dim` 1 there is one output per token; with 3 one per metric, of which each token gives its own.
    """

    def __init__(self, config: Qwen2VLConfig, output_dim: int) -> None:
        super().__init__()
        self.model = Qwen2VLModel(config)
        self.model.visual.rotary_pos_emb = _VisionAngles(config.vision_config)
        self.rm_head = nn.Linear(config.text_config.hidden_size, output_dim, bias=False)

    def forward(self, token_ids: Tensor, pixels: Tensor, grids: Tensor, reward_positions: Tensor) -> Tensor:
        """Score B videos: raw scores `[B, 3]` float32.

        `token_ids` `[B, L]` are padded on the right. Attention is causal and every reward token stands before the
        padding, at `reward_positions` `[B, 3]`, so no mask is needed. `pixels` are the patches of all videos, one after
        the other, of which each has a grid, `[B, 3]`.
        """
        batch, length = token_ids.shape
        # The original rotates by plain positions on all three axes; the library would compute 3-D ones.
        positions = torch.arange(length, device=token_ids.device).expand(3, batch, length)
        hidden = self.model(
            input_ids=token_ids,
            position_ids=positions,
            pixel_values_videos=pixels,
            video_grid_thw=grids,
            use_cache=False,
        ).last_hidden_state
        rows = torch.arange(batch, device=token_ids.device)[:, None]
        outputs = self.rm_head(hidden[rows, reward_positions])
        scores = outputs.squeeze(-1) if outputs.shape[-1] == 1 else outputs.diagonal(dim1=1, dim2=2)
        return scores.float()


def load_network(settings: VideoAlignSettings) -> RewardNetwork:
    """Build the network and load its weights, exactly all or an error, on the CPU in the precision of the files."""
    weights = _read_weights(settings)
    config = _base_config(settings.base)
    config.text_config.vocab_size = len(weights["model.language_model.embed_tokens.weight"])
    with init_empty_weights(include_buffers=False):
        network = RewardNetwork(config, settings.output_dim)
    if settings.lora is not None:  # adapters stay live: merged into bf16 weights they would change the scores
        targets = [
            name
            for name, module in network.named_modules()
            if isinstance(module, nn.Linear) and not any(part in name for part in settings.without_lora)
        ]
        inject_adapter_in_model(LoraConfig(**settings.lora, target_modules=targets), network, low_cpu_mem_usage=True)
        moved = {f"{name}.{kind}": f"{name}.base_layer.{kind}" for name in targets for kind in ("weight", "bias")}
        weights = {moved.get(name, name): value for name, value in weights.items()}
    weights.pop("lm_head.weight", None)  # predicts words, which nobody asks for
    network.load_state_dict(weights, strict=True, assign=True)
    return network.eval().requires_grad_(False)


def _base_config(base: str) -> Qwen2VLConfig:
    """Read the base model's configuration from a folder or the hub."""
    check_component(Path(base))
    try:
        config = AutoConfig.from_pretrained(base, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"VideoAlign: cannot read the configuration of its base model '{base}'. Without a network, put the base "
            "model's config.json into the folder `base` of the VideoReward folder."
        ) from error
    return config


def _read_weights(settings: VideoAlignSettings) -> dict[str, Tensor]:
    """Read either form: one whole file, or adapters and the rest on top of the base model's weights."""
    folder = settings.checkpoint
    if (folder / "model.pth").is_file():
        return _current_names(_load(folder / "model.pth"))
    adapters, rest = folder / "adapter_model.safetensors", folder / "non_lora_state_dict.pth"
    shards = sorted(Path(settings.base).glob("*.safetensors"))
    if not (shards and adapters.is_file() and rest.is_file()):
        raise ValueError(
            f"VideoAlign: {folder} has no weights: expected model.pth; or adapter_model.safetensors with "
            f"non_lora_state_dict.pth, and the base model's .safetensors files in '{settings.base}' (put it into "
            "the folder `base` of VideoReward)."
        )
    return {name: value for path in (*shards, rest, adapters) for name, value in _current_names(_load(path)).items()}


def _load(path: Path) -> dict[str, Tensor]:
    """Read tensors; a pickle is read as data only."""
    with readable(path, "weights"):
        check_file(path)
        weights = load_file(path) if path.suffix == ".safetensors" else read_pickled(path)
        for name, value in weights.items():
            check_precision(name, value.dtype, path)
        return weights


def _current_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename from the layout of transformers 4.45 and PEFT to the current one."""
    renamed = {}
    for name, value in weights.items():
        name = name.removeprefix("base_model.model.")
        for kind in ("lora_A", "lora_B"):
            name = name.replace(f".{kind}.weight", f".{kind}.default.weight")
        if name.startswith("visual."):
            name = f"model.{name}"
        elif name.startswith("model.") and not name.startswith(("model.visual.", "model.language_model.")):
            name = f"model.language_model.{name.removeprefix('model.')}"
        renamed[name] = value
    return renamed
