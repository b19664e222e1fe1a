"""HunyuanVideo-1.5 for GRPO: encode once, one denoising step for all callers, rollouts that can be replayed."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts, format_text_input
from einops import rearrange
from PIL import Image
from torch import Tensor, nn
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextModel,
    Qwen2Tokenizer,
    SiglipImageProcessorPil,
    SiglipVisionModel,
    T5EncoderModel,
)

from hyvideo.data.host_reads import host_read, upload
from hyvideo.data.prompts import Prompt
from hyvideo.data.randomness import generator_for
from hyvideo.data.videos import read_image
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler

DECODE_CELLS = 4096
"""Latent positions (frames x height x width) decoded at once: a 480p video of 121 frames has 49,290."""


def decoded_together(shape: Sequence[int]) -> int:
    """Return how many videos with latents `(..., F', H', W')` are decoded at once."""
    return max(1, DECODE_CELLS // math.prod(shape[-3:]))


@dataclass(frozen=True)
class FirstFrames:
    """P images that videos start from, encoded once.

    Attributes:
        states: `[P, S_v, D_v]` states of the vision encoder (HunyuanVideo-1.5: 729 x 1152).
        latents: `[P, C, H', W']` scaled latents of the images at the size of the videos.
    """

    states: Tensor
    latents: Tensor

    def rows(self, index: Sequence[int]) -> "FirstFrames":
        """Return the rows `index` (repeats allowed)."""
        return FirstFrames(*(torch.stack([part[i] for i in index]) for part in (self.states, self.latents)))


@dataclass(frozen=True)
class Conditioning:
    """Encoded prompts, one row each, without padding: how many tokens a row has is known on the host.

    Attributes:
        text: P states `[S_p, D]` of the language model (HunyuanVideo-1.5: D = 3584).
        glyph: P ByT5 states `[S_gp, D_g]` of the quoted texts (D_g = 1472); S_gp is 0 when the prompt quotes no text.
        images: what the videos start from; None for text-to-video.
    """

    text: tuple[Tensor, ...]
    glyph: tuple[Tensor, ...]
    images: FirstFrames | None = None

    def rows(self, index: Sequence[int]) -> "Conditioning":
        """Return the rows `index` (repeats allowed)."""
        images = None if self.images is None else self.images.rows(index)
        return Conditioning(tuple(self.text[i] for i in index), tuple(self.glyph[i] for i in index), images)

    def with_negative(self, negative: "Conditioning") -> "Conditioning":
        """Return the rows of `self`, then for each the one row of `negative` with that row's own image."""
        count = len(self)
        images = None if self.images is None else self.images.rows([*range(count), *range(count)])
        return Conditioning(self.text + negative.text * count, self.glyph + negative.glyph * count, images)

    @classmethod
    def join(cls, parts: Sequence["Conditioning"]) -> "Conditioning":
        """Put the rows of several one below the other; all have images or none has."""
        text, glyph = (tuple(row for part in parts for row in getattr(part, name)) for name in ("text", "glyph"))
        images = [part.images for part in parts if part.images]
        joined = [torch.cat([getattr(one, name) for one in images]) for name in ("states", "latents") if images]
        return cls(text, glyph, FirstFrames(*joined) if images else None)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.text)


@dataclass(frozen=True)
class SampleNoise:
    """The noise of B samples, each drawn on the CPU from its own seeded generator.

    Attributes:
        seeds: base seed of each sample, length B; in training the run's seed for all.
        stream: what the samples are for (`rollout`, `validation`, ...); streams never share noise.
        round: the rollout round (0 for sampling outside training).
        prompts: index of each sample's prompt, length B.
        generations: number of each sample within its prompt's group, length B.
        share_initial: samples of one prompt start from the same noise (`use_same_noise`).
        repeat_initial: the starting noise is that of round 0 in every round (`published prompt_noise`).
    """

    seeds: Sequence[int]
    stream: str
    round: int
    prompts: Sequence[int]
    generations: Sequence[int]
    share_initial: bool = False
    repeat_initial: bool = False

    def rows(self, chosen: Sequence[int]) -> "SampleNoise":
        """Return the noise of some of the samples."""
        of_samples = {name: [getattr(self, name)[i] for i in chosen] for name in ("seeds", "prompts", "generations")}
        return replace(self, **of_samples)

    def initial(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Return the starting latents `[B, *shape]`, float32."""
        round = 0 if self.repeat_initial else self.round
        return self._draw("initial", round, 0, shape, device, shared=self.share_initial)

    def step(self, index: int, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Return the noise `[B, *shape]` injected at denoising step `index`, float32."""
        return self._draw("step", self.round, index, shape, device, shared=False)

    def _draw(
        self, kind: str, round: int, index: int, shape: Sequence[int], device: torch.device | str, *, shared: bool
    ) -> Tensor:
        stream = f"{self.stream}/{kind}"
        generators = [
            generator_for(seed, stream, round, prompt, 0 if shared else generation, index)
            for seed, prompt, generation in zip(self.seeds, self.prompts, self.generations, strict=True)
        ]
        return draw(generators, shape, device)


def draw(generators: Sequence[torch.Generator], shape: Sequence[int], device: torch.device | str) -> Tensor:
    """Draw `[B, *shape]` float32 on the CPU, one sample per generator, and upload it to `device`."""
    return upload(torch.stack([torch.randn(*shape, generator=generator) for generator in generators]), device)


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance: `v = v_negative + scale (v_prompt - v_negative)`.

    Attributes:
        scale: guidance scale; 1 means no guidance, and one transformer row per sample instead of two.
        negative: one row; needed when `scale` is not 1.
    """

    scale: float = 1.0
    negative: Conditioning | None = None


@dataclass(frozen=True)
class Rollout:
    """What sampling B videos in K steps leaves behind.

    Attributes:
        videos: `[B, F, H, W, 3]` uint8 on the CPU; None before they are decoded.
        latents: `[B, K + 1, C, F', H', W']` float32; `latents[:, 0]` is pure noise. These exact tensors are replayed.
            `[B, 1, ...]`, the last ones, where only they were kept.
        means: `[B, K, C, F', H', W']` float32, mean of every transition; None where only the last latents were kept.
        log_probs: `[B, K]` float32, log-probability of every transition (mean over latent dims), or None likewise.
    """

    videos: Tensor | None
    latents: Tensor
    means: Tensor | None = None
    log_probs: Tensor | None = None

    @classmethod
    def join(cls, parts: Sequence["Rollout"]) -> "Rollout":
        """Put the videos of several rollouts one after the other."""
        columns = [[getattr(part, field.name) for part in parts] for field in fields(cls)]
        return cls(*(None if column[0] is None else torch.cat(column) for column in columns))


class Learner(Protocol):
    """What learns from the steps of a rollout while they are made."""

    def trains(self, index: int) -> bool:
        """Whether step `index` is to be computed with gradient."""

    def learn(self, index: int, mean: Tensor, std: Tensor, following: Tensor) -> None:
        """Learn from such a step: the transition `[B, ...]`, its mean with gradient, and what was drawn from it."""


class HunyuanVideoGRPOPipeline(HunyuanVideo15Pipeline):
    """The diffusers HunyuanVideo-1.5 pipeline with the three things GRPO needs from it.

    `encode` turns prompts into a `Conditioning`; `denoise_step` is the one transition that rollout, anchor pass and
    update all call, so replay equals rollout; `rollout` returns videos.
    """

    model_cpu_offload_seq = "image_encoder->text_encoder->text_encoder_2->transformer->vae"
    _optional_components = ("image_encoder", "feature_extractor")
    scheduler: FlowMatchDiscreteScheduler
    autocast_dtype: torch.dtype = torch.float32  # dtype of transformer matrix products; weights keep their own
    encoder_offload: bool = False  # whether the encoders rest in host memory and visit the VAE's device

    def __init__(
        self,
        text_encoder: Qwen2_5_VLTextModel,
        tokenizer: Qwen2Tokenizer,
        transformer: HunyuanVideo15Transformer3DModel,
        vae: AutoencoderKLHunyuanVideo15,
        scheduler: FlowMatchDiscreteScheduler,
        text_encoder_2: T5EncoderModel,
        tokenizer_2: ByT5Tokenizer,
        guider: ClassifierFreeGuidance,
        image_encoder: SiglipVisionModel | None = None,
        feature_extractor: SiglipImageProcessorPil | None = None,
    ) -> None:
        super().__init__(text_encoder, tokenizer, transformer, vae, scheduler, text_encoder_2, tokenizer_2, guider)
        self.register_modules(image_encoder=image_encoder, feature_extractor=feature_extractor)

    def with_scheduler(self, scheduler: FlowMatchDiscreteScheduler) -> "HunyuanVideoGRPOPipeline":
        """Return a pipeline over the same components that follows another scheduler."""
        other = type(self)(**{**self.components, "scheduler": scheduler})
        other.autocast_dtype, other.encoder_offload = self.autocast_dtype, self.encoder_offload
        return other

    @property
    def encoders(self) -> list[nn.Module]:
        """The networks that read prompts and images."""
        encoders = (self.text_encoder, self.text_encoder_2, self.image_encoder)
        return [encoder for encoder in encoders if encoder is not None]

    @property
    def _execution_device(self) -> torch.device:
        return self.vae.device if self.encoder_offload else super()._execution_device

    @contextmanager
    def encoders_at_work(self) -> Iterator[None]:
        """Let encoders that rest in host memory compute on the device; nothing changes, so nothing is copied back."""
        device = self.vae.device
        places: list[tuple[nn.Module, str, Tensor]] = []
        away: dict[Tensor, Tensor] = {}  # by the tensor itself, so that what modules share stays shared
        for module in (module for encoder in self.encoders for module in encoder.modules() if self.encoder_offload):
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                places.append((module, name, tensor))
                if tensor not in away:
                    with host_read("networks that rest in host memory visit the device, once in many rounds"):
                        copy = tensor.detach().to(device)
                    away[tensor] = nn.Parameter(copy, False) if isinstance(tensor, nn.Parameter) else copy
        try:
            for module, name, tensor in places:
                setattr(module, name, away[tensor])
            yield
        finally:
            for module, name, tensor in places:
                setattr(module, name, tensor)

    def encode_prompts(self, prompts: Sequence[Prompt], size: tuple[int, int]) -> Conditioning:
        """Encode the texts of `prompts` and the images they name, cropped to `size` (height, width), one row each.

        Prompts must all have an image or none, as the transformer's task demands (else a ValueError).
        """
        check_task(prompts, self.task)
        images = [read_image(prompt.ref_image_path) for prompt in prompts] if self.task == "i2v" else None
        with self.encoders_at_work():
            conditioning = self.encode([prompt.text for prompt in prompts])
            return conditioning if images is None else replace(conditioning, images=self.encode_images(images, size))

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], *, glyphs: bool = True) -> Conditioning:
        """Encode `prompts`, one row each.

        Every prompt is encoded alone and without padding: the result does not depend on its neighbours. An empty one is
        encoded as a blank, as the model was trained. With `glyphs` quoted texts are encoded by ByT5, which the original
        model never does for the negative prompt.
        """
        rows, device = [], self._execution_device  # to ask for it takes diffusers milliseconds
        with self.encoders_at_work():
            for prompt in prompts:
                try:
                    quoted = prompt if glyphs else ""
                    rows.append((self._encode_text(prompt, device), self._encode_glyphs(quoted, device)))
                except Exception as error:
                    error.add_note(f"The encoders failed at the prompt {prompt!r}.")
                    raise
        return Conditioning(*zip(*rows, strict=True))

    @torch.no_grad()
    @host_read("a first frame goes to the device, once per prompt")
    def encode_images(self, images: Sequence[Image.Image], size: tuple[int, int]) -> FirstFrames:
        """Encode first frames of videos of `size` (height, width)."""
        cropped = [crop_to_size(image, size) for image in images]
        with self.encoders_at_work():
            states = []
            for image in cropped:
                pixels = self.feature_extractor(images=image, return_tensors="pt")["pixel_values"]
                pixels = pixels.to(self._execution_device, self.image_encoder.dtype)
                states.append(self.image_encoder(pixel_values=pixels).last_hidden_state[0].float())
        return FirstFrames(torch.stack(states), torch.stack([self._encode_frame(image) for image in cropped]))

    @property
    def task(self) -> str:
        """What the transformer is made for: `t2v` or `i2v`."""
        return self.transformer.config.task_type

    def denoise_step(
        self,
        latents: Tensor,
        index: int | Tensor,
        conditioning: Conditioning,
        guidance: Guidance,
        *,
        sde_type: str,
        eta: float,
        noisy: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return mean `[B, C, F', H', W']` and std (broadcastable to it), float32, of the next latents.

        `latents` are `[B, C, F', H', W']` float32, `conditioning` has B rows, and `index` is the denoising step, one
        for all or a LongTensor `[B]`. `sde_type` is `sage_grpo`, `dance_grpo`, `flow_grpo` or `cps`, with noise level
        `eta`, or `ode` for the deterministic step. The rows `noisy`, `[B]` bool, draw noise, the others follow the ODE;
        None: all do.
        """
        velocity = self.velocity(latents, index, conditioning, guidance)
        return self.scheduler.transition(velocity, latents, index, sde_type=sde_type, eta=eta, noisy=noisy)

    def velocity(self, latents: Tensor, index: int | Tensor, conditioning: Conditioning, guidance: Guidance) -> Tensor:
        """Return the guided velocity `[B, C, F', H', W']`, float32; one transformer call, guidance doubles its rows."""
        times = self.scheduler.times(latents.device)[:, index].reshape(2, -1).expand(2, len(latents))
        guided = guidance.scale != 1.0
        if guided:
            conditioning = conditioning.with_negative(guidance.negative)
            latents, times = torch.cat([latents, latents]), torch.cat([times, times], dim=1)
        timestep, following = times
        condition = self._condition_channels(latents, conditioning.images)
        with torch.autocast(latents.device.type, self.autocast_dtype, enabled=self.autocast_dtype != torch.float32):
            velocity = self.transformer(
                hidden_states=torch.cat([latents, condition], dim=1),
                timestep=timestep,
                timestep_r=following if self.transformer.config.use_meanflow else None,  # of step-distilled models
                encoder_hidden_states=conditioning.text,
                encoder_hidden_states_2=conditioning.glyph,
                image_embeds=conditioning.images.states if conditioning.images else None,
                return_dict=False,
            )[0].float()
        if not guided:
            return velocity
        prompted, negative = velocity.chunk(2)
        return negative + guidance.scale * (prompted - negative)

    def _condition_channels(self, latents: Tensor, images: FirstFrames | None) -> Tensor:
        """Return the channels beside the latents, refusing an image that the transformer is not made for."""
        if (images is None) == (self.task == "i2v"):
            received = "no image" if images is None else "an image"
            raise ValueError(f"The transformer is made for {self.task}; received conditioning with {received}.")
        return first_frame_channels(latents, images)

    @torch.no_grad()
    def rollout(
        self,
        conditioning: Conditioning,
        noise: SampleNoise,
        guidance: Guidance,
        *,
        num_frames: int,
        size: tuple[int, int],
        sde_type: str,
        eta: float,
        noisy: Tensor | None = None,
        only_last: bool = False,
        decode: bool = True,
        learner: Learner | None = None,
        on_step: Callable[[int], None] = lambda index: None,
    ) -> Rollout:
        """Sample one video per row of `conditioning`, of which there are B, over the steps set on the scheduler.

        A video has 4 n + 1 frames of `size` (height, width) in pixels; `sde_type` and `eta` are as in `denoise_step`.
        At the steps `noisy`, `[B, K]` bool, a video draws noise; elsewhere it follows the ODE, with log-probability 0
        (None: all steps). With `only_last` the videos and the last latents are kept, not what a replay needs. `learner`
        learns from the steps that it trains. `on_step` is called with the index of every finished step.
        """
        shape = self.latent_shape(num_frames, size)
        latents, means, log_probs = [noise.initial(shape, conditioning.text[0].device)], [], []
        step = partial(self.denoise_step, guidance=guidance, sde_type=sde_type, eta=eta)
        noisy_there = None if noisy is None else upload(noisy, latents[0].device)
        for index in range(len(self.scheduler.timesteps)):
            drawn = None if noisy is None else noisy_there[:, index]
            trains = learner is not None and learner.trains(index)
            with torch.set_grad_enabled(trains):
                mean, std = step(latents[-1], index, conditioning, noisy=drawn)
            with_gradient, mean = mean, mean.detach()
            following = mean
            if sde_type != "ode" and (noisy is None or noisy[:, index].any()):
                following = self.scheduler.sample_next(mean, std, noise.step(index, shape, mean.device))
            if trains:
                with torch.enable_grad():
                    learner.learn(index, with_gradient, std, following)
            del with_gradient  # and all that it keeps for a backward pass
            if only_last:
                latents = [following]
            else:
                latents.append(following)
                means.append(mean)
                log_probs.append(self.scheduler.log_prob(following, mean, std, sde_type=sde_type))
            on_step(index)
        videos, kept = self.decode(latents[-1]) if decode else None, torch.stack(latents, 1)
        if only_last:
            return Rollout(videos, kept)
        return Rollout(videos, kept, torch.stack(means, 1), torch.stack(log_probs, 1))

    def latent_shape(self, num_frames: int, size: tuple[int, int]) -> tuple[int, int, int, int]:
        """Return `(C, F', H', W')` of the latents of a video; a ValueError if the VAE has none for its sizes."""
        temporal, spatial = self.vae_scale_factor_temporal, self.vae_scale_factor_spatial
        check_video_shape(num_frames, size, temporal=temporal, spatial=spatial)
        frames = (num_frames - 1) // temporal + 1
        return (self.num_channels_latents, frames, *(side // spatial for side in size))

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents `[B, C, F', H', W']` to videos `[B, F, H, W, 3]`, uint8 on the CPU.

        Large videos are decoded one by one and in tiles, as in the original; small ones together.
        """
        scaled = latents.to(self.vae.dtype) / self.vae.config.scaling_factor + self._latent_shift
        self.vae.enable_tiling()
        videos = []
        for part in scaled.split(decoded_together(scaled.shape)):
            pixels = (self.vae.decode(part, return_dict=False)[0].float().clamp(-1, 1) + 1) * 127.5
            pixels = rearrange(pixels.round().to(torch.uint8), "b c f h w -> b f h w c").contiguous()
            with host_read("videos go to the host, where rewards read them"):
                videos.append(pixels.cpu())
        self.vae.disable_tiling()
        return torch.cat(videos)

    def _encode_text(self, prompt: str, device: torch.device) -> Tensor:
        """Return the language model's states `[S, D]` of one prompt, third from the last layer, system turn cropped."""
        crop = self.system_turn_length()
        tokens = self.tokenizer.apply_chat_template(
            format_text_input([prompt], self.system_message),
            add_generation_prompt=True,
            return_dict=True,
            truncation=True,
            max_length=crop + self.tokenizer_max_length,
            return_tensors="pt",
        )
        tokens = {name: upload(values, device) for name, values in tokens.items()}
        states = self.text_encoder(**tokens, output_hidden_states=True, use_cache=False).hidden_states[-3]
        return states[0, crop:].float()

    def _encode_glyphs(self, prompt: str, device: torch.device) -> Tensor:
        """Return ByT5 states `[S_g, D_g]` of the texts quoted in one prompt; no rows when it quotes none."""
        glyphs = extract_glyph_texts(prompt)
        encoder = self.text_encoder_2
        if glyphs is None:
            return torch.zeros(0, encoder.config.d_model, device=device)
        tokens = self.tokenizer_2(glyphs, truncation=True, max_length=self.tokenizer_2_max_length, return_tensors="pt")
        tokens = {name: upload(values, device) for name, values in tokens.items()}
        return encoder(**tokens)[0][0].float()

    def _encode_frame(self, image: Image.Image) -> Tensor:
        """Return the scaled latents `[C, H', W']` of one image, the mode of the VAE's posterior."""
        pixels = rearrange(torch.from_numpy(np.array(image)), "h w c -> 1 c 1 h w") / 127.5 - 1
        pixels = pixels.to(self._execution_device, self.vae.dtype)
        mode = self.vae.encode(pixels).latent_dist.mode()[0, :, 0].float()
        return (mode - self._latent_shift) * self.vae.config.scaling_factor

    @property
    def _latent_shift(self) -> float:
        return self.vae.config.get("shift_factor") or 0.0

    def system_turn_length(self) -> int:
        """Return the number of tokens up to the user's text (108 with the real tokenizer), by tokenizing them."""
        text = self.tokenizer.apply_chat_template(format_text_input([""], self.system_message)[0], tokenize=False)
        opening = "<|im_start|>user\n"
        prefix = text[: text.rindex(opening) + len(opening)]
        return len(self.tokenizer(prefix, add_special_tokens=False).input_ids)


def first_frame_channels(latents: Tensor, images: FirstFrames | None) -> Tensor:
    """Return `[B, C + 1, F', H', W']`: the first frame's latents and a mask that is 1 there; else all zero."""
    channels = latents.shape[1]
    condition = latents.new_zeros(latents.shape[0], channels + 1, *latents.shape[2:])
    if images is not None:
        condition[:, :channels, 0] = images.latents
        condition[:, channels, 0] = 1
    return condition


def check_task(prompts: Sequence[Prompt], task: str) -> None:
    """Raise a ValueError unless no prompt has an image for a model of `task` t2v, and every one has for i2v."""
    wrong = [prompt for prompt in prompts if (prompt.ref_image_path is None) == (task == "i2v")]
    if wrong:
        model, have = ("An image", "without") if task == "i2v" else ("A text", "with")
        raise ValueError(
            f"{model}-to-video model was given {len(wrong)} of {len(prompts)} prompts {have} an image (CSV column "
            f"ref_image_path, or --image_path), the first being index {wrong[0].index}: {wrong[0].text[:60]!r}."
        )


def check_video_shape(num_frames: int, size: tuple[int, int], *, temporal: int, spatial: int) -> None:
    """Refuse, by a ValueError, all but `temporal` n + 1 frames with sides that are multiples of `spatial` pixels."""
    fewer = max(num_frames - 1, 0) // temporal * temporal + 1
    height, width = (max(1, round(side / spatial)) * spatial for side in size)
    if num_frames != fewer or (height, width) != tuple(size):
        frames = fewer if num_frames == fewer else f"{fewer} or {fewer + temporal}"
        raise ValueError(
            f"A video must have {temporal} n + 1 frames, and sides that are multiples of {spatial} pixels; received "
            f"{num_frames} frames of {size[0]}x{size[1]}: take {frames} frames of {height}x{width}."
        )


def crop_to_size(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Scale `image` until it covers `size` (height, width) and crop its centre."""
    height, width = size
    scale = max(width / image.width, height / image.height)
    scaled = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
    left, top = round((scaled.width - width) / 2), round((scaled.height - height) / 2)
    return scaled.crop((left, top, left + width, top + height))
