"""The tiny random model written in the layout of HunyuanVideo-1.5's authors, by a key map of the tests' own."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import ByT5Tokenizer, Qwen2_5_VLConfig

from hyvideo.models import upsampler
from scripts.tiny.components import build_tokenizer
from tests.support import tiny_model

COLOURS = {"white": 0, "black": 1, "red": 2}
FONTS = {"en-Sans": 0, "cn-Serif": 1}
GLYPH_VOCABULARY = 384 + len(COLOURS) + len(FONTS)
VERSIONS = {
    "480p_t2v": {"task_type": "t2v"},
    "480p_i2v": {"task_type": "i2v"},
    "480p_i2v_step_distilled": {"task_type": "i2v", "use_meanflow": True},
}
"""Versions in the tiny checkpoint, with what their transformers differ in."""

_EMBEDDERS = {"context_embedder.time_text_embed.timestep_embedder": "txt_in.t_embedder"}
_EMBEDDERS |= {"time_embed.timestep_embedder_r": "time_r_in", "time_embed.timestep_embedder": "time_in"}
_TRANSFORMER_NAMES = (
    ("context_embedder.token_refiner.refiner_blocks.", "txt_in.individual_token_refiner.blocks."),
    *((f"{ours}.linear_{n}", f"{theirs}.mlp.{2 * n - 2}") for ours, theirs in _EMBEDDERS.items() for n in (1, 2)),
    ("context_embedder.time_text_embed.text_embedder", "txt_in.c_embedder"),
    *(("context_embedder.proj_in", "txt_in.input_embedder"), ("context_embedder_2.norm", "byt5_in.layernorm")),
    *(("context_embedder_2.linear_", "byt5_in.fc"), ("x_embedder", "img_in")),
    *(("cond_type_embed.", "cond_type_embedding."), ("image_embedder.norm_in", "vision_in.proj.0")),
    *(("image_embedder.linear_1", "vision_in.proj.1"), ("image_embedder.linear_2", "vision_in.proj.3")),
    *(("image_embedder.norm_out", "vision_in.proj.4"), ("transformer_blocks.", "double_blocks.")),
    *(("norm1.linear", "img_mod.linear"), ("norm1_context.linear", "txt_mod.linear")),
    *((f"attn.norm_added_{part}", f"txt_attn_{part}_norm") for part in "qk"),
    *((f"attn.norm_{part}", f"img_attn_{part}_norm") for part in "qk"),
    *((f"attn.add_{part}_proj", f"txt_attn_{part}") for part in "qkv"),
    ("attn.to_add_out", "txt_attn_proj"),
    *((f"ff_context.net.{ours}", f"txt_mlp.fc{n}") for ours, n in (("0.proj", 1), ("2", 2))),
)
_BLOCK_NAMES = (
    *((f"attn.to_{part}", f"img_attn_{part}") for part in "qkv"),
    *(("attn.to_out.0", "img_attn_proj"), ("ff.net.0.proj", "img_mlp.fc1"), ("ff.net.2", "img_mlp.fc2")),
)
_REFINER_NAMES = (("attn.to_out.0", "self_attn_proj"), ("norm_out.linear", "adaLN_modulation.1"))
_REFINER_NAMES += (("ff.net.0.proj", "mlp.fc1"), ("ff.net.2", "mlp.fc2"))
_VAE_NAMES = (
    *((f"mid_block.resnets.{n}", f"mid.block_{n + 1}") for n in (0, 1)),
    *(("mid_block.attentions.0", "mid.attn_1"), ("attn_1.to_", "attn_1.")),
    *((f"{way}_blocks", way) for way in ("down", "up")),
    *(("resnets", "block"), ("conv_shortcut", "nin_shortcut")),
    *((f"{way}samplers.0", f"{way}sample") for way in ("down", "up")),
)


def original_transformer_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a diffusers transformer's state dict, fuse the refiner's attention, exchange the last halves."""
    tensors = {}
    for name, tensor in state.items():
        if name.startswith("norm_out"):
            scale, shift = tensor.chunk(2)
            tensors[name.replace("norm_out.linear", "final_layer.adaLN_modulation.1")] = torch.cat([shift, scale])
        elif name.startswith("proj_out"):
            tensors[name.replace("proj_out", "final_layer.linear")] = tensor
        elif "refiner_blocks" in name and "attn.to_q" in name:
            fused = torch.cat([state[name.replace("to_q", f"to_{part}")] for part in "qkv"])
            tensors[_renamed(name, _TRANSFORMER_NAMES).replace("attn.to_q", "self_attn_qkv")] = fused
        elif "refiner_blocks" in name and ("attn.to_k" in name or "attn.to_v" in name):
            continue
        else:
            local = _REFINER_NAMES if "refiner_blocks" in name else _BLOCK_NAMES
            tensors[_renamed(name, (*_TRANSFORMER_NAMES, *local))] = tensor
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def original_transformer(version: str) -> torch.nn.Module:
    """Return the diffusers transformer whose weights version `version` of the tiny checkpoint holds."""
    seed = list(VERSIONS).index(version)
    return tiny_model.build_transformer(seed, num_refiner_layers=2, target_size=640, **VERSIONS[version])


def save_original_model(root: Path) -> Path:
    """Write the whole tiny model to `root` in the original layout; the versions are sharded but the first."""
    for version in VERSIONS:
        transformer = original_transformer(version)
        folder = _folder(root / "transformer" / version, transformer_config_json(transformer.config))
        tensors = original_transformer_tensors(transformer.state_dict())
        save_shards(folder, tensors, 1 if version == "480p_t2v" else 3)
    vae = tiny_model.build_vae()
    names = ("in_channels", "out_channels", "latent_channels", "block_out_channels", "layers_per_block")
    names += ("downsample_match_channel", "upsample_match_channel", "scaling_factor")
    ratios = {f"ffactor_{kind}": vae.config[f"{kind}_compression_ratio"] for kind in ("spatial", "temporal")}
    config = {name: vae.config[name] for name in names} | ratios | {"shift_factor": None}
    tensors = {_renamed(name, _VAE_NAMES): tensor.contiguous() for name, tensor in vae.state_dict().items()}
    save_shards(_folder(root / "vae", config), tensors, 1)
    _folder(root / "scheduler", {"shift": 5.0}, "scheduler_config.json")
    _save_text_encoders(root / "text_encoder")
    tiny_model.build_vision_encoder().save_pretrained(root / "vision_encoder" / "siglip" / "image_encoder")
    tiny_model.build_image_processor().save_pretrained(root / "vision_encoder" / "siglip" / "feature_extractor")
    return root


def save_super_resolution(root: Path) -> Path:
    """Add the second transformer and the upsampler of 480p to the model at `root`."""
    channels = tiny_model.LATENT_CHANNELS
    version, changes = "720p_sr_distilled", {"in_channels": 3 * channels + 2, "use_meanflow": True}
    transformer = tiny_model.build_transformer(7, num_refiner_layers=2, target_size=960, **changes)
    config = transformer_config_json(transformer.config)
    config |= {"concat_condition": False, "in_channels": 3 * channels + 2}
    config |= {"ideal_resolution": "720p", "ideal_task": None}
    folder = _folder(root / "transformer" / version, config)
    save_shards(folder, original_transformer_tensors(transformer.state_dict()), 1)
    save_upsampler(root / "upsampler" / version, "SRTo720pUpsampler", hidden_channels=6, num_blocks=2)
    return root


def save_upsampler(folder: Path, name: str, **settings: Any) -> dict[str, Tensor]:
    """Write a random latent upsampler; returns its tensors. Its test's formulas pin the authors' names."""
    channels, generator = tiny_model.LATENT_CHANNELS, torch.Generator().manual_seed(1)
    own = "in_channels" if name == "SRTo720pUpsampler" else "z_channels"
    sizes = {own: channels, "out_channels": channels, **settings}
    tensors = {}
    for ours, weight in upsampler.CLASSES[name](**sizes).state_dict().items():
        random = torch.randn(weight.shape, generator=generator)
        near = {"weight": random * weight[0].numel() ** -0.5, "bias": random * 0.1, "gamma": 1 + 0.1 * random}
        tensors[ours.replace(".conv_shortcut.", ".nin_shortcut.")] = near[ours.rpartition(".")[2]]
    save_shards(_folder(folder, {"_class_name": name, **sizes}), tensors, 1)
    return tensors


def save_shards(folder: Path, tensors: Mapping[str, Tensor], num_shards: int) -> None:
    """Write safetensors files as the hub has them: one, or several with their index."""
    if num_shards == 1:
        save_file(dict(tensors), folder / "diffusion_pytorch_model.safetensors")
        return
    weight_map = {}
    for shard in range(num_shards):
        file = f"diffusion_pytorch_model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        names = sorted(tensors)[shard::num_shards]
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))


def _save_text_encoders(folder: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder / "llm")
    language = tiny_model.build_text_encoder(len(tokenizer))
    config = Qwen2_5_VLConfig(text_config=language.config.to_dict(), vision_config={"depth": 1, "hidden_size": 16})
    config.save_pretrained(folder / "llm")
    weights = {f"model.{name}": tensor for name, tensor in language.state_dict().items()}
    left_on_disk = {"lm_head.weight": torch.zeros(2, 2), "visual.merger.ln_q.weight": torch.zeros(2)}
    save_file(weights | left_on_disk, folder / "llm" / "model.safetensors", metadata={"format": "pt"})

    glyph = tiny_model.build_glyph_encoder(vocab_size=GLYPH_VOCABULARY)
    glyph.config.vocab_size = 384
    glyph.config.save_pretrained(folder / "byt5-small")
    ByT5Tokenizer().save_pretrained(folder / "byt5-small")
    assets = folder / "Glyph-SDXL-v2" / "assets"
    _folder(assets, COLOURS, "color_idx.json")
    _folder(assets, FONTS, "multilingual_10-lang_idx.json")
    tower = {f"module.text_tower.{n}": t for n, t in glyph.state_dict().items() if n.startswith("encoder.")}
    (folder / "Glyph-SDXL-v2" / "checkpoints").mkdir()
    content = {"state_dict": tower | {"module.logit_scale": torch.zeros(1)}}
    torch.save(content, folder / "Glyph-SDXL-v2" / "checkpoints" / "byt5_model.pt")


def transformer_config_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """Content of the authors' config.json for a tiny transformer."""
    copied = {"in_channels": "out_channels", "out_channels": "out_channels", "mlp_width_ratio": "mlp_ratio"}
    copied |= {"use_meanflow": "use_meanflow"}
    copied |= {"heads_num": "num_attention_heads", "ideal_task": "task_type", "mm_double_blocks_depth": "num_layers"}
    copied |= {"text_states_dim": "text_embed_dim", "vision_states_dim": "image_embed_dim"}
    fixed = {"_class_name": "HunyuanVideo_1_5_DiffusionTransformer", "ideal_resolution": "480p", "qk_norm_type": "rms"}
    fixed |= {"concat_condition": True, "glyph_byT5_v2": True, "guidance_embed": False, "mm_single_blocks_depth": 0}
    fixed |= {"patch_size": [1, 1, 1], "text_projection": "single_refiner", "vision_projection": "linear"}
    fixed |= {"rope_dim_list": list(config["rope_axes_dim"]), "rope_theta": 256}
    fixed |= {"hidden_size": config["num_attention_heads"] * config["attention_head_dim"]}
    return fixed | {theirs: config[ours] for theirs, ours in copied.items()}


def _folder(folder: Path, content: Any, file: str = "config.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(json.dumps(content))
    return folder


def _renamed(name: str, table: tuple[tuple[str, str], ...]) -> str:
    for ours, theirs in table:
        name = name.replace(ours, theirs)
    return name
