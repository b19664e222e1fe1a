"""Train the tiny transformer by flow matching on latents of rendered clips, encoded once up front."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hyvideo.algorithms.optimizer import build_optimizers, set_learning_rate
from hyvideo.config.schema import OptimizerConfig
from hyvideo.models.loading import allow_batches
from hyvideo.models.parallelize import trainable_parameters
from hyvideo.models.reward_models.moving_shapes import Scene
from scripts.tiny.clips import render, sample_mixed_clip
from scripts.tiny.components import SHIFT, build_text_encoder, build_tokenizer, build_transformer, encode_prompts
from scripts.tiny.prompts import TRAIN_SCENES, WORDINGS, prompt
from scripts.tiny.train_vae import to_network

BATCH = 64
PROMPT_DROPOUT = 0.1
"""Share of samples trained on the empty prompt, so that classifier-free guidance works."""

NUM_CLIPS = 12288
"""Clips rendered and encoded up front: 40 of each training scene."""

NUM_STEPS = 3600
"""About 25 minutes on 2 CPU cores that multiply bf16 in hardware, several times as long on others."""

OPTIMIZER = OptimizerConfig(use_muon=True, learning_rate=1.5e-3, weight_decay=0.01, lr_warmup_steps=100)


@dataclass(frozen=True)
class Dataset:
    """Encoded clips and prompts: N latents, P prompts of S tokens; prompt 0 is the empty one.

    Attributes:
        latents: `[N, C, F, H, W]` scaled to unit spread.
        prompt_rows: `[N, W]` row in `text` of each clip's prompt in each of W wordings.
        text: `[P, S, D]` text embeddings, zero-padded on the right.
        text_mask: `[P, S]` 1 where a token is valid.
    """

    latents: Tensor
    prompt_rows: Tensor
    text: Tensor
    text_mask: Tensor


@torch.no_grad()
def encode_clips(vae: AutoencoderKLHunyuanVideo15, scenes: list[Scene], rng: random.Random) -> Tensor:
    """Render one clip per scene and encode it (posterior mode, scaled): `[N, C, F, H, W]` float32."""
    latents = []
    for begin in range(0, len(scenes), 16):
        frames = to_network(render([sample_mixed_clip(scene, rng) for scene in scenes[begin : begin + 16]]))
        with torch.autocast("cpu", torch.bfloat16):
            latents.append(vae.encode(frames).latent_dist.mode().float() * vae.config.scaling_factor)
    return torch.cat(latents)


def build_dataset(vae: AutoencoderKLHunyuanVideo15) -> Dataset:
    """Encode NUM_CLIPS clips of the training scenes, each scene equally often, and every wording of each scene."""
    picked = [TRAIN_SCENES[i % len(TRAIN_SCENES)] for i in range(NUM_CLIPS)]
    prompts = [""] + [prompt(scene, wording) for scene in TRAIN_SCENES for wording in range(len(WORDINGS))]
    tokenizer = build_tokenizer()
    text, text_mask = encode_prompts(tokenizer, build_text_encoder(len(tokenizer)), prompts)
    rows = torch.arange(1, len(prompts)).view(len(TRAIN_SCENES), len(WORDINGS))
    latents = encode_clips(vae, picked, random.Random(0))
    return Dataset(latents, rows[torch.arange(NUM_CLIPS) % len(TRAIN_SCENES)], text, text_mask)


def batches(data: Dataset, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (latents, text, text mask) endlessly, in random order, one wording each, some prompts dropped."""
    while True:
        for index in torch.randperm(len(data.latents), generator=generator).split(BATCH):
            wording = torch.randint(data.prompt_rows.shape[1], (len(index),), generator=generator)
            kept = torch.rand(len(index), generator=generator) >= PROMPT_DROPOUT
            rows = data.prompt_rows[index, wording] * kept
            yield data.latents[index], data.text[rows], data.text_mask[rows]


def predict_velocity(
    transformer: HunyuanVideo15Transformer3DModel, sample: Tensor, sigma: Tensor, text: Tensor, text_mask: Tensor
) -> Tensor:
    """Velocity at `sample` `[B, C, F, H, W]` and `sigma` `[B]`; zero glyph and image tokens, so none is padding."""
    batch, _, *grid = sample.shape
    condition = sample.new_zeros(batch, transformer.config.in_channels - sample.shape[1], *grid)
    return transformer(
        hidden_states=torch.cat([sample, condition], dim=1),
        timestep=sigma * 1000,
        encoder_hidden_states=text,
        encoder_attention_mask=text_mask,
        encoder_hidden_states_2=text.new_zeros(batch, 0, transformer.config.text_embed_2_dim),
        encoder_attention_mask_2=text_mask.new_zeros(batch, 0),
        image_embeds=text.new_zeros(batch, 0, transformer.config.image_embed_dim),
        return_dict=False,
    )[0].float()


def flow_matching_loss(
    transformer: HunyuanVideo15Transformer3DModel, batch: tuple[Tensor, Tensor, Tensor], generator: torch.Generator
) -> Tensor:
    """Mean squared error of the velocity `eps - x0` at uniform times shifted as in sampling."""
    clean, text, text_mask = batch
    uniform = torch.rand(len(clean), generator=generator)
    sigma = SHIFT * uniform / (1 + (SHIFT - 1) * uniform)
    noise = torch.randn(clean.shape, generator=generator)
    sample = torch.lerp(clean, noise, sigma.view(-1, 1, 1, 1, 1))
    with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        velocity = predict_velocity(transformer, sample, sigma, text, text_mask)
    return (velocity - (noise - clean)).square().mean()


def start_as_identity(transformer: HunyuanVideo15Transformer3DModel) -> None:
    """Zero the modulations and the output layer: blocks begin as identities, which makes large learning rates safe."""
    layers = [transformer.proj_out, transformer.norm_out.linear]
    layers += [norm.linear for block in transformer.transformer_blocks for norm in (block.norm1, block.norm1_context)]
    for layer in layers:
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)


def train(vae_folder: Path, output: Path) -> None:
    """Train new weights with Muon, whose learning rate falls linearly to 0, and save them to `output`."""
    vae = allow_batches(AutoencoderKLHunyuanVideo15.from_pretrained(vae_folder)).eval()
    data = build_dataset(vae)
    print(f"encoded {NUM_CLIPS} clips, std {data.latents.std():.3f}", flush=True)
    transformer = build_transformer(vae.config.latent_channels)
    start_as_identity(transformer)
    for unused in (transformer.context_embedder_2, transformer.image_embedder):
        unused.requires_grad_(False)
    trained = trainable_parameters(transformer)
    for block in transformer.transformer_blocks:
        block.compile()
    optimizers = build_optimizers(trained, OPTIMIZER)
    generator = torch.Generator().manual_seed(0)
    stream, losses, begin = batches(data, generator), [], time.monotonic()
    for step in range(1, NUM_STEPS + 1):
        set_learning_rate(optimizers, OPTIMIZER, step - 1, scale=1 - (step - 1) / NUM_STEPS)
        loss = flow_matching_loss(transformer, next(stream), generator)
        transformer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
        if step % 50 == 0:
            mean = sum(losses[-50:]) / 50
            print(f"step {step} loss {mean:.4f} elapsed {time.monotonic() - begin:.0f}s", flush=True)
    transformer.save_pretrained(output)
