"""perf/*: how much of the hardware a run uses, and how many videos it makes per hour."""

from collections import deque
from collections.abc import Mapping

from hyvideo.algorithms.algorithm import Trajectory, algorithm_class
from hyvideo.algorithms.policy import Policy
from hyvideo.config.schema import Config
from hyvideo.distributed.mesh import Mesh
from hyvideo.models.flops import PassFlops, transformer_flops, video_tokens
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Conditioning


class Performance:
    """Turns the seconds of the phases into model FLOPs utilisation (MFU) and videos per GPU and hour.

    It counts the transformer's matrix products that the method needs, for valid tokens only: forward passes of the
    rollout, three times as much for a trained pair (less the weights' gradients under an adapter). Recomputed
    activations, text encoders and VAE do not count, while the phases' seconds include everything. The numbers are this
    rank's. `peak_tflops` is one device's, in 10^12 operations per second.
    """

    def __init__(
        self, policy: Policy, config: Config, mesh: Mesh, *, peak_tflops: float, updates_per_round: int
    ) -> None:
        self._policy = policy
        self._adapter = config.model.use_lora
        self._mesh = mesh
        self._peak = peak_tflops * 1e12
        self._per_video = algorithm_class(config.grpo.algorithm).evaluations(config).rollout
        self._seconds: deque[float] = deque(maxlen=updates_per_round)
        self._mfu_rollout = 0.0

    def row(self, trajectory: Trajectory, evaluations: float, times: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of one update.

        The update made so many `evaluations`: passes with gradient, each of one video at one step. `times` are seconds
        by phase since the last row (`PhaseTimer.pop`); the rollout lies in the round's first row. `perf/mfu_rollout` is
        the round's; `perf/videos_per_gpu_hour` is over this row and those before it, as many as a round has: sampled,
        scored and trained, without validation and checkpoints.
        """
        config, guidance = self._policy.transformer.config, self._policy.guidance
        images = trajectory.conditioning.images
        sizes = {
            "num_video": video_tokens(config, trajectory.rollout.latents.shape),
            "num_vision": 0 if images is None else images.states.shape[1],
            "sp_size": self._mesh.token_ranks,
        }

        def passes(conditioning: Conditioning) -> list[PassFlops]:
            return [
                transformer_flops(config, num_text=len(text), num_glyph=len(glyph), **sizes)
                for text, glyph in zip(conditioning.text, conditioning.glyph, strict=True)
            ]

        prompted = passes(trajectory.conditioning)  # this rank's part of an evaluation of every prompt
        if guidance.scale != 1.0:
            (negative,) = passes(guidance.negative)
            split = self._mesh.guidance_ranks  # then this rank computes one row: their mean stands for it
            prompted = [
                PassFlops((own.linear + negative.linear) // split, (own.attention + negative.attention) // split)
                for own in prompted
            ]
        per_video = [prompted[row] for row in trajectory.conditioning_rows]
        if times["time/rollout"]:
            sampled = self._per_video * sum(flops.total for flops in per_video)
            self._mfu_rollout = sampled / times["time/rollout"] / self._peak
        trained = sum(flops.model - (flops.linear if self._adapter else 0) for flops in per_video) / len(per_video)
        self._seconds.append(sum(times.values()))
        num_videos = len(trajectory) * self._mesh.dp_size
        return {
            "perf/mfu_rollout": self._mfu_rollout,
            "perf/mfu_update": evaluations * trained / max(times["time/update"], 1e-9) / self._peak,
            "perf/videos_per_gpu_hour": 3600 * num_videos / sum(self._seconds) / self._mesh.world_size,
        }
