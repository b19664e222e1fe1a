"""A whole GRPO step of ours against the plain loop, with stock and with trimmed attention.

Once with the VAE and mp4 files for the reward, as in the recipes, on both sides, and once without either.

Example: `python -m benchmarks.grpo_step`
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from benchmarks.paired import Result, compare, print_results
from benchmarks.plain_loop import PlainLoop, make_round
from hyvideo.config.loading import load_config
from hyvideo.data.videos import read_video
from hyvideo.models.reward_models.registry import RewardModel, Videos, register_reward
from hyvideo.observability.metrics import read_metrics
from hyvideo.training.build import open_run
from hyvideo.training.run import Run

TINY = Path(__file__).parents[1] / "assets" / "tiny"
SIZES = {
    "tiny": [
        *["--grpo_sampling_steps", "4", "--batch_size", "4", "--num_generations", "2"],
        *["--rollout_micro_batch_size", "4", "--mini_batch_size_per_update", "4"],
    ],
    "mid": [
        *["--grpo_sampling_steps", "2", "--batch_size", "4", "--num_generations", "2", "--cfg_scale", "4"],
        *["--rollout_size", "96x96", "--rollout_micro_batch_size", "4", "--mini_batch_size_per_update", "4"],
    ],
}
"""tiny: the bundled model, 80 video tokens. mid: a random transformer of 720 tokens, with guidance."""

MID = {"num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 4, "patch_size": 1, "target_size": 96}
MID |= {"rope_axes_dim": (8, 12, 12)}
"""How the transformer of mid differs from the bundled one."""

SHARED = [
    *["--config", "configs/tiny.yaml", "--updates_per_rollout", "1", "--reward_model", "mean_of_frames"],
    *["--reward_weights", '{"mean": 1}', "--validation_interval", "0"],
    *["--update_ref_model_step", "1000", "--max_steps", "1000"],
]
"""The anchor is not refreshed, so every round but the first needs its pass: ours is shown at its slowest."""


@register_reward("mean_of_frames")
class MeanOfFrames(RewardModel):
    """The mean pixel: a score that costs nothing and is never equal for two videos."""

    metrics = ("mean",)
    reads = "file"

    def __call__(self, videos: Videos, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Score frames, or files once they are read."""
        if not isinstance(videos, Tensor):
            videos = torch.stack([read_video(path) for path in videos])
        return {"mean": videos.double().mean((1, 2, 3, 4)).float()}


def measure() -> list[Result]:
    """Compare both sizes with both baselines, with and without decoding."""
    disable_progress_bar()
    results = []
    for size, settings in SIZES.items():
        with model_folder(size) as root:
            for decoded in (True, False):
                for attention in ("stock", "trimmed"):
                    results.append(_compare(root, size, settings, decoded, attention))
    return results


def _compare(root: Path, size: str, settings: Sequence[str], decoded: bool, attention: str) -> Result:
    """Run ours and one baseline from the same weights; the first two rounds must agree."""
    with TemporaryDirectory() as folder:
        paths = ["--pretrained_model_root", str(root), "--output_dir", f"{folder}/run"]
        shown = ["--reward_io", "file" if decoded else "memory"]
        training = open_run(load_config([*SHARED, *settings, *paths, *shown]))
        if not decoded:
            training.policy.pipeline.decode = first_channels
        decode = None if decoded else first_channels
        plain = PlainLoop(root, training, trimmed=attention == "trimmed", decode=decode)
        error = largest_difference(training, plain)
        result = compare(
            f"grpo_step/{size}/{'decoded' if decoded else 'not_decoded'}/{attention}",
            f"plain loop with {attention} attention / ours",
            plain.round,
            lambda: make_round(training),
            pairs=3,
            facts={"relative_error": error},
        )
        training.journal.metrics.close()
        training.journal.console.close()
    return result


def largest_difference(training: Run, plain: PlainLoop) -> float:
    """Make two rounds both ways and return the largest difference of losses, gradient norms and distances.

    It is relative but for losses, which are sums of advantages of order 1 that cancel to 0 while the ratio is 1.
    """
    theirs = [plain.round() for _ in range(2)]
    for _ in range(2):
        make_round(training)
    ours = read_metrics(training.folder.path / "metrics.jsonl")
    differences = [abs(there["loss/total"] - here["loss/total"]) for there, here in zip(theirs, ours, strict=True)]
    for name in ("grad_norm", "kl/position"):
        for there, here in zip(theirs, ours, strict=True):
            if there[name] != here[name]:
                differences.append(abs(there[name] - here[name]) / max(there[name], here[name]))
    return max(differences)


def first_channels(latents: Tensor) -> Tensor:
    """Stand in for the VAE: three channels of the latents `[B, C, F, H, W]` as a video `[B, F, H, W, 3]`.

    They stay float32: rounded to 256 levels, a pixel at the edge would make of a last bit a visible difference.
    """
    return latents[:, :3].permute(0, 2, 3, 4, 1).cpu()


@contextmanager
def model_folder(size: str) -> Iterator[Path]:
    """Yield the model folder of a size."""
    if size == "tiny":
        yield TINY
        return
    with TemporaryDirectory() as folder:
        root = Path(folder) / "model"
        shutil.copytree(TINY, root, ignore=shutil.ignore_patterns("transformer"))
        torch.manual_seed(0)
        config = HunyuanVideo15Transformer3DModel.load_config(TINY / "transformer") | MID
        HunyuanVideo15Transformer3DModel.from_config(config).save_pretrained(root / "transformer")
        yield root


if __name__ == "__main__":
    print_results(measure())
