"""The network: Qwen2-VL with live adapters and a reward head at three special tokens, loaded strictly."""

from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import init_empty_weights
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Qwen2VLConfig, Qwen2VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLVisionRotaryEmbedding

from hyvideo.config.outside import check_file
from hyvideo.models.model_folder import check_component, readable
from hyvideo.models.reward_models.videoalign.settings import VideoAlignSettings
from hyvideo.models.weight_files import check_precision, read_pickled


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

        Args:
            token_ids: `[B, L]`, padded on the right. Attention is causal and every reward token stands before the
                padding, so no mask is needed.
            pixels: patches of all videos, one after the other.
            grids: `[B, 3]` patch grid of each video.
            reward_positions: `[B, 3]` where the reward tokens stand.
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
        return Qwen2VLConfig.from_pretrained(base)  # weights of another kind will not fit
    except (OSError, ValueError) as error:
        raise ValueError(
            f"VideoAlign: cannot read the configuration of its base model '{base}'. Without a network, put the base "
            "model's config.json into the folder `base` of the VideoReward folder."
        ) from error


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
