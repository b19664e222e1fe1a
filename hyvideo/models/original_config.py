"""config.json of the original layout <-> that of diffusers: sizes by name, and what this code has no network for."""

from collections.abc import Mapping
from typing import Any

RESOLUTIONS = {"480p": 640, "720p": 960}
"""Name of a resolution -> side in pixels of the square with as many pixels (the base of its aspect-ratio buckets)."""

NUM_REFINER_LAYERS = 2

_SIZES = {
    "heads_num": "num_attention_heads",
    "mm_double_blocks_depth": "num_layers",
    "out_channels": "out_channels",
    "mlp_width_ratio": "mlp_ratio",
    "text_states_dim": "text_embed_dim",
    "vision_states_dim": "image_embed_dim",
    "rope_theta": "rope_theta",
}
_FIXED = {
    "concat_condition": True,
    "glyph_byT5_v2": True,
    "guidance_embed": False,
    "is_reshape_temporal_channels": False,
    "mlp_act_type": "gelu_tanh",
    "mm_single_blocks_depth": 0,
    "qk_norm": True,
    "qk_norm_type": "rms",
    "qkv_bias": True,
    "text_pool_type": None,
    "text_projection": "single_refiner",
    "text_states_dim_2": None,
    "use_attention_mask": True,
    "use_cond_type_embedding": True,
    "vision_projection": "linear",
}
_VAE_NAMES = (
    *("in_channels", "out_channels", "latent_channels", "block_out_channels", "layers_per_block"),
    *("downsample_match_channel", "upsample_match_channel", "scaling_factor"),
)
_VAE_SIZES = {
    "ffactor_spatial": "spatial_compression_ratio",
    "ffactor_temporal": "temporal_compression_ratio",
    **dict(zip(_VAE_NAMES, _VAE_NAMES, strict=True)),
}


def diffusers_transformer_config(original: Mapping[str, Any], glyph_width: int, where: str) -> dict[str, Any]:
    """Return the arguments of the diffusers transformer for an original config.json, the content of the file `where`.

    `glyph_width`, of the glyph text's states, is the one size the file leaves out (1472 in all releases). A ValueError
    says that a setting is missing, or that the model has parts that this project has no network for.
    """
    others = {name: original[name] for name, value in _FIXED.items() if original.get(name, value) != value}
    if others:
        different = (f"{name} is {value!r}, expected {_FIXED[name]!r}" for name, value in others.items())
        raise ValueError(
            f"'{where}' describes a network this project has no code for: {'; '.join(different)}. "
            "Expected one of the published HunyuanVideo-1.5 text- or image-to-video versions."
        )
    try:
        sizes = {ours: original[theirs] for theirs, ours in _SIZES.items()}
        if not all(size > 0 for size in sizes.values()):
            raise ValueError(f"sizes like {sizes}")
        patch = original["patch_size"]
        return sizes | {
            "in_channels": 2 * original["in_channels"] + 1,
            "attention_head_dim": original["hidden_size"] // sizes["num_attention_heads"],
            "num_refiner_layers": NUM_REFINER_LAYERS,
            "patch_size_t": patch[0],
            "patch_size": patch[1],
            "text_embed_2_dim": glyph_width,
            "rope_axes_dim": tuple(original["rope_dim_list"]),
            "target_size": RESOLUTIONS[original["ideal_resolution"]],
            "task_type": {"t2v": "t2v", "i2v": "i2v"}[original["ideal_task"]],
            "use_meanflow": bool(original.get("use_meanflow", False)),
        }
    except (KeyError, TypeError, IndexError, ValueError, ArithmeticError) as error:
        raise ValueError(
            f"'{where}' lacks or does not understand {error}. Expected the config.json of a published HunyuanVideo-1.5 "
            "text- or image-to-video version; download it again."
        ) from error


def original_transformer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the original config.json for one of diffusers, the inverse of the above; a ValueError if there is none."""
    resolution = next((name for name, side in RESOLUTIONS.items() if side == config["target_size"]), None)
    if resolution is None or config["num_refiner_layers"] != NUM_REFINER_LAYERS:
        raise ValueError(
            f"The original layout has target sizes {sorted(RESOLUTIONS.values())} and {NUM_REFINER_LAYERS} refiner "
            f"layers; this transformer has target_size {config['target_size']} and {config['num_refiner_layers']} "
            "refiner layers. Export it in the diffusers layout."
        )
    return {theirs: config[ours] for theirs, ours in _SIZES.items()} | {
        "_class_name": "HunyuanVideo_1_5_DiffusionTransformer",
        **_FIXED,
        "attn_mode": "flash",
        "attn_param": None,
        "hidden_size": config["num_attention_heads"] * config["attention_head_dim"],
        "ideal_resolution": resolution,
        "ideal_task": config["task_type"],
        "in_channels": (config["in_channels"] - 1) // 2,
        "patch_size": [config["patch_size_t"], config["patch_size"], config["patch_size"]],
        "rope_dim_list": list(config["rope_axes_dim"]),
        "use_meanflow": config["use_meanflow"],
    }


def diffusers_vae_config(original: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the arguments of the diffusers VAE for an original `vae/config.json`, and `shift_factor` where it is set.

    `where` is the file, for the ValueError that names missing settings.
    """
    if missing := sorted(set(_VAE_SIZES) - set(original)):
        raise ValueError(f"'{where}' lacks {', '.join(missing)}. Download the VAE's config.json again.")
    shift = {"shift_factor": original["shift_factor"]} if original.get("shift_factor") else {}
    return {ours: original[theirs] for theirs, ours in _VAE_SIZES.items()} | shift
