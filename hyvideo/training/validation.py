"""Validation: the same prompts and seeds at an interval of updates, sampled with the ODE and scored."""

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hyvideo.algorithms.policy import Policy
from hyvideo.config.schema import Config
from hyvideo.data.files import writing
from hyvideo.data.prompts import Prompt
from hyvideo.data.videos import poster_of, write_video
from hyvideo.distributed.collectives import gather
from hyvideo.distributed.mesh import Mesh
from hyvideo.models.reward_models.rewards import Scores, WeightedReward
from hyvideo.observability.scored_videos import POSTER
from hyvideo.training.collect import score_over_ranks
from hyvideo.training.guard import Look


@dataclass(frozen=True)
class Sampled:
    """Videos of a list of prompts: this rank's numbers in it and videos `[b, F, H, W, 3]`, the scores of all."""

    numbers: range
    videos: Tensor
    scores: Scores


@dataclass(frozen=True)
class Validation:
    """Fixed prompts and how they are sampled and scored; data-parallel ranks sample a part of them each.

    The policy is the trained one, following the validation's schedule. The judge is the guard's reward, which is not
    trained on; None without a guard.
    """

    policy: Policy
    prompts: Sequence[Prompt]
    reward: WeightedReward
    config: Config
    mesh: Mesh
    judge: WeightedReward | None = None

    def __call__(self, folder: Path, step: int) -> tuple[dict[str, float], Look | None]:
        """Write the videos and their scores to `folder`.

        Return the `valid/*` means, NaN scores left out, and what the guard looks at after update `step`.
        """
        sampled = self.sample(self.prompts)
        texts, judged = [self.prompts[number].text for number in sampled.numbers], None
        if self.judge:
            numbers = torch.tensor(sampled.numbers, dtype=torch.long)
            judged = score_over_ranks(self.judge, sampled.videos, texts, numbers, self.mesh)
        save_samples(
            folder,
            sampled.videos,
            texts,
            sampled.scores,
            fps=self.config.rollout.video_fps,
            numbers=sampled.numbers,
            mesh=self.mesh,
            how=self.how(),
        )
        means = {f"valid/{name}": float(values.nanmean()) for name, values in sampled.scores.metrics.items()}
        means = {"valid/reward": float(sampled.scores.total.nanmean()), **means}
        if judged is None:
            return means, None
        means |= {"valid/judge": float(judged.total.nanmean())}
        means |= {f"valid/judge/{name}": float(values.nanmean()) for name, values in judged.metrics.items()}
        asked = "\n".join([self.how(), self.judge.describe(), *(prompt.text for prompt in self.prompts)])
        key = hashlib.sha256(asked.encode()).hexdigest()[:16]
        return means, Look(step, key, sampled.scores.total.tolist(), judged.total.tolist())

    def how(self) -> str:
        """Describe all that decides a video and its scores besides prompt and policy: if equal, they are comparable."""
        settings = self.config.validation
        return (
            f"{settings.validate_video_length}x{settings.validation_fixed_size}, "
            f"{settings.validation_num_inference_steps} steps, shift {settings.validation_timestep_shift:g}, "
            f"guidance {self.policy.guidance.scale:g}, seed {settings.validation_global_seed}; {self.reward.describe()}"
        )

    def sample(self, prompts: Sequence[Prompt]) -> Sampled:
        """Sample `prompts` with the policy as it is and score the videos; all ranks call it with the same prompts."""
        count = self.mesh.layout.most_to_sample(len(prompts))
        numbers = self.mesh.layout.share_to_sample(len(prompts), self.mesh.rank)
        own = [prompts[number] for number in numbers]
        videos = self.policy.sample(
            [*own, *[prompts[0]] * (count - len(own))],  # sharded weights need equally many passes on all ranks
            seed=self.config.validation.validation_global_seed,
            videos_at_once=self.policy.videos_at_once or count,
        )[: len(own)]
        texts = [prompt.text for prompt in own]
        scores = score_over_ranks(self.reward, videos, texts, torch.tensor(numbers, dtype=torch.long), self.mesh)
        return Sampled(numbers, videos, scores)


def save_samples(
    folder: Path,
    videos: Tensor,
    texts: Sequence[str],
    scores: Scores,
    *,
    fps: float,
    numbers: Sequence[int],
    mesh: Mesh,
    how: str = "",
    shown: Collection[int] | None = None,
) -> None:
    """Write videos `[b, F, H, W, 3]` as `000.mp4`, ... and the prompts and scores of all ranks as `scores.jsonl`.

    Beside each video lies its first frame, `000.jpg`, for pages that show many videos.

    `videos`, their prompts `texts` and their `numbers` among all are this rank's (of ranks that share them one writes);
    the scores are of all ranks' videos, by their numbers. `how` describes how they were sampled and scored, by which
    others are found to be comparable; empty: none. With `shown` only videos of these numbers are written, of the others
    only prompt and scores.
    """
    rows, about = {}, {"how": how} if how else {}
    for video, text, number in zip(videos, texts, numbers, strict=True):
        name = f"{number:03d}.mp4"
        metrics = {metric: _number(values[number]) for metric, values in scores.metrics.items()}
        rows[number] = {"video": name, "prompt": text} | about | {"reward": _number(scores.total[number]), **metrics}
        if mesh.sp_rank == 0 and (shown is None or number in shown):
            write_video(folder / name, video, fps)
            with writing(poster := (folder / name).with_suffix(POSTER)):
                poster.write_bytes(poster_of(video[0]))
    of_ranks = gather(rows)[:: mesh.sp_size]
    if mesh.is_main:
        every = {number: row for rows in of_ranks for number, row in rows.items()}
        folder.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(every[number], ensure_ascii=False) + "\n" for number in sorted(every))
        with writing(folder / "scores.jsonl"):
            (folder / "scores.jsonl").write_text(text, encoding="utf-8")


def _number(value: Tensor) -> float | None:
    """Return a JSON number; a failed score (NaN) is null."""
    return None if bool(value.isnan()) else round(float(value), 6)
