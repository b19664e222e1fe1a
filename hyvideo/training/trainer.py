"""The training loop: collect, score, compare, update; then validate, save, report."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hyvideo.checkpoint.run_folder import RunFolder
from hyvideo.checkpoint.train_state import LATEST, latest_checkpoint
from hyvideo.config.schema import Config
from hyvideo.data.prompts import Prompt
from hyvideo.data.randomness import generator_for
from hyvideo.distributed.collectives import from_main
from hyvideo.distributed.layout import Layout, layout_of
from hyvideo.distributed.mesh import Mesh
from hyvideo.evaluation.run_report import report_runs
from hyvideo.grpo.advantages import groups_without_spread
from hyvideo.grpo.sde_window import noisy_steps
from hyvideo.grpo.timesteps import Pairs, select_timesteps, split_updates
from hyvideo.models.reward_models.registry import RewardFailureError
from hyvideo.models.reward_models.rewards import WeightedReward
from hyvideo.observability.console import Console
from hyvideo.observability.metrics import MetricsLog
from hyvideo.observability.phase_timer import PhaseTimer
from hyvideo.observability.profiling import Profile
from hyvideo.observability.scored_videos import read_scored_videos
from hyvideo.observability.watchdog import Watchdog
from hyvideo.training.optimizer import set_learning_rate
from hyvideo.training.performance import Performance
from hyvideo.training.reward_watch import RewardWatch
from hyvideo.training.rollout import collect
from hyvideo.training.state import RunState
from hyvideo.training.stop_signal import StopSignal
from hyvideo.training.trajectory import Trajectory
from hyvideo.training.update import NonFiniteUpdateError, PolicyUpdate, UpdateStats
from hyvideo.training.validation import Validation, save_samples

_TRACKED_VIDEOS = 8
"""Validation videos sent to trackers each time."""


@dataclass
class Trainer:
    """Runs rounds of GRPO until `max_steps` updates are made; every rank runs one, in lockstep.

    A round is atomic: checkpoints and a requested stop fall between rounds. Every part is built elsewhere and passed in
    finished (`hyvideo.training.assembly.build_trainer`). `metrics` is None on all ranks but the main one, `profile`
    where the run is not profiled. `skipped_in_row` counts the updates skipped since the last one that was made.
    """

    config: Config
    folder: RunFolder
    prompts: Sequence[Prompt]
    reward: WeightedReward
    update: PolicyUpdate
    state: RunState
    validation: Validation | None
    metrics: MetricsLog | None
    console: Console
    timer: PhaseTimer
    mesh: Mesh
    performance: Performance
    profile: Profile | None
    watchdog: Watchdog
    reward_watch: RewardWatch
    skipped_in_row: int = 0

    @property
    def layout(self) -> Layout:
        """Where the videos of a round lie over the ranks."""
        return layout_of(self.config, self.mesh.world_size)

    def train(self) -> str | None:
        """Train to the end, or until a signal asks to stop.

        Ctrl-C (SIGINT) lets the round end first. A preemption (SIGTERM, SIGUSR1, SIGHUP) does so once its updates have
        begun; before that the round is given up, to be made again by whoever resumes.

        Returns:
            The name of the signal that stopped the run before its end, None without one.

        Raises:
            NonFiniteUpdateError: loss or gradient became non-finite; the message names the last good checkpoint.
            SaveError: a checkpoint could not be written.
        """
        run, state = self.config.run, self.state
        if state.step == 0 and self.validation and self.config.validation.validate_at_step0:
            means = self._sample_and_score()
            self.console.info(f"before training: {_listed(means)}")
            if self.metrics and self.metrics.trackers:  # metrics.jsonl has a row per update, so none for step 0
                self.metrics.trackers.log(0, means)
        self.console.start_progress(state.step, run.max_steps)
        stopped_by = None
        with StopSignal().listening() as stop, self.watchdog:
            while state.step < run.max_steps:
                first = state.step
                cut_short = first + self.config.grpo.updates_per_rollout > run.max_steps
                if cut_short and first > 0:  # a longer run makes the last round again, whole
                    self._save(keep_last=run.keep_last)
                try:
                    finished = self.run_round(stop)
                except RewardFailureError:  # on all ranks: the checkpoint that is being written can be completed
                    state.finish_save()
                    raise
                state.finish_save()
                stopped_by = stop.of_all_ranks()
                if not finished:
                    self._save_unless_saved()
                elif cut_short:
                    self._save(keep_last=max(run.keep_last, 2), round_start=first)
                elif stopped_by or state.step >= run.max_steps or _crossed(first, state.step, run.save_interval):
                    self._save(keep_last=run.keep_last)
                if stopped_by:
                    state.finish_save()
                    self.console.info(
                        f"{stopped_by}: saved and stopped after step {state.step}. Continue with "
                        f"--output_dir {self.folder.path} --resume_from_checkpoint latest"
                    )
                    break
            state.finish_save()
        if self.profile:
            self.profile.finish()
        if self.metrics:
            self.metrics.close()
            self.console.info(f"report: {self.folder.path / 'report.html'}")
        return stopped_by if state.step < run.max_steps else None

    def whereabouts(self) -> str:
        """Say where this rank is, and how the run can continue: for the end of a traceback."""
        return (
            f"Rank {self.mesh.rank} failed in phase '{self.timer.phase}', update {self.state.step + 1}. What was saved "
            f"is intact; continue with --output_dir {self.folder.path} --resume_from_checkpoint {self._last_saved()}"
        )

    def _last_saved(self) -> str | Path:
        """Return what `resume_from_checkpoint` is to be: nothing is saved yet in a new folder of an older run."""
        has_saved = (self.folder.checkpoints / LATEST).is_file()
        return "latest" if has_saved or self.folder.resume_from is None else self.folder.resume_from

    def _save_unless_saved(self) -> None:
        """Save the state before an abandoned round, unless the last checkpoint has it or no update was made."""
        saved = from_main(lambda: latest_checkpoint(self.folder.checkpoints))  # another machine may see it later
        if self.state.step and not (saved and saved.name == f"step_{self.state.step}"):
            self._save(keep_last=self.config.run.keep_last)

    def _save(self, *, keep_last: int, round_start: int | None = None) -> None:
        """Save a checkpoint; with `async_save` it becomes valid at the next `finish_save`."""
        run = self.config.run
        self.state.save(
            self.folder.checkpoints,
            keep_last=keep_last,
            keep_every=run.keep_every,
            round_start=round_start,
            beside_training=run.async_save,
        )
        self.write_report()

    def run_round(self, stop: StopSignal | None = None) -> bool:
        """Collect one trajectory and make its updates; one row of metrics each.

        Args:
            stop: asked on all ranks before the first update.

        Returns:
            Whether the round was made; given up for a preemption, it leaves the state as it was.
        """
        if self.profile:
            num_updates = self.config.grpo.updates_per_rollout
            self.profile.begin_round(last=self.state.step + num_updates >= self.config.run.max_steps)
        before = self.state.before_round()
        trajectory = self._collect()
        updates = self._choose_pairs()
        if stop is None or not stop.preempted():
            with self.timer("anchor"):
                anchor_means = self.update.anchor_means(trajectory, updates)
        if stop is not None and stop.preempted():
            self.state.give_round_up(before)
            self.timer.pop()
            return False
        replay: dict[str, float] = {}
        first = self.state.step
        for number, pairs in enumerate(updates, start=1):
            coefficient = self.state.controller.coefficient if self.state.controller else 0.0
            rate = set_learning_rate(self.state.optimizers, self.config.optimizer, self.state.step)
            stats = self._update(trajectory, pairs, anchor_means, coefficient)
            replay = replay or {
                "ratio/max_deviation": stats.ratio_deviation,
                "replay/mean_error": stats.mean_error,
            }
            row = {**_reward_row(trajectory, self.config.grpo.num_generations), **replay, **_update_row(stats)}
            row |= {"kl/coef": coefficient, "lr": rate, "round": self.state.round}
            times = self.timer.pop()
            row |= times | self.performance.row(trajectory, pairs, times)
            round_ends = number == len(updates) or self.state.step >= self.config.run.max_steps
            if self.profile and self.profile.end_update(times, round_ends=round_ends):
                self.console.info(f"profiled until step {self.state.step}: {self.profile.folder}")
            row |= self.update.step_gradients.pop()
            row["update/skipped"] = float(stats.skipped)
            if round_ends:
                self.state.round += 1
                row |= self._validate(first)
                self._report(row)
                if warning := self.reward_watch.look(row):
                    self.console.main_warning(warning)
                break
            self._report(row)
        return True

    def _noisy_steps(self) -> Tensor:
        """Choose the steps `[N, K]` at which each of the round's N videos draws noise and can be trained."""
        grpo, rollout = self.config.grpo, self.config.rollout
        return noisy_steps(
            self.update.pipeline.scheduler.trained_steps(sde_type=rollout.sde_type, eta=rollout.eta),
            rollout.sde_window,
            rollout.sde_window_size,
            num_samples=self.layout.num_videos,
            num_generations=grpo.num_generations,
            round_index=self.state.round,
            interval=rollout.sde_window_interval,
            generator=generator_for(self.config.run.seed, "sde_window", self.state.round, 0, 0, 0),
        )

    def _collect(self) -> Trajectory:
        """Sample and score the next round's videos; some are kept as mp4."""
        config, state = self.config, self.state
        own = self.layout.positions(self.mesh.dp_rank)
        trajectory = collect(
            self.update.pipeline,
            self.reward,
            self.update.guidance,
            self.prompts,
            state.sampler.next_round(),
            mesh=self.mesh,
            layout=self.layout,
            round_index=state.round,
            config=config,
            timer=self.timer,
            noisy=None if config.rollout.sde_window == "all" else self._noisy_steps()[own],
            before_scoring=state.anchor.prefetch if state.anchor else None,
        )
        first_of_interval = _crossed(state.step - config.grpo.updates_per_rollout, state.step, config.run.save_interval)
        if config.rollout.save_rollout_videos and (state.step == 0 or first_of_interval):
            save_samples(
                self.folder.rollouts / f"step_{state.step}",
                trajectory.rollout.videos,
                trajectory.prompts,
                trajectory.scores,
                fps=config.rollout.video_fps,
                numbers=own.tolist(),
                mesh=self.mesh,
            )
        return trajectory

    def _choose_pairs(self) -> list[Pairs]:
        """Choose this rank's (sample, step) pairs of every update of this round."""
        grpo = self.config.grpo
        steps = select_timesteps(
            self._noisy_steps(),
            grpo.timestep_fraction,
            self.layout.num_videos,
            permute=grpo.enable_timestep_permutation,
            generator=generator_for(self.config.run.seed, "timesteps", self.state.round, 0, 0, 0),
            spread=grpo.timestep_stride,
        )
        own = steps[self.layout.positions(self.mesh.dp_rank)]
        in_group = math.gcd(grpo.num_generations, grpo.batch_size)  # this rank's part of a group lies together
        return split_updates(own, grpo.updates_per_rollout, num_generations=in_group)

    def _update(
        self, trajectory: Trajectory, pairs: Pairs, anchor_means: Tensor | None, coefficient: float
    ) -> UpdateStats:
        """Make one update and advance controller, anchor and step counter."""
        state, kl = self.state, self.config.kl
        try:
            with self.timer("update"):
                stats = self.update(trajectory, pairs, anchor_means, coefficient)
        except NonFiniteUpdateError as error:
            stats = self._skip_or_raise(error)
        self.skipped_in_row = self.skipped_in_row + 1 if stats.skipped else 0
        state.step += 1
        if state.controller and not stats.skipped:
            state.controller.update(stats.kl)
        if state.anchor:
            if not stats.skipped:
                state.anchor.policy_moved()
            if kl.use_moving_KL and state.step % kl.update_ref_model_step == 0:
                state.anchor.refresh()
        return stats

    def _skip_or_raise(self, error: NonFiniteUpdateError) -> UpdateStats:
        """Skip a non-finite update if `nonfinite_update` allows it, else raise with advice."""
        run, in_row = self.config.run, self.skipped_in_row
        if run.nonfinite_update == "skip" and in_row < run.max_skipped_updates:
            self.console.main_warning(f"Update {self.state.step + 1} skipped, {in_row + 1} in a row: {error}")
            return error.stats
        self.state.finish_save()
        good = from_main(lambda: latest_checkpoint(self.folder.checkpoints))
        after = f" after {in_row} skipped in a row" if in_row else ""
        raise NonFiniteUpdateError(
            f"Update {self.state.step + 1}{after}: {error} Last good checkpoint: {good or 'none was saved yet'}. "
            "A lower learning_rate or max_grad_norm usually helps: give it with --resume_from_checkpoint latest "
            "--resume_may_change learning_rate max_grad_norm.",
            error.stats,
        ) from error

    def _validate(self, first: int) -> dict[str, float]:
        """Validate when this round crossed the interval; returns the `valid/*` metrics."""
        interval = self.config.validation.validation_interval
        if self.validation is None or not _crossed(first, self.state.step, interval):
            return {}
        return self._sample_and_score()

    def _sample_and_score(self) -> dict[str, float]:
        """Write this step's validation videos; returns the `valid/*` metrics."""
        folder = self.folder.samples / f"step_{self.state.step}"
        means = self.validation(folder)
        if self.metrics and self.metrics.trackers:
            self.metrics.trackers.log_videos(self.state.step, read_scored_videos(folder)[:_TRACKED_VIDEOS])
        return means

    def write_report(self) -> None:
        """Write `report.html` from what is in the run folder; if it cannot be written, training goes on."""
        if not (self.metrics and self.metrics.path.exists()):
            return
        try:
            report_runs([self.folder.path], self.folder.path / "report.html")
        except (OSError, ValueError) as error:
            self.console.warning(f"report.html was not written: {error}")

    def _report(self, row: dict[str, float]) -> None:
        if self.metrics:
            self.metrics.log(self.state.step, row)
        self.console.progress(self.state.step, row)


def _crossed(before: int, after: int, interval: int) -> bool:
    """Whether a multiple of `interval` lies in `(before, after]`; never for interval 0."""
    return interval > 0 and after // interval > before // interval


def _reward_row(trajectory: Trajectory, num_generations: int) -> dict[str, float]:
    """Rewards of the round's videos of all ranks; failed scores are left out and counted."""
    total = trajectory.round_scores.total
    valid = total[~total.isnan()]
    return {
        "reward/mean": float(valid.mean()),
        "reward/std": float(valid.std(correction=0)) if len(valid) else math.nan,
        "reward/failed": float(len(total) - len(valid)),
        "reward/groups_without_spread": float(groups_without_spread(trajectory.rewards, num_generations).sum()),
        "rollout/diversity": float(trajectory.diversity.mean()),
        "rollout/least_diversity": float(trajectory.diversity.min()),
        **{f"reward/{name}": float(values.nanmean()) for name, values in trajectory.round_scores.metrics.items()},
    }


def _update_row(stats: UpdateStats) -> dict[str, float]:
    """Metrics of one update under their public names."""
    return {
        "loss/policy": stats.policy_loss,
        "loss/total": stats.total_loss,
        "kl/position": stats.kl_position,
        "kl/velocity": stats.kl_velocity,
        "clip_fraction": stats.clip_fraction,
        "grad_norm": stats.grad_norm,
    }


def _listed(values: dict[str, float]) -> str:
    """Write metrics in one line."""
    return ", ".join(f"{name} {value:+.3f}" for name, value in values.items())
