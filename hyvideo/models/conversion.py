"""Original (Tencent) names, layouts and config.json of HunyuanVideo-1.5 <-> those of diffusers; exact both ways.

A diffusers tensor is an original one under another name, except for two kinds: the text refiner's query, key and value
are thirds of one fused tensor, and the last modulation stores (shift, scale) where diffusers stores (scale, shift).
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyvideo.config.outside import as_value_error

REFINER = ("context_embedder.token_refiner.refiner_blocks.#", "txt_in.individual_token_refiner.blocks.#")
BLOCK = ("transformer_blocks.#", "double_blocks.#")

TRANSFORMER_MODULES = (
    ("x_embedder", "img_in"),
    ("time_embed.timestep_embedder.linear_1", "time_in.mlp.0"),
    ("time_embed.timestep_embedder.linear_2", "time_in.mlp.2"),
    ("time_embed.timestep_embedder_r.linear_1", "time_r_in.mlp.0"),
    ("time_embed.timestep_embedder_r.linear_2", "time_r_in.mlp.2"),
    ("context_embedder.proj_in", "txt_in.input_embedder"),
    ("context_embedder.time_text_embed.timestep_embedder.linear_1", "txt_in.t_embedder.mlp.0"),
    ("context_embedder.time_text_embed.timestep_embedder.linear_2", "txt_in.t_embedder.mlp.2"),
    ("context_embedder.time_text_embed.text_embedder", "txt_in.c_embedder"),
    (f"{REFINER[0]}.norm#", f"{REFINER[1]}.norm#"),
    (f"{REFINER[0]}.attn.to_out.0", f"{REFINER[1]}.self_attn_proj"),
    (f"{REFINER[0]}.ff.net.0.proj", f"{REFINER[1]}.mlp.fc1"),
    (f"{REFINER[0]}.ff.net.2", f"{REFINER[1]}.mlp.fc2"),
    (f"{REFINER[0]}.norm_out.linear", f"{REFINER[1]}.adaLN_modulation.1"),
    ("context_embedder_2.norm", "byt5_in.layernorm"),
    ("context_embedder_2.linear_#", "byt5_in.fc#"),
    ("cond_type_embed", "cond_type_embedding"),
    ("image_embedder.norm_in", "vision_in.proj.0"),
    ("image_embedder.linear_1", "vision_in.proj.1"),
    ("image_embedder.linear_2", "vision_in.proj.3"),
    ("image_embedder.norm_out", "vision_in.proj.4"),
    (f"{BLOCK[0]}.norm1.linear", f"{BLOCK[1]}.img_mod.linear"),
    (f"{BLOCK[0]}.norm1_context.linear", f"{BLOCK[1]}.txt_mod.linear"),
    *((f"{BLOCK[0]}.attn.to_{part}", f"{BLOCK[1]}.img_attn_{part}") for part in "qkv"),
    *((f"{BLOCK[0]}.attn.norm_{part}", f"{BLOCK[1]}.img_attn_{part}_norm") for part in "qk"),
    (f"{BLOCK[0]}.attn.to_out.0", f"{BLOCK[1]}.img_attn_proj"),
    *((f"{BLOCK[0]}.attn.add_{part}_proj", f"{BLOCK[1]}.txt_attn_{part}") for part in "qkv"),
    *((f"{BLOCK[0]}.attn.norm_added_{part}", f"{BLOCK[1]}.txt_attn_{part}_norm") for part in "qk"),
    (f"{BLOCK[0]}.attn.to_add_out", f"{BLOCK[1]}.txt_attn_proj"),
    (f"{BLOCK[0]}.ff.net.0.proj", f"{BLOCK[1]}.img_mlp.fc1"),
    (f"{BLOCK[0]}.ff.net.2", f"{BLOCK[1]}.img_mlp.fc2"),
    (f"{BLOCK[0]}.ff_context.net.0.proj", f"{BLOCK[1]}.txt_mlp.fc1"),
    (f"{BLOCK[0]}.ff_context.net.2", f"{BLOCK[1]}.txt_mlp.fc2"),
    ("norm_out.linear", "final_layer.adaLN_modulation.1"),
    ("proj_out", "final_layer.linear"),
    *((f"{REFINER[0]}.attn.to_{part}", f"{REFINER[1]}.self_attn_qkv") for part in "qkv"),
)


def _vae_modules(side: str, direction: str, sampler: str) -> tuple[tuple[str, str], ...]:
    """Module names of the VAE's encoder (`down`) or decoder (`up`); longer names first."""
    block, stage = (f"{side}.{direction}_blocks.#", f"{side}.{direction}.#")
    middle = (f"{side}.mid_block.attentions.0", f"{side}.mid.attn_1")
    return (
        (f"{side}.mid_block.resnets.0", f"{side}.mid.block_1"),
        (f"{side}.mid_block.resnets.1", f"{side}.mid.block_2"),
        *((f"{middle[0]}.to_{part}", f"{middle[1]}.{part}") for part in "qkv"),
        middle,
        (f"{block}.resnets.#.conv_shortcut", f"{stage}.block.#.nin_shortcut"),
        (f"{block}.resnets.#", f"{stage}.block.#"),
        (f"{block}.{sampler}rs.0", f"{stage}.{sampler}"),
        *((f"{side}.{name}", f"{side}.{name}") for name in ("conv_in", "conv_out", "norm_out")),
    )


@dataclass(frozen=True)
class Part:
    """Where a tensor lies in a weights file.

    Attributes:
        name: the file's own name of the tensor.
        index: which of `count` equal pieces along dim 0 it is.
        count: 1 for a whole tensor.
        swapped: whether the halves along dim 0 are exchanged.
    """

    name: str
    index: int = 0
    count: int = 1
    swapped: bool = False

    def shape(self, wanted: Sequence[int]) -> tuple[int, ...]:
        """Return the shape the file's tensor must have for this part of it to have shape `wanted`."""
        return tuple(wanted) if self.count == 1 else (wanted[0] * self.count, *wanted[1:])

    def rows(self, start: int, stop: int, size: int) -> list[tuple[int, int]]:
        """Return the file's row ranges that make up rows `[start, stop)` of this tensor, which has `size` rows."""
        if self.swapped:
            half = size // 2
            halves = ((start + half, min(stop, half) + half), (max(start, half) - half, stop - half))
            return [(first, last) for first, last in halves if first < last]
        return [(self.index * size + start, self.index * size + stop)]


Naming = Callable[[str], Part | None]
"""Finds the part of the file for the name of a module's tensor; a KeyError means that the layout has none."""


def _patterns(table: Sequence[tuple[str, str]]) -> list[tuple[re.Pattern[str], str]]:
    """Compile a table in which `#` is a number; what follows the module's name is kept."""
    return [(re.compile(re.escape(ours).replace(r"\#", r"(\d+)") + r"(\.[^#]+)"), theirs) for ours, theirs in table]


_TRANSFORMER_PATTERNS = _patterns(TRANSFORMER_MODULES)
_VAE_PATTERNS = _patterns(_vae_modules("encoder", "down", "downsample") + _vae_modules("decoder", "up", "upsample"))


def _renamed(name: str, patterns: Sequence[tuple[re.Pattern[str], str]]) -> str:
    """Rename by the first pattern that matches; a KeyError if none does."""
    for pattern, target in patterns:
        if match := pattern.fullmatch(name):
            *numbers, rest = match.groups()
            for number in numbers:
                target = target.replace("#", number, 1)
            return target + rest
    raise KeyError(name)


def transformer_part(name: str) -> Part:
    """Return where the original layout keeps the transformer's tensor `name` (a diffusers name), or raise a KeyError.

    Example: `transformer_part("context_embedder.token_refiner.refiner_blocks.0.attn.to_k.bias")` is piece 1 of 3 of
    `txt_in.individual_token_refiner.blocks.0.self_attn_qkv.bias`.
    """
    original = _renamed(name, _TRANSFORMER_PATTERNS)
    if ".self_attn_qkv." in original:
        return Part(original, "qkv".index(name.rpartition(".attn.to_")[2][0]), 3)
    return Part(original, swapped=name.startswith("norm_out.linear."))


def vae_part(name: str) -> Part:
    """Return where the original layout keeps the VAE's tensor `name` (a diffusers name), or raise a KeyError."""
    return Part(_renamed(name, _VAE_PATTERNS))


def original_tensors(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (original name, tensor) of a transformer's whole state dict; what only changes its name is not copied.

    Pieces of a fused tensor that are missing are a ValueError.
    """
    pieces: dict[str, dict[int, Tensor]] = {}
    for name, tensor in state.items():
        part = transformer_part(name)
        if part.swapped:
            tensor = tensor.roll(tensor.shape[0] // 2, 0)
        if part.count == 1:
            yield part.name, tensor
            continue
        found = pieces.setdefault(part.name, {})
        found[part.index] = tensor
        if len(found) == part.count:
            del pieces[part.name]
            yield part.name, torch.cat([found[index] for index in range(part.count)])
    if pieces:
        raise ValueError(f"These fused tensors lack pieces: {', '.join(sorted(pieces))}. Pass a whole state dict.")


RESOLUTIONS = {"480p": 640, "720p": 960, "1080p": 1440}
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
    advice = (
        "Expected the config.json of a published HunyuanVideo-1.5 text- or image-to-video version; download it again."
    )
    kinds = (KeyError, TypeError, IndexError, ValueError, ArithmeticError)
    with as_value_error(f"'{where}' lacks or does not understand", *kinds, advice=advice):
        sizes = {ours: original[theirs] for theirs, ours in _SIZES.items()}
        if not all(size > 0 for size in sizes.values()):
            raise ValueError(f"sizes like {sizes}")
        patch, task = original["patch_size"], original["ideal_task"]
        if sharpens := not original.get("concat_condition", True):
            task = "t2v"  # it serves both tasks
        return sizes | {
            "in_channels": original["in_channels"] if sharpens else 2 * original["in_channels"] + 1,
            "attention_head_dim": original["hidden_size"] // sizes["num_attention_heads"],
            "num_refiner_layers": NUM_REFINER_LAYERS,
            "patch_size_t": patch[0],
            "patch_size": patch[1],
            "text_embed_2_dim": glyph_width,
            "rope_axes_dim": tuple(original["rope_dim_list"]),
            "target_size": RESOLUTIONS[original["ideal_resolution"]],
            "task_type": {"t2v": "t2v", "i2v": "i2v"}[task],
            "use_meanflow": bool(original.get("use_meanflow", False)),
        }


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
        "concat_condition": True,
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
    """Return the arguments of the diffusers VAE for an original `vae/config.json`, with `shift_factor` if it is set."""
    if missing := sorted(set(_VAE_SIZES) - set(original)):
        raise ValueError(f"'{where}' lacks {', '.join(missing)}. Download the VAE's config.json again.")
    shift = {"shift_factor": original["shift_factor"]} if original.get("shift_factor") else {}
    return {ours: original[theirs] for theirs, ours in _VAE_SIZES.items()} | shift
