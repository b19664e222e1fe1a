"""Load HunyuanVideo-1.5 components from a folder: the diffusers layout, which the bundled tiny model shares.

Loading is strict: a missing, unexpected or mis-shaped weight is an error that lists it, never a printed warning.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from diffusers.utils import logging as diffusers_logging
from safetensors import SafetensorError
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedModel, Qwen2_5_VLTextModel, T5EncoderModel

from hyvideo.models.layout import check_diffusers_layout
from hyvideo.models.vae import allow_batches


def load_transformer(
    root: str | Path, version: str | None = None, *, dtype: torch.dtype = torch.float32
) -> HunyuanVideo15Transformer3DModel:
    """Load the video transformer of `root`, on the CPU, in `dtype`.

    Args:
        root: folder in the diffusers layout.
        version: name of the transformer when a layout holds several (`480p_t2v`, ...); the diffusers layout holds one.
        dtype: dtype of the weights.

    Raises:
        ValueError: missing folder, or weights that do not fit the config exactly.
    """
    return _load_strictly(HunyuanVideo15Transformer3DModel.from_pretrained, root, "transformer", dtype)


def load_vae(root: str | Path, *, dtype: torch.dtype = torch.float32) -> AutoencoderKLHunyuanVideo15:
    """Load the VAE of `root`, frozen; it takes batches.

    Raises:
        ValueError: missing folder, or weights that do not fit the config exactly.
    """
    vae = _load_strictly(AutoencoderKLHunyuanVideo15.from_pretrained, root, "vae", dtype)
    return allow_batches(vae).eval().requires_grad_(False)


def load_pipeline(
    root: str | Path,
    version: str | None = None,
    *,
    pipeline_class: type[HunyuanVideo15Pipeline] = HunyuanVideo15Pipeline,
    scheduler: Any,
    transformer_dtype: torch.dtype = torch.float32,
    encoder_dtype: torch.dtype = torch.float32,
) -> HunyuanVideo15Pipeline:
    """Load every component of `root` into a `pipeline_class`, on the CPU; encoders and VAE are frozen.

    Args:
        root: folder in the diffusers layout.
        version: see `load_transformer`.
        pipeline_class: the diffusers pipeline class or a subclass with the same constructor.
        scheduler: the scheduler instance the pipeline shall use.
        transformer_dtype: dtype of the policy's weights.
        encoder_dtype: dtype of text encoders and VAE.

    Raises:
        ValueError: missing components (all are named), or weights that do not fit their config exactly.
    """
    root = check_diffusers_layout(root)
    return pipeline_class(
        transformer=load_transformer(root, version, dtype=transformer_dtype),
        vae=load_vae(root, dtype=encoder_dtype),
        text_encoder=_load_text_encoder(Qwen2_5_VLTextModel, root, "text_encoder", encoder_dtype),
        tokenizer=AutoTokenizer.from_pretrained(root / "tokenizer"),
        text_encoder_2=_load_text_encoder(T5EncoderModel, root, "text_encoder_2", encoder_dtype),
        tokenizer_2=ByT5Tokenizer.from_pretrained(root / "tokenizer_2"),
        scheduler=scheduler,
        guider=_guider(root),
    )


def _guider(root: Path) -> ClassifierFreeGuidance:
    """Load the guidance settings of `root`, or the class's defaults."""
    with quiet_diffusers():
        if (root / "guider").is_dir():
            return ClassifierFreeGuidance.from_pretrained(root, subfolder="guider", local_files_only=True)
        return ClassifierFreeGuidance()


@contextmanager
def quiet_diffusers() -> Iterator[None]:
    """Keep notes of the library to itself that tell the user nothing (guiders are young, a dtype of None is a cast)."""
    verbosity = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_error()
    try:
        yield
    finally:
        diffusers_logging.set_verbosity(verbosity)


def _load_text_encoder(
    model_class: type[PreTrainedModel], root: Path, component: str, dtype: torch.dtype
) -> PreTrainedModel:
    """Load a text encoder of `root`, frozen."""
    # Mis-shaped weights then come back in the list of faults; otherwise the error does not say which they are.
    from_pretrained = partial(model_class.from_pretrained, ignore_mismatched_sizes=True)
    return _load_strictly(from_pretrained, root, component, dtype).eval().requires_grad_(False)


def _load_strictly(from_pretrained: Callable, root: str | Path, component: str, dtype: torch.dtype) -> Any:
    """Load `root/component` and raise a ValueError unless file and config agree on every weight."""
    root = check_diffusers_layout(root, (component,))
    try:
        model, info = from_pretrained(
            root, subfolder=component, torch_dtype=dtype, output_loading_info=True, local_files_only=True
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ValueError(f"Cannot load the {component} of '{root}': {error}") from error
    faults = {kind: sorted(map(str, keys)) for kind, keys in info.items() if keys and kind.endswith("keys")}
    if faults:
        listed = "; ".join(f"{kind.replace('_', ' ')}: {', '.join(keys)}" for kind, keys in faults.items())
        raise ValueError(
            f"The weights in '{root / component}' do not fit their config.json. {listed}. "
            "Download this component again, or correct its config.json."
        )
    return model
