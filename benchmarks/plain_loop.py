"""The loop that published GRPO code for video models runs, written plainly: the baseline of `benchmarks.grpo_step`.

As their descriptions have it: each sample is encoded by itself and padded to the longest prompt there may be, and
sampled by itself; after the last each is scored by itself, through an mp4 file if the reward reads files; the update
goes through samples and steps one by one, and asks a second copy of the network, the reference, at each of them. The
method's formulas are this project's, so that both make the same update; only how often the networks are called, and on
what, differs.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import HunyuanVideo15Pipeline
from torch import Tensor, nn
from torch.optim import AdamW

from hyvideo.algorithms.optimizer import set_learning_rate
from hyvideo.config.settings import parse_size
from hyvideo.grpo.advantages import group_advantages
from hyvideo.grpo.clipped_loss import clipped_policy_loss
from hyvideo.grpo.trust_region import dual_kl, position_kl, velocity_kl
from hyvideo.models.attention import install_attention
from hyvideo.models.parallelize import prepare_policy, trainable_parameters
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import SampleNoise
from hyvideo.training.collect import collect
from hyvideo.training.run import Run

Conditions = dict[str, Tensor]


@dataclass(frozen=True)
class Sample:
    """One sampled video: its conditions, latents `[K + 1, ...]` and log-probabilities `[K]`."""

    conditions: Conditions
    latents: list[Tensor]
    log_probs: list[Tensor]


class PlainLoop:
    """Makes the updates of a training in the plain way, from the same weights, prompts and noise.

    Args:
        root: model folder in the diffusers layout.
        training: whose settings, prompts and reward it takes; it stays as it is.
        trimmed: with our attention instead of the stock one.
        decode: latents `[1, C, F', H', W']` to a video `[1, F, H, W, 3]`; None: the stock VAE.
    """

    def __init__(
        self, root: Path, training: Run, *, trimmed: bool, decode: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        ours = training.policy.pipeline
        self.config, self.training = training.config, training
        self.device, self.autocast_dtype, self.scheduler = ours.transformer.device, ours.autocast_dtype, ours.scheduler
        self.pipeline = HunyuanVideo15Pipeline.from_pretrained(root, torch_dtype=torch.float32).to(self.device)
        self.pipeline.prompt_template_encode_start_idx = ours.system_turn_length()
        self.decode = decode or self._decode
        self.policy = prepare_policy(self.pipeline.transformer, gradient_checkpointing=False)
        self.reference = copy.deepcopy(self.policy)
        if trimmed:
            install_attention(self.policy)
            install_attention(self.reference)
        self.parameters = list(trainable_parameters(self.policy).values())
        self.optimizer = AdamW(self.parameters, weight_decay=self.config.optimizer.weight_decay)
        self.sampler = copy.deepcopy(training.state.sampler)
        self.controller = copy.deepcopy(training.algorithm.controller)
        self.steps = 0

    def round(self) -> dict[str, float]:
        """Sample, score and update once; return the loss, the gradient's norm and the distance to the reference."""
        assignments = self.sampler.next_round()
        samples, videos = [], []
        for assignment in assignments:
            sample, video = self._sample(assignment.prompt_index, assignment.generation)
            samples.append(sample)
            videos.append(video)
        texts = [self.training.rounds.prompts[assignment.prompt_index].text for assignment in assignments]
        scores = [self.training.reward(video, [text]).total for video, text in zip(videos, texts, strict=True)]
        grpo = self.config.grpo
        advantages = group_advantages(torch.cat(scores), grpo.num_generations, grpo.adv_clip_max)
        return self._update(samples, advantages.to(self.device))

    @torch.no_grad()
    def _sample(self, prompt: int, generation: int) -> tuple[Sample, Tensor]:
        """Encode one prompt, denoise one video and decode it."""
        rollout = self.config.rollout
        conditions = self._encode(self.training.rounds.prompts[prompt].text)
        noise = SampleNoise([self.config.run.seed], "rollout", self.steps, [prompt], [generation])
        shape = self.training.policy.pipeline.latent_shape(rollout.sample_n_frames, parse_size(rollout.rollout_size))
        latents, log_probs = [noise.initial(shape).to(self.device)], []
        for index in range(rollout.grpo_sampling_steps):
            mean, std = self._transition(self.policy, latents[-1], index, conditions)
            latents.append(self.scheduler.sample_next(mean, std, noise.step(index, shape).to(self.device)))
            log_probs.append(self.scheduler.log_prob(latents[-1], mean, std, sde_type=rollout.sde_type))
        return Sample(conditions, latents, log_probs), self.decode(latents[-1])

    def _encode(self, text: str) -> Conditions:
        """Encode a prompt, and with guidance the negative one, as a call of the stock pipeline does."""
        texts = [text] if self.config.rollout.cfg_scale == 1.0 else [text, self.config.rollout.negative_prompt]
        rows = [self.pipeline.encode_prompt(each, device=self.device) for each in texts]
        names = ("hidden_states", "attention_mask", "hidden_states_2", "attention_mask_2")
        joined = (torch.cat(parts).float() for parts in zip(*rows, strict=True))
        return {f"encoder_{name}": tensor for name, tensor in zip(names, joined, strict=True)}

    def _transition(
        self, network: nn.Module, latents: Tensor, index: int, conditions: Conditions
    ) -> tuple[Tensor, Tensor]:
        """Evaluate the network at one step of one video."""
        rows, scale = len(conditions["encoder_hidden_states"]), self.config.rollout.cfg_scale
        channels = torch.cat([latents, torch.zeros_like(latents), torch.zeros_like(latents[:, :1])], dim=1)
        vision = self.pipeline.transformer.config.image_embed_dim
        with torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype != torch.float32):
            velocity = network(
                hidden_states=channels.expand(rows, -1, -1, -1, -1),
                timestep=self.scheduler.timesteps[index].to(self.device).expand(rows),
                image_embeds=latents.new_zeros(rows, self.pipeline.vision_num_semantic_tokens, vision),
                return_dict=False,
                **conditions,
            )[0].float()
        if rows == 2:
            velocity = velocity[1:] + scale * (velocity[:1] - velocity[1:])
        settings = self.config.rollout
        return self.scheduler.transition(velocity, latents, index, sde_type=settings.sde_type, eta=settings.eta)

    def _decode(self, latents: Tensor) -> Tensor:
        pixels = self.pipeline.vae.decode(latents / self.pipeline.vae.config.scaling_factor, return_dict=False)[0]
        return ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 4, 1).cpu()

    def _update(self, samples: list[Sample], advantages: Tensor) -> dict[str, float]:
        """Replay every step of every sample by itself, each with a reference pass, and step the optimizer."""
        coefficient = self.controller.coefficient
        num_pairs = len(samples) * self.config.rollout.grpo_sampling_steps
        total = position = 0.0
        for sample, advantage in zip(samples, advantages, strict=True):
            for index in range(self.config.rollout.grpo_sampling_steps):
                loss, distance, divergence = self._loss(sample, index, advantage[None])
                objective = (loss + coefficient * divergence) / num_pairs
                objective.backward()
                total, position = total + float(objective.detach()), position + float(distance.detach()) / num_pairs
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.optimizer.max_grad_norm)
        set_learning_rate([self.optimizer], self.config.optimizer, self.steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        kl = self.config.kl
        self.controller.update(dual_kl(torch.tensor(position), torch.tensor(0.0), kl.dual_kl_moving_weight, 0.0).item())
        return {"loss/total": total, "kl/position": position, "grad_norm": float(norm)}

    def _loss(self, sample: Sample, index: int, advantage: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return policy loss, position term and the weighted divergence of one pair."""
        kl, latents = self.config.kl, sample.latents[index]
        with torch.no_grad():
            anchor, _ = self._transition(self.reference, latents, index, sample.conditions)
        mean, std = self._transition(self.policy, latents, index, sample.conditions)
        log_prob = self.scheduler.log_prob(sample.latents[index + 1], mean, std, sde_type=self.config.rollout.sde_type)
        scale = self.training.algorithm.scales[index][None].to(log_prob)
        old = sample.log_probs[index]
        loss, _ = clipped_policy_loss(log_prob, old, advantage.to(log_prob), self.config.grpo.clip_range, scale)
        position = position_kl(mean, anchor, std)
        return (
            loss,
            position,
            # one update per round: the velocity term is 0, and its gradient, only noise, is left out as in ours
            dual_kl(position, velocity_kl(old, log_prob.detach()), kl.dual_kl_moving_weight, kl.dual_kl_step_weight),
        )


def make_round(run: Run) -> None:
    """Make one round as `Run.train` does, to be timed."""
    trajectory = collect(run.policy, run.algorithm, run.reward, run.rounds.next())
    run.begin_updates(trajectory)
    for metrics in run.algorithm.updates(trajectory):
        run.log(trajectory, metrics)
    run.end_round(trajectory)
