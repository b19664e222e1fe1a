"""A random HunyuanVideo-1.5 of the real classes, small enough to train in a test: 5x32x32 videos, 2x2x2 latents."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.models.transformers import transformer_hunyuan_video15
from torch import Tensor, nn

from hyvideo.config.schema import Config
from hyvideo.models.adapter import lora_config
from hyvideo.models.parallelize import trainable_parameters
from scripts.tiny.components import build_tokenizer

LATENT_CHANNELS, TEXT_WIDTH, GLYPH_WIDTH, HEAD_WIDTH, IMAGE_WIDTH = 4, 32, 16, 16, 20
SHIFT = 3.0
ADAPTER = lora_config(2, 4, Config().model.lora_target_modules)
"""Settings of a small adapter, on the modules that the default chooses."""


class GlyphProjection(transformer_hunyuan_video15.HunyuanVideo15ByT5TextProjection):
    """The network for quoted texts, narrow in a tiny transformer.

    Its 2,048 features, which diffusers fixes, would be 97 % of the weights, and tests would do little but train and
    send and save them. A process that has not imported this module therefore cannot load a tiny transformer.
    """

    def __init__(self, in_features: int, hidden_size: int, out_features: int) -> None:
        super().__init__(in_features, 24 if in_features == GLYPH_WIDTH else hidden_size, out_features)


transformer_hunyuan_video15.HunyuanVideo15ByT5TextProjection = GlyphProjection


def build_transformer(seed: int = 0, **changes: Any) -> diffusers.HunyuanVideo15Transformer3DModel:
    """Make a transformer of two blocks of width 32 in which every condition moves the output visibly.

    `changes` replace settings of its config. No two of its tensors are alike: norm weights are near 1, biases near 0.
    """
    torch.manual_seed(seed)
    config = {"in_channels": 2 * LATENT_CHANNELS + 1, "out_channels": LATENT_CHANNELS, "num_layers": 2}
    config |= {"num_attention_heads": 2, "attention_head_dim": HEAD_WIDTH, "rope_axes_dim": (4, 6, 6)}
    config |= {"text_embed_dim": TEXT_WIDTH, "text_embed_2_dim": GLYPH_WIDTH, "image_embed_dim": IMAGE_WIDTH}
    config |= {"target_size": 32, "task_type": "t2v", "num_refiner_layers": 1}
    transformer = diffusers.HunyuanVideo15Transformer3DModel(**config | changes)
    with torch.no_grad():
        for parameter in transformer.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
            else:
                parameter.add_(0.02 * torch.randn_like(parameter))
    return transformer.eval()


def transformer_call(
    grid: tuple[int, int, int],
    text: Sequence[int],
    glyph: Sequence[int],
    image: bool = False,
    *,
    padded_to: tuple[int, int, int] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """What the pipeline would call the transformer with for latents of size `grid`; noise where padding is.

    `text` and `glyph` are the valid tokens of each row, `padded_to` all (text, glyph, vision): the longest row's and 6.
    """
    generator, batch = torch.Generator().manual_seed(seed), len(text)
    num_text, num_glyph, num_vision = padded_to or (max(text), max(glyph), 6)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=generator)

    def mask(lengths: Sequence[int], size: int) -> Tensor:
        return (torch.arange(size) < torch.tensor(lengths)[:, None]).float()

    return {
        "hidden_states": normal(2 * LATENT_CHANNELS + 1, *grid),
        "timestep": torch.linspace(20.25, 900.5, batch),
        "encoder_hidden_states": normal(num_text, TEXT_WIDTH),
        "encoder_attention_mask": mask(text, num_text),
        "encoder_hidden_states_2": normal(num_glyph, GLYPH_WIDTH),
        "encoder_attention_mask_2": mask(glyph, num_glyph),
        "image_embeds": normal(num_vision, IMAGE_WIDTH) * image,
        "return_dict": False,
    }


def randomize(transformer: nn.Module) -> None:
    for number, parameter in enumerate(trainable_parameters(transformer).values()):
        nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(number))


def build_vae() -> diffusers.AutoencoderKLHunyuanVideo15:
    """Make a VAE with the real compression (16 in space, 4 in time) and a scaling factor that is not 1.

    Its videos are black with a few bright spots: enough of a moving shape for that reward to tell them apart.
    """
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=LATENT_CHANNELS, block_out_channels=(4, 4, 4, 8, 8), layers_per_block=0, scaling_factor=0.7
    )
    last = vae.decoder.conv_out.conv
    with torch.no_grad():
        last.weight.mul_(4)
        last.bias.fill_(-3)
    return vae.eval()


def build_text_encoder(vocab_size: int) -> transformers.Qwen2_5_VLTextModel:
    """Make a language model of four layers, of which the pipeline reads the state before the last two."""
    torch.manual_seed(0)
    own = {"num_hidden_layers": 4, "max_position_embeddings": 2048, "initializer_range": 0.2}
    return transformers.Qwen2_5_VLTextModel(transformers.Qwen2_5_VLTextConfig(**text_config(vocab_size) | own)).eval()


def text_config(vocab_size: int) -> dict[str, Any]:
    """Configure two text layers of any Qwen vision-language model."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": rope}
    no_ends = {"bos_token_id": None, "eos_token_id": None}
    return {"vocab_size": vocab_size, "hidden_size": TEXT_WIDTH, "intermediate_size": 48, **layers, **no_ends}


def build_glyph_encoder(vocab_size: int = 384, width: int = GLYPH_WIDTH) -> transformers.T5EncoderModel:
    torch.manual_seed(0)
    sizes = {"d_model": width, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    return transformers.T5EncoderModel(transformers.T5Config(vocab_size=vocab_size, **sizes)).eval()


def build_vision_encoder() -> transformers.SiglipVisionModel:
    """Make a SigLIP of one layer that sees images as 2 x 2 patches: four tokens."""
    torch.manual_seed(0)
    layers = {"hidden_size": IMAGE_WIDTH, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**layers, image_size=16, patch_size=8)).eval()


def build_image_processor() -> transformers.SiglipImageProcessorPil:
    half, size = [0.5] * 3, {"height": 16, "width": 16}
    return transformers.SiglipImageProcessorPil(size=size, image_mean=half, image_std=half)


def save_tiny_model(folder: Path, transformer: diffusers.HunyuanVideo15Transformer3DModel | None = None) -> Path:
    """Write the whole model to `folder` in the diffusers layout, as the stock pipeline does; float32."""
    tokenizer, transformer = build_tokenizer(), transformer or build_transformer()
    pipeline = diffusers.HunyuanVideo15Pipeline(
        text_encoder=build_text_encoder(len(tokenizer)),
        tokenizer=tokenizer,
        transformer=transformer,
        vae=build_vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        text_encoder_2=build_glyph_encoder(width=transformer.config.text_embed_2_dim),
        tokenizer_2=transformers.ByT5Tokenizer(),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=1.0),
    )
    pipeline.save_pretrained(folder)
    return folder
