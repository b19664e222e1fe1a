"""perf/*: how much of the hardware a run uses, and how many videos it makes per hour."""

from collections import deque
from collections.abc import Mapping

import torch

from hyvideo.config.schema import Config
from hyvideo.distributed.mesh import Mesh
from hyvideo.grpo.timesteps import Pairs
from hyvideo.models.flops import PassFlops, transformer_flops, video_tokens
from hyvideo.pipelines.conditioning import Conditioning
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Guidance, HunyuanVideoGRPOPipeline
from hyvideo.training.trajectory import Trajectory


class Performance:
    """Turns the seconds of the phases into model FLOPs utilisation (MFU) and videos per GPU and hour.

    It counts the transformer's matrix products that the method needs, for valid tokens only: forward passes of the
    rollout, three times as much for a trained pair (less the weights' gradients under an adapter). Recomputed
    activations, text encoders and VAE do not count, while the phases' seconds include everything. The numbers are this
    rank's.

    Args:
        pipeline: holds the policy.
        guidance: as in the rollout.
        config: the run's configuration.
        mesh: the ranks.
        peak_tflops: 10^12 operations per second of one device.
    """

    def __init__(
        self,
        pipeline: HunyuanVideoGRPOPipeline,
        guidance: Guidance,
        config: Config,
        mesh: Mesh,
        peak_tflops: float,
    ) -> None:
        self._pipeline = pipeline
        self._guidance = guidance
        self._adapter = config.model.use_lora
        self._mesh = mesh
        self._peak = peak_tflops * 1e12
        self._num_steps = config.rollout.grpo_sampling_steps
        self._seconds: deque[float] = deque(maxlen=config.grpo.updates_per_rollout)
        self._mfu_rollout = 0.0

    def row(self, trajectory: Trajectory, pairs: Pairs, times: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of one update.

        Args:
            trajectory: of the round.
            pairs: those the update trained.
            times: seconds by phase since the last row (`PhaseTimer.pop`); the rollout lies in the round's first row.

        Returns:
            `perf/mfu_rollout` of the round, `perf/mfu_update`, and `perf/videos_per_gpu_hour` over this row and those
            before it, as many as a round has: sampled, scored and trained, without validation and checkpoints.
        """
        per_sample = self._flops(trajectory)
        if times["time/rollout"]:
            sampled = self._num_steps * sum(flops.total for flops in per_sample)
            self._mfu_rollout = sampled / times["time/rollout"] / self._peak
        trained = sum(
            flops.model - (flops.linear if self._adapter else 0)
            for flops in (per_sample[sample] for sample in pairs.sample_index.tolist())
        )
        self._seconds.append(sum(times.values()))
        num_videos = len(trajectory) * self._mesh.dp_size
        return {
            "perf/mfu_rollout": self._mfu_rollout,
            "perf/mfu_update": trained / times["time/update"] / self._peak,
            "perf/videos_per_gpu_hour": 3600 * num_videos / sum(self._seconds) / self._mesh.world_size,
        }

    def _flops(self, trajectory: Trajectory) -> list[PassFlops]:
        """Count one evaluation of every sample, both rows of guidance."""
        config = self._pipeline.transformer.config
        images = trajectory.conditioning.images
        sizes = {
            "num_video": video_tokens(config, trajectory.rollout.latents.shape),
            "num_vision": 0 if images is None else images.states.shape[1],
            "sp_size": self._mesh.sp_size,
        }

        def passes(conditioning: Conditioning) -> list[PassFlops]:
            """One per row."""
            lengths = torch.stack([conditioning.text_mask.sum(1), conditioning.glyph_mask.sum(1)], 1).tolist()
            return [transformer_flops(config, num_text=text, num_glyph=glyph, **sizes) for text, glyph in lengths]

        prompted = passes(trajectory.conditioning)
        if self._guidance.scale != 1.0:
            (negative,) = passes(self._guidance.negative)
            prompted = [PassFlops(own.linear + negative.linear, own.attention + negative.attention) for own in prompted]
        return [prompted[row] for row in trajectory.conditioning_rows]
