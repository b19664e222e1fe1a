"""A random VideoReward checkpoint of the real classes in both released forms, and the scores it must give.

The files are written under the names of transformers 4.45 and PEFT. The expected scores come from the library's own
Qwen2-VL with the adapters merged into its weights, so neither loading nor adapters are those under test.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from scripts.tiny.components import build_tokenizer
from tests.support.tiny_model import TEXT_WIDTH as WIDTH
from tests.support.tiny_model import text_config

RANK, ALPHA = 2, 6
STATISTICS = {"VQ": (0.5, 2.0), "MQ": (-1.0, 0.5), "TA": (0.25, 4.0)}
TEXT = "\nHow good is it? <|VQ_reward|>\nHow does it move? <|MQ_reward|>  \nIs it {text_prompt}? <|TA_reward|>\nEND\n"
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
REWARD_TOKENS = ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"]


@dataclass(frozen=True)
class VideoReward:
    """A written checkpoint: its folder, and the network that it is, adapters merged."""

    root: Path
    tokenizer: Qwen2Tokenizer
    network: Qwen2VLForConditionalGeneration
    head: Tensor

    @torch.no_grad()
    def expected(self, request: str, pixels: Tensor, grid: tuple[int, int, int]) -> list[float]:
        """Raw VQ, MQ and TA of one video: full forward, plain positions, outputs at the three reward tokens."""
        ids = self.tokenizer(request, return_tensors="pt").input_ids
        hidden = self.network.model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            position_ids=torch.arange(ids.shape[1]).expand(3, 1, -1),
            pixel_values_videos=pixels,
            video_grid_thw=torch.tensor([grid]),
        ).last_hidden_state[0]
        outputs = hidden @ self.head.T
        at = [ids[0].tolist().index(token) for token in self.tokenizer.convert_tokens_to_ids(REWARD_TOKENS)]
        return [float(outputs[row, min(i, outputs.shape[1] - 1)]) for i, row in enumerate(at)]


def write_videoreward(root: Path, *, split: bool = False) -> VideoReward:
    """Write a checkpoint to `root`: whole with one output, or split (adapters, the rest, the base) with three."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*VISION_TOKENS, *REWARD_TOKENS]})
    tokenizer.save_pretrained(root / "checkpoint-20" / "tokenizer")
    (root / "checkpoint-3").mkdir()
    (root / "detailed_special.txt").write_text(TEXT)
    output_dim = 3 if split else 1
    write_model_config(root, output_dim=output_dim)

    torch.manual_seed(0)
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": WIDTH, "num_heads": 2, "mlp_ratio": 2}
    parts = {"text_config": text_config(len(tokenizer)), "vision_config": vision, **vision_token_ids(tokenizer)}
    network = Qwen2VLForConditionalGeneration(Qwen2VLConfig(**parts)).eval()
    draw_weights(network)
    network.config.save_pretrained(root / "base")
    head = torch.randn(output_dim, WIDTH)
    base = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): value.detach().clone()
        for name, value in network.state_dict().items()
    }
    if split:
        save_file(base | {"model.embed_tokens.weight": torch.randn(9, WIDTH)}, root / "base" / "model.safetensors")
    adapters = {}
    for name, module in network.model.language_model.named_modules():
        if isinstance(module, nn.Linear):
            down, up = torch.randn(RANK, module.in_features) / 6, torch.randn(module.out_features, RANK) / 6
            adapters |= {f"model.{name}.lora_A": down, f"model.{name}.lora_B": up}
            module.weight.data += ALPHA / RANK * up @ down

    folder, weights = root / "checkpoint-20", {"rm_head.weight": head}
    adapted = {name.removesuffix(".lora_A") for name in adapters}
    for name, value in base.items():
        module, _, kind = name.rpartition(".")
        if not split:
            weights[f"{module}.base_layer.{kind}" if module in adapted else name] = value
        elif "visual" in name or "embed_tokens" in name:
            weights[name] = value
    named = {f"{name}{'' if split else '.default'}.weight": value for name, value in adapters.items()}
    if split:
        whole = {f"base_model.model.{name}": one for name, one in named.items()}
        save_file(whole, folder / "adapter_model.safetensors")
    else:
        weights |= named
    file = "non_lora_state_dict.pth" if split else "model.pth"
    torch.save({f"base_model.model.{name}": value for name, value in weights.items()}, folder / file)
    return VideoReward(root, tokenizer, network, head)


def write_model_config(root: Path, **changes: Any) -> None:
    """Write `model_config.json`; `changes` replace keys of whichever section has them."""
    content = {
        "data_config": {"max_frame_pixels": 200704, "num_frames": None, "fps": 2.0, "eval_dim": list(STATISTICS)}
        | {"prompt_template_type": "detailed_special", "sample_type": "uniform"},
        "model_config": {"model_name_or_path": "nowhere/base", "output_dim": 1}
        | {"use_special_tokens": True, "reward_token": "special"},
        "peft_lora_config": {"lora_enable": True, "vision_lora": False, "lora_r": RANK, "lora_alpha": ALPHA}
        | {"lora_target_modules": None, "use_rslora": False, "num_lora_modules": -1}
        | {"lora_namespan_exclude": ["lm_head", "rm_head", "embed_tokens"]},
        "inference_config": {f"{metric}_mean": mean for metric, (mean, _) in STATISTICS.items()}
        | {f"{metric}_std": std for metric, (_, std) in STATISTICS.items()},
    }
    for key, value in changes.items():
        section = next((section for section in content.values() if key in section), content)
        section[key] = value
    (root / "model_config.json").write_text(json.dumps(content))


def draw_weights(network: nn.Module) -> None:
    """Draw the weights of any Qwen vision-language model so that every part moves its outputs."""
    for parameter in network.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=1.5 * parameter[0].numel() ** -0.5)
    nn.init.normal_(network.model.language_model.embed_tokens.weight)


def vision_token_ids(tokenizer: Qwen2Tokenizer) -> dict[str, int]:
    """Return where the VISION_TOKENS are, as a config of any Qwen vision-language model says it."""
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return dict(zip(names, tokenizer.convert_tokens_to_ids(VISION_TOKENS), strict=True))
