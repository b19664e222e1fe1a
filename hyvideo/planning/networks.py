"""The sizes of a model's networks, from its folder without reading weights, or those of the published model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
from transformers import AutoConfig, Qwen2_5_VLTextConfig, SiglipVisionConfig, T5Config
from transformers.modeling_utils import local_torch_dtype

from hyvideo.config.schema import ModelConfig, RewardConfig
from hyvideo.models.adapter import without_diffusers_logs
from hyvideo.models.loading import TILE_OVERLAP, allow_batches, open_transformer, open_vae
from hyvideo.models.model_folder import check_layout, is_diffusers_layout, versions_in
from hyvideo.models.reward_models.rewards import loaded_rewards

REWARD_BYTES = {
    "videoalign_local": 5_030_000_000,
    "clip_score": 4 * 427_616_513,
    "clip_iqa": 4 * 427_616_513,
    "pick_score": 4 * 986_109_441,
    "moving_shapes": 0,
}
"""Weights of a published reward on the GPU; rewards on a server need none."""


@dataclass(frozen=True)
class Networks:
    """Sizes of all networks of a run.

    Attributes:
        source: where they are from, for people to read.
        transformer: config of the diffusers transformer.
        vae: config of the diffusers VAE.
        reward_bytes: weights of the reward networks on each GPU, those of a reward guard's judge included.
        unknown_rewards: rewards whose size is not known, and counted as 0.
    """

    source: str
    transformer: Mapping[str, Any]
    vae: Mapping[str, Any]
    reward_bytes: int
    unknown_rewards: tuple[str, ...] = ()


def read_networks(model: ModelConfig, reward: RewardConfig) -> Networks:
    """Return the sizes of the networks a configuration names; without a model folder, those of the published model."""
    root, version = Path(model.pretrained_model_root), model.pretrained_transformer_version
    rewards = [choice.name for choice in loaded_rewards(reward)]
    rewards_of = {
        "reward_bytes": sum(REWARD_BYTES.get(name, 0) for name in rewards),
        "unknown_rewards": tuple(dict.fromkeys(name for name in rewards if name not in REWARD_BYTES)),
    }
    if not (is_diffusers_layout(root) or versions_in(root)):
        task = "i2v" if "i2v" in version else "t2v"
        with init_empty_weights(), without_diffusers_logs():  # HunyuanVideo-1.5 has the classes' defaults
            config = dict(HunyuanVideo15Transformer3DModel(num_layers=1, task_type=task).config) | {"num_layers": 54}
            vae = AutoencoderKLHunyuanVideo15()
        return Networks(f"published sizes of {version}", config, dict(vae.config), **rewards_of)
    transformer, _, _ = open_transformer(root, version)
    vae, _, _ = open_vae(root)
    return Networks(str(root), dict(transformer.config), dict(vae.config), **rewards_of)


def make_vae(config: Mapping[str, Any]) -> AutoencoderKLHunyuanVideo15:
    """Make a VAE as a GPU decodes with it, in half precision and tiles, on the device that is set (meta or fake)."""
    with without_diffusers_logs(), local_torch_dtype(torch.float16):  # fake networks cannot be converted afterwards
        vae = AutoencoderKLHunyuanVideo15.from_config(dict(config))
    vae.tile_overlap_factor = TILE_OVERLAP
    vae.enable_tiling()
    return allow_batches(vae).eval().requires_grad_(False)


@dataclass(frozen=True)
class EncoderConfigs:
    """Configurations of the language model, of ByT5, and of SigLIP; None for text-to-video."""

    text: Qwen2_5_VLTextConfig
    glyph: T5Config
    vision: SiglipVisionConfig | None


def encoder_configs(root: Path, task: str) -> EncoderConfigs:
    """Return the configurations in a folder of the diffusers layout, or those of the published encoders."""
    if is_diffusers_layout(root):
        check_layout(root, None)
        text = AutoConfig.from_pretrained(root / "text_encoder", local_files_only=True, trust_remote_code=False)
        glyph = T5Config.from_pretrained(root / "text_encoder_2", local_files_only=True)
        seen = root / "image_encoder"
        vision = SiglipVisionConfig.from_pretrained(seen, local_files_only=True) if task == "i2v" else None
        return EncoderConfigs(text.get_text_config(), glyph, vision)
    text = Qwen2_5_VLTextConfig(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    )
    glyph = T5Config(
        vocab_size=1510, d_model=1472, d_kv=64, d_ff=3584, num_layers=12, num_heads=6, feed_forward_proj="gated-gelu"
    )
    vision = SiglipVisionConfig(
        hidden_size=1152,
        intermediate_size=4304,
        num_hidden_layers=27,
        num_attention_heads=16,
        image_size=384,
        patch_size=14,
    )
    return EncoderConfigs(text, glyph, vision if task == "i2v" else None)
