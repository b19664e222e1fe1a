"""The policy: the network that is trained, bound once to its guidance, its sampler and the shape of its videos."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor

from hyvideo.config.schema import RolloutConfig
from hyvideo.data.prompts import Prompt
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import (
    Conditioning,
    Guidance,
    HunyuanVideoGRPOPipeline,
    Learner,
    Rollout,
    SampleNoise,
)
from hyvideo.pipelines.sampling import sample_prompts
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler


@dataclass(frozen=True)
class Policy:
    """Samples videos and says how likely each denoising step was; during a run nobody else uses the scheduler.

    Shapes: B videos, K denoising steps, latents `[C, F', H', W']` per video.

    Attributes:
        pipeline: transformer, encoders and VAE, with the scheduler's K steps set.
        guidance: classifier-free guidance of every evaluation.
        sde_type: the sampler of rollouts, a key of `SDE_TYPES`.
        eta: its noise level.
        num_frames: frames per video, 4 n + 1.
        size: height and width in pixels.
        videos_at_once: videos that are denoised together in a rollout; 0 for all.
        encoded: prompts that encoders have read at their last visit, if they rest in host memory.
    """

    pipeline: HunyuanVideoGRPOPipeline
    guidance: Guidance
    sde_type: str
    eta: float
    num_frames: int
    size: tuple[int, int]
    videos_at_once: int = 0
    encoded: dict[Prompt, Conditioning] = field(default_factory=dict, compare=False, repr=False)

    @property
    def transformer(self) -> HunyuanVideo15Transformer3DModel:
        """The network that is trained."""
        return self.pipeline.transformer

    def with_schedule(
        self, scheduler: FlowMatchDiscreteScheduler, *, num_frames: int, size: tuple[int, int]
    ) -> "Policy":
        """Return the same network following another schedule, for videos of another shape: the validation's."""
        pipeline = self.pipeline.with_scheduler(scheduler)
        return replace(self, pipeline=pipeline, num_frames=num_frames, size=size, encoded={})

    def encode(self, prompts: Sequence[Prompt], coming: Iterable[Prompt] = ()) -> Conditioning:
        """Encode texts and first frames, one row per prompt.

        When encoders that rest in host memory visit the device, they also read the prompts that are `coming`, so that
        they need not visit it again for these.
        """
        if not self.pipeline.encoder_offload:
            return self.pipeline.encode_prompts(prompts, self.size)
        if not self.encoded.keys() >= set(prompts):
            self.encoded.clear()
            with self.pipeline.encoders_at_work():
                for prompt in dict.fromkeys(chain(prompts, coming)):
                    self.encoded[prompt] = self.pipeline.encode_prompts([prompt], self.size)
        return Conditioning.join([self.encoded[prompt] for prompt in prompts])

    def rollout(
        self,
        conditioning: Conditioning,
        noise: SampleNoise,
        noisy: Tensor | None = None,
        *,
        decode: bool = True,
        learner: Learner | None = None,
    ) -> Rollout:
        """Sample one video per row of `conditioning` with the SDE, and keep what a replay needs.

        `noisy` `[B, K]` bool are the steps at which each video draws noise; elsewhere it follows the ODE. None: all.
        `learner` learns from the steps while they are made.
        """
        how = {"sde_type": self.sde_type, "eta": self.eta, "noisy": noisy, "learner": learner}
        return self._roll_out(conditioning, noise, decode=decode, **how)

    def final_latents(self, conditioning: Conditioning, noise: SampleNoise, *, decode: bool = True) -> Rollout:
        """Sample one video per row of `conditioning` with the ODE, and keep only its last latents."""
        return self._roll_out(conditioning, noise, sde_type="ode", eta=0.0, only_last=True, decode=decode)

    def _roll_out(self, conditioning: Conditioning, noise: SampleNoise, **how: Any) -> Rollout:
        shape = {"num_frames": self.num_frames, "size": self.size}
        return self.pipeline.rollout(conditioning, noise, self.guidance, **shape, **how)

    def sample(self, prompts: Sequence[Prompt], *, seed: int, videos_at_once: int) -> Tensor:
        """Sample one video per prompt with the deterministic ODE: `[N, F, H, W, 3]` uint8 on the CPU."""
        how = {"num_frames": self.num_frames, "size": self.size, "seed": seed, "batch_size": videos_at_once}
        return sample_prompts(self.pipeline, prompts, self.guidance, **how)

    def step(self, latents: Tensor, index: int | Tensor, conditioning: Conditioning) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the transition from `latents` `[B, ...]` at step `index` (or `[B]`).

        Rollout, replay and the anchor's pass all make this step, so that a replay gives what the rollout recorded.
        """
        return self.pipeline.denoise_step(
            latents, index, conditioning, self.guidance, sde_type=self.sde_type, eta=self.eta
        )

    def velocity(self, latents: Tensor, index: int | Tensor, conditioning: Conditioning) -> Tensor:
        """Return the guided velocity `[B, ...]` at step `index` (or `[B]`), float32."""
        return self.pipeline.velocity(latents, index, conditioning, self.guidance)

    def sigmas(self) -> Tensor:
        """Noise levels of the schedule from 1 to 0, `[K + 1]`."""
        return self.pipeline.scheduler.sigmas

    def stochastic_steps(self) -> Tensor:
        """Which steps draw noise and can be trained, `[K]` bool."""
        return self.pipeline.scheduler.trained_steps(sde_type=self.sde_type, eta=self.eta)

    def gradient_norms(self, *, published: bool = False) -> Tensor:
        """Scale of the log-probability's gradient by the velocity at every step, `[K]` (paper Eq. 8, A.5)."""
        return self.pipeline.scheduler.gradient_norms(sde_type=self.sde_type, eta=self.eta, published=published)

    def sensitivity(self) -> Tensor:
        """`d mean / d v` of every step, `[K]`."""
        return self.pipeline.scheduler.step_weights(sde_type=self.sde_type, eta=self.eta).velocity


def rollout_scheduler(rollout: RolloutConfig) -> FlowMatchDiscreteScheduler:
    """Return the scheduler of the rollout, its steps set."""
    scheduler = FlowMatchDiscreteScheduler(shift=rollout.infer_flow_shift_video, sage_clamp=rollout.sage_clamp)
    scheduler.set_timesteps(rollout.grpo_sampling_steps)
    return scheduler
