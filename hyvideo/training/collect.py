"""Collect one round: deal its prompts, sample the videos, score each once, measure how they differ; and validate.

A validation samples the same prompts and seeds at an interval of updates with the ODE.
"""

import hashlib
import json
import math
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from hyvideo.algorithms.algorithm import Algorithm, Trajectory
from hyvideo.algorithms.policy import Policy
from hyvideo.config.schema import Config
from hyvideo.data.files import writing
from hyvideo.data.prompts import Prompt
from hyvideo.data.randomness import seed_for
from hyvideo.data.videos import poster_of, write_video
from hyvideo.distributed.collectives import all_or_none, gather, gather_rows
from hyvideo.distributed.mesh import Mesh, layout_of
from hyvideo.evaluation.drift import looks_of
from hyvideo.grpo.advantages import parts_of_advantage
from hyvideo.models.reward_models.registry import RewardFailureError
from hyvideo.models.reward_models.rewards import Scores, Scoring, WeightedReward, frames_of_reward
from hyvideo.observability.scored_videos import POSTER
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Conditioning, Learner, Rollout, SampleNoise, decoded_together
from hyvideo.training.guard import Look


@dataclass(frozen=True)
class Round:
    """What this rank samples in one round.

    Attributes:
        prompts: of each of this rank's B videos.
        prompt_indices: positions of these prompts among the run's.
        positions: `[B]` long, where each stands among the round's videos; those of one prompt stand next to each other.
        num_videos: videos of all ranks.
        coming: prompts of this rank's next rounds, of as many as all ranks look ahead.
    """

    index: int
    prompts: Sequence[Prompt]
    prompt_indices: Sequence[int]
    positions: Tensor
    noise: SampleNoise
    num_videos: int
    num_generations: int
    mesh: Mesh
    coming: Iterator[Prompt]


@dataclass(frozen=True)
class Assignment:
    """One video to sample: with the round, its two numbers identify it, and thereby its noise."""

    prompt_index: int  # position of the prompt in the list of training prompts
    generation: int  # number of the video among those of its prompt in this round, from 0


class GroupSampler:
    """Deals prompt groups to data-parallel ranks, round after round.

    The videos of a round are numbered across all ranks, and each run of `num_generations` numbers is one group. The
    prompts of an epoch come in a permutation seeded by (seed, epoch); where an epoch ends within a round, the next one
    begins in the same round.

    Example:
        5 prompts, batch_size 2, num_generations 4, 4 data-parallel ranks: 2 groups per round, each over 2 ranks. With
        seed 3 the first permutations are [2, 1, 4, 3, 0] and [0, 2, 1, 3, 4]; each entry is prompt.generation::

                      rank 0     rank 1     rank 2     rank 3
            round 0   2.0 2.1    2.2 2.3    1.0 1.1    1.2 1.3
            round 1   4.0 4.1    4.2 4.3    3.0 3.1    3.2 3.3
            round 2   0.0 0.1    0.2 0.3  | 0.4 0.5    0.6 0.7     the second epoch begins at the bar
            round 3   2.0 2.1    2.2 2.3    1.0 1.1    1.2 1.3

        Round 2 has prompt 0 twice, as the end of one epoch and the start of the next. Its second group counts
        on from the first, so that no two videos of a round are alike; the same holds with fewer prompts than groups.

    Args:
        num_prompts, num_groups: prompts in all, and groups of a round over all ranks.
        num_generations: group size.
        positions: where in the round this rank's videos stand (`Layout.positions`).
        seed: of the run.
    """

    def __init__(self, num_prompts: int, num_groups: int, num_generations: int, positions: Tensor, seed: int) -> None:
        self.num_prompts, self.num_groups, self.num_generations = num_prompts, num_groups, num_generations
        self.positions, self.seed = positions.tolist(), seed
        self.round = 0
        """Number of the round that `next_round` deals next."""
        self._groups_dealt = 0

    def next_round(self) -> list[Assignment]:
        """Return this rank's videos of the next round, and move on by one round."""
        epoch, start = divmod(self._groups_dealt, self.num_prompts)
        prompts: list[int] = []  # of this epoch and, where the round goes beyond it, of the next ones
        while len(prompts) < start + self.num_groups:
            generator = torch.Generator().manual_seed(seed_for(self.seed, "prompt_order", epoch))
            prompts += torch.randperm(self.num_prompts, generator=generator).tolist()
            epoch += 1
        self.round += 1
        self._groups_dealt += self.num_groups
        earlier: Counter[int] = Counter()
        videos = []
        for prompt in prompts[start : start + self.num_groups]:
            first = earlier[prompt]
            earlier[prompt] += self.num_generations
            videos += [Assignment(prompt, generation) for generation in range(first, earlier[prompt])]
        return [videos[position] for position in self.positions]

    def state_dict(self) -> dict[str, int]:
        """The position: rounds and groups dealt. The same on all ranks, and valid for another number of ranks."""
        return {"round": self.round, "groups_dealt": self._groups_dealt}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the position of `state`."""
        self.round, self._groups_dealt = state["round"], state["groups_dealt"]


AHEAD = 32
"""Prompts that are encoded ahead at most, which take 140 MB with 300 tokens each, and 0.5 GB with 1,000."""


class Rounds:
    """Deals a data-parallel rank's part of round after round; its sampler's position is all there is to save.

    Attributes:
        current: the round that `next` returned last.
    """

    current: Round

    def __init__(self, config: Config, prompts: Sequence[Prompt], mesh: Mesh) -> None:
        self.prompts, self.mesh, self.layout = prompts, mesh, layout_of(config, mesh.layout.world_size)
        self.positions = self.layout.positions(mesh.dp_rank)
        self._seed, self._rollout = config.run.seed, config.rollout
        groups = [self.layout.positions(rank) // self.layout.num_generations for rank in range(mesh.layout.dp_size)]
        self._ahead = AHEAD // max(len(of_rank.unique()) for of_rank in groups)  # rounds, the same on all ranks
        sizes = (len(prompts), self.layout.num_groups, self.layout.num_generations)
        self.sampler = GroupSampler(*sizes, self.positions, self._seed)

    def next(self) -> Round:
        """Return the next round, and move on."""
        index, videos = self.sampler.round, self.sampler.next_round()
        prompts = [video.prompt_index for video in videos]
        noise = SampleNoise(
            seeds=[self._seed] * len(videos),
            stream="rollout",
            round=index,
            prompts=prompts,
            generations=[video.generation for video in videos],
            share_initial=self._rollout.use_same_noise,
            repeat_initial="prompt_noise" in self._rollout.published,
        )
        self.current = Round(
            index=index,
            prompts=[self.prompts[prompt] for prompt in prompts],
            prompt_indices=prompts,
            positions=self.positions,
            noise=noise,
            num_videos=self.layout.num_videos,
            num_generations=self.layout.num_generations,
            mesh=self.mesh,
            coming=self._coming(),
        )
        return self.current

    def _coming(self) -> Iterator[Prompt]:
        """Yield the prompts of the next rounds, an epoch of them at most."""
        sampler = copy(self.sampler)
        for _ in range(min(self._ahead, math.ceil(len(self.prompts) / self.layout.num_groups))):
            yield from (self.prompts[video.prompt_index] for video in sampler.next_round())


THUMBNAIL_FRAMES = 4
THUMBNAIL_SIDE = 16


def thumbnails(videos: Tensor) -> Tensor:
    """Return what is left of videos for comparison, `[B, D]` float32 in [0, 1] on the CPU.

    Of uint8 videos `[B, F, H, W, 3]` 4 frames spread over each (or all, of fewer) are averaged to 16 x 16.
    """
    frames = torch.linspace(0, videos.shape[1] - 1, min(THUMBNAIL_FRAMES, videos.shape[1])).round().long()
    chosen = videos[:, frames.to(videos.device)].float().permute(0, 1, 4, 2, 3).flatten(0, 1) / 255
    return adaptive_avg_pool2d(chosen, THUMBNAIL_SIDE).reshape(len(videos), -1).cpu()


def group_diversity(points: Tensor, num_generations: int) -> Tensor:
    """Root mean square distance of a group's videos from their mean, per element, `[B / G]`; 0 where all are equal.

    The `points` `[B, D]` of one prompt's G videos (`num_generations`, of which B is a multiple) lie side by side.

    Example:
        >>> group_diversity(torch.tensor([[0.0], [1.0], [0.5], [0.5]]), num_generations=2)
        tensor([0.5000, 0.0000])
    """
    groups = points.view(-1, num_generations, points.shape[1])
    return (groups - groups.mean(1, keepdim=True)).square().mean((1, 2)).sqrt()


def score_over_ranks(
    reward: WeightedReward,
    videos: Tensor,
    texts: Sequence[str],
    positions: Tensor,
    mesh: Mesh,
    scoring: Scoring | None = None,
    own_work: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Scores:
    """Score the videos of all ranks; the ranks that share a video's tokens score a part of their videos each.

    Args:
        reward: the reward.
        videos: `[B, F, H, W, 3]`, the same on all ranks of one data-parallel rank.
        texts: their prompts.
        positions: `[B]` long, where each stands among the videos of all ranks.
        mesh: who shares what.
        scoring: has been given this rank's share of the videos already (`reward_async`); None: score them now.
        own_work: makes a context for what this rank does without the others (`PhaseTimer.own`).

    Every rank returns the scores of all videos in the order of their positions. All raise a RewardFailureError if the
    reward failed on a rank, or too many videos have no total.
    """
    own = mesh.layout.share_to_score(len(texts), mesh.rank)
    with all_or_none(RewardFailureError), own_work():
        try:
            if scoring is not None:
                part = reward.finish(scoring)
            else:
                part = reward(videos[own.start : own.stop], texts[own.start : own.stop]) if own else None
        except (RewardFailureError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            frames = traceback.extract_tb(error.with_traceback(frames_of_reward(error)).__traceback__)
            at = [frame for frame in frames if frame.filename == frames[0].filename]  # not what it calls in libraries
            place = f" ({at[-1].filename}, line {at[-1].lineno}, in {at[-1].name})" if at else ""
            raise RewardFailureError(f"the reward failed: {type(error).__name__}: {error}{place}") from error
    parts, places = zip(*gather((part, positions[own.start : own.stop])), strict=True)
    parts = [part for part in parts if part is not None]
    scores = Scores.join(parts).at(torch.cat(places).argsort())
    failed = int(scores.failed().sum())
    if failed > reward.max_failed * len(scores):
        counts = {name: int(values.isnan().sum()) for name, values in scores.metrics.items()}
        listed = ", ".join(f"{name}: {count}" for name, count in counts.items() if count)
        raise RewardFailureError(
            f"{failed} of {len(scores)} videos could not be scored ({listed}); at most the share {reward.max_failed:g} "
            "may fail (reward_max_failed). Earlier warnings say why, where the reward gave a reason."
        )
    return scores


def collect(policy: Policy, algorithm: Algorithm, reward: WeightedReward, round: Round) -> Trajectory:
    """Sample and score this rank's videos of one round; every rank learns the scores of all.

    The algorithm says which steps draw noise and what must be recorded. The timer's phases are `rollout` and `reward`;
    with `reward_async` the latter is only the remaining wait. A RewardFailureError as in `score_over_ranks`.
    """
    mesh, timer, count = round.mesh, algorithm.timer, len(round.prompts)
    own = mesh.layout.share_to_score(count, mesh.rank)
    at_once = reward.asynchronous  # otherwise the ranks of a video decode a part each, when all are sampled
    scoring = reward.begin() if at_once and own else None
    unique = list(dict.fromkeys(round.prompt_indices))
    rows = tuple(unique.index(prompt) for prompt in round.prompt_indices)
    texts = tuple(prompt.text for prompt in round.prompts)
    with timer("rollout"), algorithm.sampling():
        conditioning = policy.encode([round.prompts[rows.index(row)] for row in range(len(unique))], round.coming)
        noisy = algorithm.noisy_steps(round.index, round.num_videos)
        parts, size = [], policy.videos_at_once or count
        for start in range(0, count, size):
            block = range(start, min(start + size, count))
            conditions = conditioning.rows([rows[i] for i in block])
            learner = algorithm.learner(round.index, round.positions[list(block)], round.num_videos)
            parts.append(_sample(policy, algorithm, conditions, round, block, noisy, decode=at_once, learner=learner))
            inside = [i for i in block if i in own]
            if scoring and inside:
                scoring.add(parts[-1].videos[[i - start for i in inside]], [texts[i] for i in inside])
        rollout = Rollout.join(parts)
        del parts  # gigabytes that the reward's model may need
        if not at_once:
            rollout = replace(rollout, videos=_decode_over_ranks(policy, rollout.latents[:, -1], size, mesh))
    with timer("reward"):
        scores = score_over_ranks(reward, rollout.videos, texts, round.positions, mesh, scoring, timer.own)
    valid = scores.total[~scores.total.isnan()]
    of_ranks = gather((thumbnails(rollout.videos), round.positions))[:: mesh.layout.sp_size]
    points, positions = (torch.cat(parts) for parts in zip(*of_ranks, strict=True))
    diversity = group_diversity(points[positions.argsort()], round.num_generations)
    metrics = {
        "reward/mean": float(valid.mean()),
        "reward/std": float(valid.std(correction=0)) if len(valid) else math.nan,
        "reward/failed": float(scores.failed().sum()),
        **{f"reward/{name}": float(values.nanmean()) for name, values in scores.metrics.items()},
        "rollout/diversity": float(diversity.mean()),
        "rollout/least_diversity": float(diversity.min()),
    }
    if len(scores.weights) > 1:
        normalized = algorithm.config.reward.reward_aggregation != "sum"
        mixing = parts_of_advantage(scores.weighted(), scores.weights, round.num_generations, normalized=normalized)
        metrics |= {
            f"mixing/{statistic}_{name}": value
            for name, part in mixing.items()
            for statistic, value in vars(part).items()
        }
    return Trajectory(round.index, texts, round.positions, conditioning, rows, rollout, scores, metrics)


def _decode_over_ranks(policy: Policy, latents: Tensor, size: int, mesh: Mesh) -> Tensor:
    """Decode latents `[B, C, F', H', W']` once among the ranks that share the videos; all of them get all videos.

    Videos are decoded together as one rank alone would, `size` having been sampled together: then no pixel differs.
    """
    together = min(size, decoded_together(latents.shape))
    parts = [part for block in latents.split(size) for part in block.split(together)]
    of_ranks = [mesh.layout.share_to_score(len(parts), rank) for rank in range(mesh.layout.sp_size)]
    own = [policy.pipeline.decode(parts[i]) for i in of_ranks[mesh.sp_rank]]
    videos = torch.cat(own) if own else torch.empty(0, policy.num_frames, *policy.size, 3, dtype=torch.uint8)
    return gather_rows(videos, [sum(len(parts[i]) for i in share) for share in of_ranks], mesh.video_group)


def _sample(
    policy: Policy,
    algorithm: Algorithm,
    conditioning: Conditioning,
    round: Round,
    block: Sequence[int],
    noisy: Tensor | None,
    *,
    decode: bool,
    learner: Learner | None = None,
) -> Rollout:
    """Sample some of a round's videos as its algorithm needs them; `noisy` is of the videos of all ranks."""
    noise = round.noise.rows(block)
    if algorithm.needs == "final_latents":
        return policy.final_latents(conditioning, noise, decode=decode)
    drawn = None if noisy is None else noisy[round.positions[list(block)]]
    return policy.rollout(conditioning, noise, drawn, decode=decode, learner=learner)


def gain_over(
    policy: Policy,
    algorithm: Algorithm,
    reward: WeightedReward,
    round: Round,
    trajectory: Trajectory,
    *,
    without_noise: bool = False,
) -> float:
    """Sample and score a round's videos again, by the weights as they are now; return how much more they scored before.

    They start from the same noise, and every rank returns the same. With `without_noise` the ODE samples them, whatever
    the algorithm does: what training optimizes are the noisy videos, what people see are those without noise.
    """
    noisy, videos = algorithm.noisy_steps(round.index, round.num_videos), []
    for block in torch.arange(len(trajectory)).split(policy.videos_at_once or len(trajectory)):
        conditions, block = trajectory.conditioning_of(block), block.tolist()
        if without_noise:
            videos.append(policy.final_latents(conditions, round.noise.rows(block)).videos)
        else:
            videos.append(_sample(policy, algorithm, conditions, round, block, noisy, decode=True).videos)
    scores = score_over_ranks(reward, torch.cat(videos), trajectory.prompts, trajectory.positions, round.mesh)
    return float((trajectory.scores.total - scores.total).nanmean())


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
            notes=[{"looks": looks} for looks in looks_of(sampled.videos)],
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
    notes: Sequence[Mapping[str, object]] = (),
    shown: Collection[int] | None = None,
) -> None:
    """Write videos `[b, F, H, W, 3]` as `000.mp4`, ... and the prompts and scores of all ranks as `scores.jsonl`.

    Beside each video lies its first frame, `000.jpg`, for pages that show many videos.

    `videos`, their prompts `texts` and their `numbers` among all are this rank's (of ranks that share them one writes);
    the scores are of all ranks' videos, by their numbers. `how` describes how they were sampled and scored, by which
    others are found to be comparable; empty: none. `notes` are what else is known of each of this rank's videos. With
    `shown` only videos of these numbers are written, of the others only what is known of them.
    """
    rows, about = {}, {"how": how} if how else {}
    for place, (video, text, number) in enumerate(zip(videos, texts, numbers, strict=True)):
        name = f"{number:03d}.mp4"
        metrics = {metric: _number(values[number]) for metric, values in scores.metrics.items()}
        rows[number] = {"video": name, "prompt": text} | about | {"reward": _number(scores.total[number]), **metrics}
        rows[number] |= notes[place] if notes else {}
        if mesh.sp_rank == 0 and (shown is None or number in shown):
            write_video(folder / name, video, fps)
            with writing(poster := (folder / name).with_suffix(POSTER)):
                poster.write_bytes(poster_of(video[0]))
    of_ranks = gather(rows)[:: mesh.layout.sp_size]
    if mesh.is_main:
        every = {number: row for rows in of_ranks for number, row in rows.items()}
        folder.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(every[number], ensure_ascii=False) + "\n" for number in sorted(every))
        with writing(folder / "scores.jsonl"):
            (folder / "scores.jsonl").write_text(text, encoding="utf-8")


def _number(value: Tensor) -> float | None:
    """Return a JSON number; a failed score (NaN) is null."""
    return None if bool(value.isnan()) else round(float(value), 6)
