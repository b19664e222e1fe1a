"""The text and vision encoders of HunyuanVideo-1.5, frozen, from either layout."""

from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import (
    AutoConfig,
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLTextModel,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
)
from transformers.initialization import no_init_weights

from hyvideo.models.conversion import Naming, Part
from hyvideo.models.model_folder import check_component, is_diffusers_layout, read_json, readable
from hyvideo.models.weight_files import SafetensorsFolder, StateDict, fill, read_pickled

GLYPH_PREFIX = "module.text_tower.encoder."
"""Prefix of the glyph encoder's tensors in `byt5_model.pt`; the rest of the file belongs to its training."""

_SHARED, _EMBEDDING = "shared.weight", "encoder.embed_tokens.weight"


def load_encoders(
    root: Path, dtype: torch.dtype | None, device: torch.device | None = None, *, vision: bool
) -> dict[str, Any]:
    """Load the encoders of a folder that was checked (`check_layout`), by the names of the diffusers pipeline.

    `dtype` is that of the language and vision model (None keeps that of the files), and `device` where weights are put
    as they are read (None: in host memory). `vision` asks for the vision encoder of image-to-video too.
    """
    if is_diffusers_layout(root):
        text, tokenizer = root / "text_encoder", root / "tokenizer"
        image_encoder, image_processor = root / "image_encoder", root / "feature_extractor"
    else:
        text = tokenizer = root / "text_encoder" / "llm"
        siglip_root = root / "vision_encoder" / "siglip"
        image_encoder, image_processor = siglip_root / "image_encoder", siglip_root / "feature_extractor"
    with readable(root, "the encoders"):
        glyphs = _glyph_encoder(root, device) if is_diffusers_layout(root) else _original_glyphs(text.parent, device)
        encoders = dict(zip(("text_encoder_2", "tokenizer_2"), glyphs, strict=True))
        with init_empty_weights(), no_init_weights():
            language = Qwen2_5_VLTextModel(_from_folder(AutoConfig, text).get_text_config())
        names = ("model.language_model.", "model.")  # of a whole Qwen2.5-VL, by newer and older versions of the library
        unread = ("visual.", "model.visual.", "lm_head.")  # its vision tower and output layer stay on the disk
        encoders["text_encoder"] = _filled(language, text, names, dtype, device, ignored=unread)
        encoders["tokenizer"] = _from_folder(AutoTokenizer, tokenizer)
        if vision:
            with init_empty_weights(), no_init_weights():
                siglip = SiglipVisionModel(_from_folder(SiglipVisionConfig, image_encoder))
            of_others = ("vision_model.",)  # where other versions of the library keep its tensors
            encoders["image_encoder"] = _filled(siglip, image_encoder, of_others, dtype, device)
            encoders["feature_extractor"] = processor = _from_folder(SiglipImageProcessorPil, image_processor)
            side = siglip.config.image_size
            if dict(processor.size) != {"height": side, "width": side}:
                takes = f"the vision model takes {side} by {side} pixels"
                raise ValueError(f"'{image_processor}': size is {processor.size}, but {takes}.")
    return encoders


def _from_folder(kind: type, folder: Path) -> Any:
    """Load a tokenizer or configuration of a class that the library has, never of one that the folder brings along.

    A file of another place, and a folder that needs its own code, are a ValueError.
    """
    check_component(folder)
    with readable(folder, kind.__name__):
        return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _filled(
    model: PreTrainedModel,
    folder: Path,
    prefixes: tuple[str, ...],
    dtype: torch.dtype | None,
    device: torch.device | None,
    ignored: tuple[str, ...] = (),
) -> PreTrainedModel:
    """Fill `model` from tensors that are named as its own, or so below the first of `prefixes` there is; freeze it."""
    source = SafetensorsFolder(folder)
    prefix = next((one for one in prefixes if any(name.startswith(one) for name in source.shapes)), "")
    fill(model, source, lambda name: Part(prefix + name), dtype=dtype, device=device, ignored=ignored)
    return model.eval().requires_grad_(False)


def _glyph_encoder(root: Path, device: torch.device | None) -> tuple[T5EncoderModel, PreTrainedTokenizerBase]:
    """Load the glyph encoder and its tokenizer as the library saves them."""
    folder = root / "text_encoder_2"
    config, source = _from_folder(T5Config, folder), SafetensorsFolder(folder)
    held = _SHARED if _SHARED in source.shapes else _EMBEDDING
    model = _filled_t5(config, source, lambda name: Part(held if name in (_SHARED, _EMBEDDING) else name), device)
    return model, _from_folder(ByT5Tokenizer, root / "tokenizer_2")


def _original_glyphs(text: Path, device: torch.device | None) -> tuple[T5EncoderModel, PreTrainedTokenizerBase]:
    """Load ByT5 with the glyph weights of its training, and its tokenizer with the tokens of colours and fonts."""
    tokenizer, glyph = _from_folder(ByT5Tokenizer, text / "byt5-small"), text / "Glyph-SDXL-v2"
    fonts = read_json(glyph / "assets" / "multilingual_10-lang_idx.json")
    tokens = [f"<color-{index}>" for index in range(len(read_json(glyph / "assets" / "color_idx.json")))]
    tokens += [f"<{font[:2]}-font-{index}>" for font, index in fonts.items()]
    tokenizer.add_tokens(tokens, special_tokens=True)
    path = glyph / "checkpoints" / "byt5_model.pt"
    mine = {name: tensor for name, tensor in read_pickled(path).items() if name.startswith(GLYPH_PREFIX)}
    config = _from_folder(T5Config, text / "byt5-small")
    config.vocab_size = len(tokenizer)

    def naming(name: str) -> Part:
        """Name a tensor of the encoder as the file does."""
        return Part(GLYPH_PREFIX + ("embed_tokens.weight" if name == _SHARED else name.removeprefix("encoder.")))

    return _filled_t5(config, StateDict(mine, str(path)), naming, device), tokenizer


def _filled_t5(
    config: T5Config, source: SafetensorsFolder | StateDict, naming: Naming, device: torch.device | None
) -> T5EncoderModel:
    """Make a T5 encoder in float32, as the original keeps it, whose token embedding has two names."""
    with init_empty_weights(), no_init_weights():
        model = T5EncoderModel(config)
    fill(model, source, naming, dtype=torch.float32, device=device, ignored=(_EMBEDDING,))
    model.tie_weights()
    return model.eval().requires_grad_(False)
