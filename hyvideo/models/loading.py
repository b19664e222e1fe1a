"""Load HunyuanVideo-1.5 from a folder: the original (Tencent) layout, or that of diffusers, which the tiny base shares.

Loading is strict: a missing, unexpected or mis-shaped weight is an error that lists it, never a printed warning. The
networks are made without memory and filled from the files tensor by tensor.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock
from torch import Tensor, nn

from hyvideo.models.adapter import base_weight, without_diffusers_logs
from hyvideo.models.conversion import (
    Naming,
    Part,
    diffusers_transformer_config,
    diffusers_vae_config,
    transformer_part,
    vae_part,
)
from hyvideo.models.encoders import load_encoders
from hyvideo.models.model_folder import (
    check_diffusers_layout,
    check_layout,
    check_values,
    is_diffusers_layout,
    read_json,
    readable,
    task_of,
    transformer_folder,
)
from hyvideo.models.weight_files import SafetensorsFolder, fill

_GLYPH_NORM = "byt5_in.layernorm.weight"  # of the original transformer: tells the width of the glyph text's states
TILE_OVERLAP = 0.125  # share of a VAE tile (256 pixels wide) that overlaps the next


def load_transformer(
    root: str | Path,
    version: str | None = None,
    *,
    dtype: torch.dtype | None = torch.float32,
    device: torch.device | None = None,
    prepare: Callable[[HunyuanVideo15Transformer3DModel], object] | None = None,
) -> HunyuanVideo15Transformer3DModel:
    """Load the video transformer of `root`, a model folder in either layout; `version` as in `transformer_folder`.

    `dtype` is that of the weights (None keeps that of the files), `device` where whole ones are put as they are read
    (None: in host memory). `prepare` is called with the network on the meta device: to add an adapter, which keeps its
    weights, or to shard it (`shard_weights`); every rank then reads only the rows of its shards, to where these are.
    """
    transformer, source, naming = open_transformer(root, version)
    if dtype is not None:
        nn.Module.to(transformer, dtype)  # that of diffusers warns of the dtype
    if prepare is not None:
        prepare(transformer)

    # weights of an adapter are in no file of the base
    of_base: Naming = lambda name: None if (base := base_weight(name)) is None else naming(base)  # noqa: E731
    fill(transformer, source, of_base, dtype=dtype, device=device)
    return transformer.eval()


def open_transformer(
    root: str | Path, version: str | None = None
) -> tuple[HunyuanVideo15Transformer3DModel, SafetensorsFolder, Naming]:
    """Return the transformer of `root` on the meta device, its files and where they keep a tensor, for `fill`."""
    folder, naming = transformer_folder(root, version), Part
    source, config = SafetensorsFolder(folder), read_json(folder / "config.json")
    if not is_diffusers_layout(Path(root)):
        glyph_width, naming = (*source.shapes.get(_GLYPH_NORM, ()), 1472)[0], transformer_part
        config = diffusers_transformer_config(config, glyph_width, str(folder / "config.json"))
    return _empty(HunyuanVideo15Transformer3DModel, config, folder), source, naming


def open_vae(root: str | Path) -> tuple[AutoencoderKLHunyuanVideo15, SafetensorsFolder, Naming]:
    """Return the VAE of `root`, its files and where they keep a tensor; as `open_transformer`."""
    folder = check_diffusers_layout(root, ("vae",)) / "vae"
    source, config = SafetensorsFolder(folder), read_vae_config(root)
    vae = _empty(AutoencoderKLHunyuanVideo15, config, folder)
    vae.register_to_config(shift_factor=config.get("shift_factor") or 0.0)
    return vae, source, Part if is_diffusers_layout(Path(root)) else vae_part


def read_vae_config(root: str | Path) -> dict[str, Any]:
    """Return the arguments of the diffusers VAE of `root`, in either layout; a ValueError if there are none."""
    path = Path(root) / "vae" / "config.json"
    config = read_json(path)
    return config if is_diffusers_layout(Path(root)) else diffusers_vae_config(config, str(path))


def load_vae(
    root: str | Path, *, dtype: torch.dtype | None = torch.float32, device: torch.device | None = None
) -> AutoencoderKLHunyuanVideo15:
    """Load the VAE of `root`, frozen; it takes batches. Tiling is set up as in the original, and off."""
    vae, source, naming = open_vae(root)
    fill(vae, source, naming, dtype=dtype, device=device)
    vae.tile_overlap_factor = TILE_OVERLAP
    return allow_batches(vae).eval().requires_grad_(False)


def load_pipeline(
    root: str | Path,
    version: str | None = None,
    *,
    pipeline_class: type[HunyuanVideo15Pipeline] = HunyuanVideo15Pipeline,
    scheduler: Any,
    transformer_dtype: torch.dtype | None = torch.float32,
    encoder_dtype: torch.dtype | None = torch.float32,
    device: torch.device | None = None,
    encoders_on: torch.device | None = None,
    prepare: Callable[[HunyuanVideo15Transformer3DModel], object] | None = None,
) -> HunyuanVideo15Pipeline:
    """Load every component of `root` into a `pipeline_class`; encoders and VAE are frozen.

    `root`, `version` and `prepare` are as in `load_transformer`, and so are `transformer_dtype` and `device`, of
    transformer and VAE. Buffers, and what `prepare` adds, are for the caller to move. `encoder_dtype` is that of VAE,
    language and vision model; ByT5 keeps float32, as in the original. `encoders_on` is the device of the encoders.
    """
    root = check_layout(root, version)
    with without_diffusers_logs():
        guider = ClassifierFreeGuidance()
        if (root / "guider").is_dir():
            guider = ClassifierFreeGuidance.from_pretrained(root, subfolder="guider", local_files_only=True)
    encoders = load_encoders(root, encoder_dtype, encoders_on, vision=task_of(root, version) == "i2v")
    return pipeline_class(
        transformer=load_transformer(root, version, dtype=transformer_dtype, device=device, prepare=prepare),
        vae=load_vae(root, dtype=encoder_dtype, device=device),
        scheduler=scheduler,
        guider=guider,
        **encoders,
    )


def _empty(model_class: type[nn.Module], config: dict[str, Any], folder: Path) -> nn.Module:
    """Make a network of `config` without memory for its weights."""
    check_values(config, folder / "config.json")
    named = readable(folder / "config.json", model_class.__name__)
    with named, init_empty_weights(), without_diffusers_logs():
        return model_class.from_config(config)


def allow_batches(vae: AutoencoderKLHunyuanVideo15) -> AutoencoderKLHunyuanVideo15:
    """Make the attention mask broadcast over a batch (as shipped it raises for more than one video), in place.

    Conv3d weights become channels-last: on a CPU two small videos decode together in less time than one alone.
    """
    for module in vae.modules():
        if isinstance(module, nn.Conv3d):
            module.to(memory_format=torch.channels_last_3d)
        if isinstance(module, HunyuanVideo15AttnBlock):
            module.prepare_causal_attention_mask = _causal_mask
    return vae


def _causal_mask(
    num_frames: int, tokens_per_frame: int, dtype: torch.dtype, device: torch.device, batch_size: int | None = None
) -> Tensor:
    """Additive mask `[N, N]`, N tokens in frame order: a token sees its own frame and those before it."""
    frame = torch.arange(num_frames, device=device).repeat_interleave(tokens_per_frame)
    later = frame[None, :] > frame[:, None]
    return torch.zeros(later.shape, dtype=dtype, device=device).masked_fill(later, -torch.inf)
