"""HunyuanVideo-1.5 for GRPO: encode once, one denoising step for all callers, rollouts that can be replayed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from diffusers import HunyuanVideo15Pipeline
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts, format_text_input
from torch import Tensor

from hyvideo.pipelines.conditioning import Conditioning
from hyvideo.pipelines.noise import SampleNoise
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler

DECODE_CELLS = 4096
"""Latent positions (frames x height x width) decoded at once: one 480p video has 34,000, a tiny one 320."""


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance: `v = v_negative + scale (v_prompt - v_negative)`.

    Attributes:
        scale: guidance scale; 1 means no guidance, and one transformer row per sample instead of two.
        negative: one row; needed when `scale` is not 1.
    """

    scale: float = 1.0
    negative: Conditioning | None = None

    def __post_init__(self) -> None:
        """Check that guidance has something to guide away from."""
        if self.scale != 1.0 and self.negative is None:
            raise ValueError(f"Guidance with scale {self.scale} needs a negative conditioning; received None.")


@dataclass(frozen=True)
class Rollout:
    """What sampling B videos in K steps leaves behind.

    Attributes:
        videos: `[B, F, H, W, 3]` uint8 on the CPU.
        latents: `[B, K + 1, C, F', H', W']` float32; `latents[:, 0]` is pure noise. These exact tensors are replayed.
        means: `[B, K, C, F', H', W']` float32, mean of every transition.
        log_probs: `[B, K]` float32, log-probability of every transition (mean over latent dims).
    """

    videos: Tensor
    latents: Tensor
    means: Tensor
    log_probs: Tensor


class HunyuanVideoGRPOPipeline(HunyuanVideo15Pipeline):
    """The diffusers HunyuanVideo-1.5 pipeline with the three things GRPO needs of it.

    `encode` turns prompts into a `Conditioning`; `denoise_step` is the one transition that rollout, anchor pass and
    update all call, therefore replay equals rollout; `rollout` and `sample` return videos. The components are those of
    the parent class, except that `scheduler` is a `FlowMatchDiscreteScheduler`.
    """

    scheduler: FlowMatchDiscreteScheduler
    autocast_dtype: torch.dtype = torch.float32  # dtype of transformer matrix products; weights keep their own

    def with_scheduler(self, scheduler: FlowMatchDiscreteScheduler) -> "HunyuanVideoGRPOPipeline":
        """Return a pipeline over the same components that follows another scheduler."""
        other = type(self)(**{**self.components, "scheduler": scheduler})
        other.autocast_dtype = self.autocast_dtype
        return other

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], *, glyphs: bool = True) -> Conditioning:
        """Encode `prompts`, one row each.

        Every prompt is encoded alone and without padding: what it becomes does not depend on its neighbours.

        Args:
            prompts: the texts; an empty one is encoded as a blank, as the model was trained.
            glyphs: encode quoted texts with ByT5. The original model never does for the negative prompt.
        """
        rows = [(self._encode_text(prompt), self._encode_glyphs(prompt if glyphs else "")) for prompt in prompts]
        text, glyph = zip(*rows, strict=True)
        return Conditioning.from_rows(text, glyph)

    def denoise_step(
        self,
        latents: Tensor,
        index: int | Tensor,
        conditioning: Conditioning,
        guidance: Guidance,
        *,
        sde_type: str,
        eta: float,
    ) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the transition from `latents` at step `index`.

        Args:
            latents: `[B, C, F', H', W']` float32.
            index: denoising step, one for all or a LongTensor `[B]`.
            conditioning: B rows.
            guidance: scale and negative conditioning.
            sde_type: `sage_grpo`, `dance_grpo`, `flow_grpo`, `cps`, or `ode` for the deterministic step.
            eta: noise level of the SDE.

        Returns:
            mean `[B, C, F', H', W']` and std (broadcastable to it), float32.
        """
        velocity = self.velocity(latents, index, conditioning, guidance)
        return self.scheduler.transition(velocity, latents, index, sde_type=sde_type, eta=eta)

    def velocity(self, latents: Tensor, index: int | Tensor, conditioning: Conditioning, guidance: Guidance) -> Tensor:
        """Return the guided velocity `[B, C, F', H', W']`, float32; one transformer call, guidance doubles its rows."""
        batch = latents.shape[0]
        timestep = self.scheduler.timesteps[index].to(latents.device).expand(batch)
        guided = guidance.scale != 1.0
        if guided:
            conditioning = conditioning.joined(guidance.negative.rows([0] * batch))
            latents, timestep = torch.cat([latents, latents]), torch.cat([timestep, timestep])
        condition = latents.new_zeros(latents.shape[0], latents.shape[1] + 1, *latents.shape[2:])  # text to video
        image = latents.new_zeros(latents.shape[0], 0, self.vision_states_dim)
        with torch.autocast(latents.device.type, self.autocast_dtype, enabled=self.autocast_dtype != torch.float32):
            velocity = self.transformer(
                hidden_states=torch.cat([latents, condition], dim=1),
                timestep=timestep,
                encoder_hidden_states=conditioning.text,
                encoder_attention_mask=conditioning.text_mask,
                encoder_hidden_states_2=conditioning.glyph,
                encoder_attention_mask_2=conditioning.glyph_mask,
                image_embeds=image,
                return_dict=False,
            )[0].float()
        if not guided:
            return velocity
        prompted, negative = velocity.chunk(2)
        return negative + guidance.scale * (prompted - negative)

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
        on_step: Callable[[int], None] = lambda index: None,
    ) -> Rollout:
        """Sample one video per row of `conditioning` with the SDE over the steps set on the scheduler.

        Args:
            conditioning: B rows.
            noise: B samples.
            guidance: scale and negative conditioning.
            num_frames: frames of the video, 4 n + 1.
            size: height and width in pixels.
            sde_type: see `denoise_step`.
            eta: see `denoise_step`.
            on_step: called with the index of every finished step.
        """
        shape = self.latent_shape(num_frames, size)
        latents, means, log_probs = [noise.initial(shape).to(self.device)], [], []
        for index in range(len(self.scheduler.timesteps)):
            mean, std = self.denoise_step(latents[-1], index, conditioning, guidance, sde_type=sde_type, eta=eta)
            latents.append(self.scheduler.sample_next(mean, std, noise.step(index, shape).to(mean.device)))
            means.append(mean)
            log_probs.append(self.scheduler.log_prob(latents[-1], mean, std, sde_type=sde_type))
            on_step(index)
        videos = self.decode(latents[-1])
        return Rollout(videos, torch.stack(latents, 1), torch.stack(means, 1), torch.stack(log_probs, 1))

    @torch.no_grad()
    def sample(
        self,
        conditioning: Conditioning,
        noise: SampleNoise,
        guidance: Guidance,
        *,
        num_frames: int,
        size: tuple[int, int],
        on_step: Callable[[int], None] = lambda index: None,
    ) -> Tensor:
        """Sample one video per row of `conditioning` with the deterministic ODE; arguments as in `rollout`.

        Returns:
            videos `[B, F, H, W, 3]` uint8 on the CPU.
        """
        latents = noise.initial(self.latent_shape(num_frames, size)).to(self.device)
        for index in range(len(self.scheduler.timesteps)):
            latents, _ = self.denoise_step(latents, index, conditioning, guidance, sde_type="ode", eta=0.0)
            on_step(index)
        return self.decode(latents)

    def latent_shape(self, num_frames: int, size: tuple[int, int]) -> tuple[int, int, int, int]:
        """Return `(C, F', H', W')` of the latents of a video of `num_frames` frames of `size` (height, width).

        Raises:
            ValueError: the VAE has no latents for such a video.
        """
        temporal, spatial = self.vae_scale_factor_temporal, self.vae_scale_factor_spatial
        if num_frames < 1 or (num_frames - 1) % temporal or any(side < spatial or side % spatial for side in size):
            raise ValueError(
                f"A video must have {temporal} n + 1 frames, and sides that are multiples of {spatial} pixels; "
                f"received {num_frames} frames of {size[0]}x{size[1]}."
            )
        frames = (num_frames - 1) // temporal + 1
        return (self.num_channels_latents, frames, *(side // spatial for side in size))

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents `[B, C, F', H', W']` to videos `[B, F, H, W, 3]`, uint8 on the CPU.

        Large videos are decoded one by one, small ones together, up to `DECODE_CELLS` latent positions at a time.
        """
        scaled = latents.to(self.vae.dtype) / self.vae.config.scaling_factor
        videos = []
        for part in scaled.split(max(1, DECODE_CELLS // math.prod(scaled.shape[2:]))):
            pixels = (self.vae.decode(part, return_dict=False)[0].float().clamp(-1, 1) + 1) * 127.5
            videos.append(pixels.round().to(torch.uint8).permute(0, 2, 3, 4, 1).contiguous().cpu())
        return torch.cat(videos)

    def _encode_text(self, prompt: str) -> Tensor:
        """Return the language model's states `[S, D]` of one prompt, third from the last layer, system turn cropped."""
        crop = self._system_turn_length()
        tokens = self.tokenizer.apply_chat_template(
            format_text_input([prompt], self.system_message),
            add_generation_prompt=True,
            return_dict=True,
            truncation=True,
            max_length=crop + self.tokenizer_max_length,
            return_tensors="pt",
        ).to(self.text_encoder.device)
        states = self.text_encoder(**tokens, output_hidden_states=True).hidden_states[-3]
        return states[0, crop:].float()

    def _encode_glyphs(self, prompt: str) -> Tensor:
        """Return ByT5 states `[S_g, D_g]` of the texts quoted in one prompt; no rows when it quotes none."""
        glyphs = extract_glyph_texts(prompt)
        encoder = self.text_encoder_2
        if glyphs is None:
            return torch.zeros(0, encoder.config.d_model, device=encoder.device)
        tokens = self.tokenizer_2(
            glyphs, truncation=True, max_length=self.tokenizer_2_max_length, return_tensors="pt"
        ).to(encoder.device)
        return encoder(**tokens)[0][0].float()

    def _system_turn_length(self) -> int:
        """Return the number of tokens up to the user's text (108 with the real tokenizer), by tokenizing them."""
        text = self.tokenizer.apply_chat_template(format_text_input([""], self.system_message)[0], tokenize=False)
        opening = "<|im_start|>user\n"
        prefix = text[: text.rindex(opening) + len(opening)]
        return len(self.tokenizer(prefix, add_special_tokens=False).input_ids)
