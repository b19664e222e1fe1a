"""A run: everything that is true whatever the algorithm, the loop over its rounds, and what it tells of them."""

import gc
import math
import platform
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from pathlib import Path

from hyvideo.algorithms.algorithm import Algorithm, Trajectory, algorithm_class
from hyvideo.algorithms.optimizer import NonFiniteUpdateError
from hyvideo.algorithms.policy import Policy
from hyvideo.algorithms.weights_copy import WeightsCopy
from hyvideo.checkpoint.run_folder import RunFolder
from hyvideo.checkpoint.train_state import BEST, LATEST, latest_checkpoint, point
from hyvideo.config.outside import in_words
from hyvideo.config.schema import Config
from hyvideo.data.files import LOCK
from hyvideo.distributed.collectives import broadcast_from_main, gather
from hyvideo.distributed.mesh import Mesh
from hyvideo.evaluation.drift import Drift, drift_of, write_drift
from hyvideo.evaluation.paired import pairs_of
from hyvideo.models.reward_models.registry import RewardFailureError
from hyvideo.models.reward_models.rewards import WeightedReward
from hyvideo.models.transformer import PassFlops, transformer_flops, video_tokens
from hyvideo.observability.console import Console, validation_line
from hyvideo.observability.metrics import MetricsLog, append_scores, read_metrics
from hyvideo.observability.phase_timer import PhaseTimer, StragglerWatch, Watchdog
from hyvideo.observability.profiling import Profile
from hyvideo.observability.scored_videos import SCORES, read_scored_videos, scored_steps
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Conditioning
from hyvideo.training.collect import Rounds, Validation, collect, gain_over, save_samples
from hyvideo.training.guard import ROLLBACK_RATE, Action, Look, ReplayWatch, RewardWatch, fallen_spreads
from hyvideo.training.state import RunState
from hyvideo.training.stop_signal import StopSignal

GUARD = "reward_guard"
"""What a run was stopped by, if not by a signal."""

TRACKED_VIDEOS = 8
"""Validation videos sent to trackers each time."""


class Performance:
    """perf/*: turns the seconds of the phases into model FLOPs utilisation (MFU) and videos per GPU and hour.

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
        self._evaluations = algorithm_class(config.grpo.algorithm).evaluations(config)
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
        trained = [flops.model - (flops.linear if self._adapter else 0) for flops in per_video]
        if times["time/rollout"]:
            learnt = self._evaluations.learnt
            sampled = (self._evaluations.rollout - learnt) * sum(flops.total for flops in per_video)
            self._mfu_rollout = (sampled + learnt * sum(trained)) / times["time/rollout"] / self._peak
        trained = sum(trained) / len(trained)
        self._seconds.append(sum(times.values()))
        num_videos = len(trajectory) * self._mesh.layout.dp_size
        return {
            "perf/mfu_rollout": self._mfu_rollout,
            "perf/mfu_update": evaluations * trained / max(times["time/update"], 1e-9) / self._peak,
            "perf/videos_per_gpu_hour": 3600 * num_videos / sum(self._seconds) / self._mesh.layout.world_size,
        }


@dataclass(eq=False)
class Journal:
    """Writes one row per update, and what people read of them.

    Only the main rank has `metrics`, and `profile` is None where the run is not profiled. `report` is called with the
    run folder after a save; None writes no report.
    """

    folder: Path
    console: Console
    metrics: MetricsLog | None
    performance: Performance
    profile: Profile | None
    watchdog: Watchdog
    replay_watch: ReplayWatch
    reward_watch: RewardWatch = field(default_factory=RewardWatch)
    straggler_watch: StragglerWatch = field(default_factory=StragglerWatch)
    report: Callable[[Path], None] | None = None

    def __post_init__(self) -> None:
        self.watchdog.tell = self._tell_hang
        own = self.metrics and self.metrics.path.is_file()
        rows = read_metrics(self.metrics.path) if own else []  # those before a resume
        for row in {row["round"]: row for row in rows if "round" in row}.values():  # the last row of each round
            self.reward_watch.observe(row)
        samples = scored_steps(self.folder / "samples") if own else {}
        self._validations = []
        for folder in samples.values():
            try:
                rewards = [video.reward for video in read_scored_videos(folder) if math.isfinite(video.reward)]
            except ValueError as error:  # it was damaged, and only the console's curve lacks it
                self.console.warning(str(error))
                rewards = []
            self._validations.append(sum(rewards) / len(rewards) if rewards else math.nan)

    def log(self, step: int, row: dict[str, float], *, round_ends: bool) -> None:
        """Write the row of update `step`, and warn if the rounds so far look as if the reward were exploited."""
        if self.metrics:
            self.metrics.log(step, row)
        self.console.progress(step, row, round_ends=round_ends, slowest=self.straggler_watch.slowest)
        if round_ends and (failed := row.get("reward/failed", 0)):
            self.console.main_warning(
                f"{failed:.0f} videos of the round that ended with update {step} could not be scored and are left out "
                "(reward/failed)."
            )
        if "valid/reward" in row:
            self.tell_validation(step, row["valid/reward"])
        if round_ends and (warning := self.reward_watch.observe(row)):
            self.console.main_warning(warning)

    def tell_validation(self, step: int, reward: float) -> None:
        """Say what a validation found."""
        self._validations.append(reward)
        self.console.info(validation_line(step, self._validations))

    def _tell_hang(self, message: str) -> None:
        """Warn of a hang, and show it in the report: the run may be ended before it can do anything else."""
        with suppress(OSError):
            self.console.keep_log()
        self.console.warning(message)
        self.write_report()

    def write_report(self) -> None:
        """Report what is in the run folder; if that cannot be written, training goes on."""
        if not (self.report and self.metrics and self.metrics.path.exists()):
            return
        try:
            self.report(self.folder)
        except (OSError, ValueError) as error:
            self.console.warning(f"report.html was not written: {in_words(error)}")

    def finish(self) -> None:
        """Close what the run wrote to, and say where its report is."""
        if self.profile:
            self.profile.finish()
        if self.metrics:
            self.metrics.close()
            if self.report:
                self.console.info(f"report: {self.folder / 'report.html'}")


class RoundAbandoned(Exception):
    """A preemption came before the first update of a round: what was sampled is given up."""


@dataclass(eq=False)
class Run:
    """A training and its life: what one rank trains with, folder, checkpoints, stop signals, validation and journal.

    Every rank has one, in lockstep (`hyvideo.training.build.open_run`). A round is atomic: checkpoints and a requested
    stop fall between rounds, and the round that reaches `max_steps` is made whole.

    Attributes:
        base: the model that training began with, where `base_interval` asks to compare with it.
        drifted: the newest validation's update, and how its videos differ from those before training.
    """

    config: Config
    policy: Policy
    algorithm: Algorithm
    reward: WeightedReward
    rounds: Rounds
    folder: RunFolder
    mesh: Mesh
    state: RunState
    validation: Validation | None
    journal: Journal
    timer: PhaseTimer
    base: WeightsCopy | None = None

    def __post_init__(self) -> None:
        self._stop, self._stopped_by = StopSignal(), None
        self._saved_at: int | None = None
        self._first_step, self._compared = self.state.step, {}
        self.drifted: tuple[int, Drift] | None = None

    def train(self) -> str | None:
        """Train to the end, or until a signal asks to stop.

        Returns:
            What stopped the run before its end, a signal's name or a guard's; None if nothing did.

        Raises:
            NonFiniteUpdateError, RewardFailureError, SaveError: it cannot go on.
        """
        policy, algorithm, reward, rounds = self.policy, self.algorithm, self.reward, self.rounds
        with self.session():
            while self.continues():
                trajectory = collect(policy, algorithm, reward, rounds.next())
                self.begin_updates(trajectory)
                for metrics in algorithm.updates(trajectory):
                    self.log(trajectory, metrics)
                self.end_round(trajectory)
        if self.drifted:
            step, drifted = self.drifted
            self.journal.console.info(f"what changed until update {step}, over {drifted.num_pairs} videos: {drifted}")
        self.journal.finish()
        return self._stopped_by if self.state.step < self.config.run.max_steps else None

    @contextmanager
    def session(self) -> Iterator[None]:
        """Validate the base model if asked to, then listen to stop signals while the `with` block trains.

        Its errors come after the checkpoint that was being written.
        """
        journal, state = self.journal, self.state
        self._stop, self._stopped_by = StopSignal(), None
        if state.guard:  # an abandoned future may have had another best
            self._point_best_at(state.guard.best())
        if state.step == 0 and self.validation and self.config.validation.validate_at_step0:
            means, look = self._validate()
            self._guard(look)
            journal.tell_validation(0, means["valid/reward"])
            if journal.metrics and journal.metrics.trackers:  # metrics.jsonl has a row per update, so none for step 0
                journal.metrics.trackers.log(0, means)
        if self.validation and not (self.folder.samples / "step_0" / SCORES).is_file():
            journal.console.info(
                "What else training changes is not measured, for lack of validation videos from before it "
                "(validate_at_step0)."
            )
        per_round = self.algorithm.updates_per_round  # the round that reaches max_steps is made whole
        journal.console.start_progress(state.step, -(-self.config.run.max_steps // per_round) * per_round)
        with self._stop.listening(), journal.watchdog, garbage_collected_on_request():
            self._begin_round()
            try:
                yield
            except RoundAbandoned:  # go back to where the round began, and save if that is not saved already
                state.rewind(self._start)
                self.timer.pop()
                state.finish_save()
                saved = broadcast_from_main(lambda: latest_checkpoint(self.folder.checkpoints))
                if state.step and not (saved and saved.name == f"step_{state.step}"):
                    self._save()
                self._stop_between_rounds()
            except RewardFailureError:  # on all ranks: the save under way can be completed
                state.finish_save()
                raise
            except NonFiniteUpdateError as error:
                state.finish_save()
                good = broadcast_from_main(lambda: latest_checkpoint(self.folder.checkpoints))
                may_change = "--resume_may_change learning_rate max_grad_norm"
                way_on = f": give it with --resume_from_checkpoint latest {may_change}" if good else ""
                raise NonFiniteUpdateError(
                    f"{error} Last good checkpoint: {good or 'none was saved yet'}. A lower learning_rate or "
                    f"max_grad_norm usually helps{way_on}."
                ) from error
            state.finish_save()

    def continues(self) -> bool:
        """Whether another round is to be made."""
        return self._stopped_by is None and self.state.step < self.config.run.max_steps

    def begin_updates(self, trajectory: Trajectory) -> None:
        """Compare the round, where an interval begins, with the base model's and with one sampled by the ODE.

        If a scheduler takes the machine away now, the round, which was only sampled, is given up by RoundAbandoned; a
        resume makes it again. After Ctrl-C, or a preemption that comes later, the round is completed instead.
        """
        if self._stop.preempted():
            raise RoundAbandoned
        config, policy, algorithm, reward = self.config, self.policy, self.algorithm, self.reward
        round, noisy = self.rounds.current, algorithm.needs == "transitions"
        if self.validation and noisy and self._begins_interval(config.validation.validation_interval):
            gain = gain_over(policy, algorithm, reward, round, trajectory, without_noise=True)
            self._compared["rollout/ode_gap"] = -gain
        if self.base and self._begins_interval(config.rollout.base_interval):
            self._compared["reward/over_base"] = 0.0  # before the first update the policy is the base
            if self.state.step:
                with self.base.in_place_of_policy():
                    self._compared["reward/over_base"] = gain_over(policy, algorithm, reward, round, trajectory)

    def log(self, trajectory: Trajectory, metrics: dict[str, float]) -> None:
        """Write an update's row; that of the round's last update waits for its validation."""
        step = self.state.step
        if metrics.get("update/skipped"):
            self.journal.console.main_warning(
                f"Update {step} skipped, {self.state.optimization.skipped_in_row} in a row: loss "
                f"{metrics['loss/total']}, gradient norm {metrics['grad_norm']} are not finite."
            )
        if metrics.get("update/without_signal"):
            self.journal.console.main_warning(
                f"Update {step} left the weights as they were: no video's reward differs from its group's, so there is "
                "nothing to learn from."
            )
        if warning := self.journal.replay_watch.observe(metrics):
            self.journal.console.main_warning(warning)
        round_ends = step == self._first_step + self.algorithm.updates_per_round
        times = self.timer.pop()
        if self.journal.profile and self.journal.profile.end_update(times, round_ends=round_ends):
            self.journal.console.info(f"profiled until step {step}: {self.journal.profile.folder}")
        performance = self.journal.performance.row(trajectory, metrics.get("update/evaluations", 0.0), times)
        row = trajectory.metrics | self._compared | metrics | {"round": trajectory.round} | times | performance
        if round_ends:
            self._last_row = row
        else:
            self.journal.log(step, row, round_ends=False)

    def end_round(self, trajectory: Trajectory) -> None:
        """Validate, write the last row, save where an interval or the run ends, and look for stop signals."""
        config, first, step = self.config, self._first_step, self.state.step
        if step - first != self.algorithm.updates_per_round:
            raise ValueError(
                f"{type(self.algorithm).__name__} made {step - first} updates of a round, but its updates_per_round is "
                f"{self.algorithm.updates_per_round}: set it to the number of every round. In a class that does not "
                f"set it, it follows updates_per_rollout, {config.grpo.updates_per_rollout}."
            )
        advantages = self.algorithm.advantages(trajectory)[0].tolist()
        if self._begins_interval(config.run.save_interval):
            save_samples(
                self.folder.rollouts / f"step_{first}",
                trajectory.rollout.videos,
                trajectory.prompts,
                trajectory.scores,
                fps=config.rollout.video_fps,
                numbers=trajectory.positions.tolist(),
                mesh=self.mesh,
                notes=[{"advantage": advantage} for advantage in advantages],
            )
        self._write_scores(trajectory, advantages)
        self._last_row |= self._look_for_stragglers()
        look = None
        if self.validation and _crossed(first, step, config.validation.validation_interval):
            means, look = self._validate()
            self._last_row |= means
        self.journal.log(step, self._last_row, round_ends=True)
        self.state.finish_save(wait=False)
        guarded = self._guard(look)
        stopped = self._stop.of_all_ranks()
        due = guarded or stopped or step >= config.run.max_steps or _crossed(first, step, config.run.save_interval)
        if guarded == "rollback" or (due and self._saved_at != step):  # the best by the judge is saved already
            self._save()
        if stopped and guarded != "stop":
            self._stop_between_rounds()
        if self.continues():
            gc.collect()
        self._begin_round()

    def _write_scores(self, trajectory: Trajectory, advantages: Sequence[float]) -> None:
        """Append what each video of the round scored to `rollouts/scores.jsonl`."""
        scores, round = trajectory.scores, self.rounds.current
        rows = [
            {"step": self.state.step, "round": trajectory.round, "video": video, "prompt": trajectory.prompts[i]}
            | {"prompt_index": round.prompts[i].index, "seed": round.noise.seeds[i]}
            | {name: float(values[video]) for name, values in scores.metrics.items()}
            | {"reward": float(scores.total[video]), "advantage": advantages[i]}
            for i, video in enumerate(trajectory.positions.tolist())
        ]
        of_ranks = gather(rows)[:: self.mesh.layout.sp_size]
        if self.mesh.is_main:
            append_scores(self.folder.rollouts, sorted(chain.from_iterable(of_ranks), key=itemgetter("video")))

    def _look_for_stragglers(self) -> dict[str, float]:
        """Compare the ranks' own work of the round; return what is logged of it, nothing for a single rank."""
        layout, own = self.rounds.layout, self.timer.pop_own()
        scored = len(layout.share_to_score(layout.num_own_videos, self.mesh.rank)) * layout.sp_size
        scoring = own.pop("reward")
        if scored:  # as if all scored equally many
            own["reward"] = scoring * layout.num_own_videos / scored
        of_ranks = gather((platform.node(), own))
        if len(of_ranks) == 1:
            return {}
        slowest, warnings = self.journal.straggler_watch.observe(*zip(*of_ranks, strict=True))
        for warning in warnings:
            self.journal.console.main_warning(warning)
        return slowest

    def whereabouts(self) -> str:
        """Say where this rank is, and how the run can continue: for the end of a traceback."""
        where = f"Rank {self.mesh.rank} failed in phase '{self.timer.phase}', update {self.state.step + 1}."
        if not (self.folder.path / LOCK).exists():
            return f"{where} What was saved in '{self.folder.path}' is there no longer."
        saved = "latest" if (self.folder.checkpoints / LATEST).is_file() else self.folder.resume_from
        way_on = f"continue with --output_dir {self.folder.path} --resume_from_checkpoint {saved}"
        return f"{where} {f'What was saved is intact; {way_on}' if saved else 'No checkpoint was saved yet.'}"

    def _begin_round(self) -> None:
        """Remember where the next round begins."""
        self._first_step, self._start, self._compared = self.state.step, self.state.position(), {}
        if (profile := self.journal.profile) and self.continues():
            profile.begin_round(last=self.state.step + self.algorithm.updates_per_round >= self.config.run.max_steps)

    def _begins_interval(self, updates: int) -> bool:
        """Whether this round is the run's first, or the first after a multiple of `updates`."""
        first = self._first_step
        return first == 0 or _crossed(first - self.algorithm.updates_per_round, first, updates)

    def _stop_between_rounds(self) -> None:
        """Say that the run was stopped, once everything is on disk."""
        self._stopped_by = self._stop.of_all_ranks()
        self.state.finish_save()
        self.journal.console.info(
            f"{self._stopped_by}: saved and stopped after step {self.state.step}. Continue with "
            f"--output_dir {self.folder.path} --resume_from_checkpoint latest"
        )

    def _save(self) -> None:
        """Save a checkpoint; with `async_save` it becomes valid at the end of the round in which it is written."""
        run = self.config.run
        kept = {"keep_last": run.keep_last, "keep_every": run.keep_every}
        self.state.save(self.folder.checkpoints, beside_training=run.async_save, **kept)
        self._saved_at = self.state.step
        self.journal.write_report()

    def _validate(self) -> tuple[dict[str, float], Look | None]:
        """Write this step's validation videos; returns the `valid/*` metrics, and what the guard looks at.

        The average of the weights samples where there is one, otherwise the policy.
        """
        folder = self.folder.samples / f"step_{self.state.step}"
        ema = self.state.optimization.ema
        with ema.in_place_of_policy() if ema else nullcontext():
            means, look = self.validation(folder, self.state.step)
        if (metrics := self.journal.metrics) and metrics.trackers:
            metrics.trackers.log_videos(self.state.step, read_scored_videos(folder)[:TRACKED_VIDEOS])
        if drifted := broadcast_from_main(lambda: self._drift(folder)):
            self.drifted = self.state.step, drifted
            means |= drifted.metrics()
        elif self.state.step and self.config.reward.drift_guard:
            self.journal.console.main_warning(
                "drift_guard saw nothing: the looks of videos of 3 or more prompts are not known from before training."
            )
        return means, look

    def _drift(self, folder: Path) -> Drift | None:
        """Compare this step's validation videos with those before training, and write `drift.json`."""
        first = self.folder.samples / "step_0"
        if folder == first or not (first / SCORES).is_file():
            return None
        try:
            drifted = drift_of(pairs_of(read_scored_videos(first), read_scored_videos(folder)))
        except ValueError as error:  # the base's videos were damaged or removed: training goes on
            self.journal.console.main_warning(f"What else training changes was not measured: {error}")
            return None
        if drifted:
            write_drift(self.folder.path, self.state.step, drifted)
        return drifted

    def _guard(self, look: Look | None) -> Action | None:
        """Let the guards look at a validation, the one with a judge first; return what was done."""
        action, reward = self._heed_judge(look), self.config.reward
        step, drifted = self.drifted or (None, None)
        fallen = fallen_spreads(drifted, reward.drift_guard) if step == self.state.step else ""
        if fallen:
            self.journal.console.main_warning(fallen)
        if not fallen or reward.reward_guard_action == "warn" or action:
            return action
        self.journal.console.info(
            f"stopped by drift_guard after step {step}. To go on without it, continue with --output_dir "
            f"{self.folder.path} --resume_from_checkpoint latest --drift_guard {{}}"
        )
        self._stopped_by = "drift_guard"
        return "stop"

    def _heed_judge(self, look: Look | None) -> Action | None:
        """Keep the best checkpoint by the judge, act on an alarm, return what was done."""
        guard = self.state.guard
        if guard is None or look is None:
            return None
        alarm = guard.observe(look)
        if guard.best() is look:
            self._save()
            self.state.finish_save()
            self._point_best_at(look)
        if alarm is None:
            return None
        best, action, told = self.folder.checkpoints / f"step_{alarm.best}", alarm.action, alarm.message
        is_here = broadcast_from_main(best.is_dir)
        if not is_here:
            action = "stop" if action == "rollback" else action
            told += (
                f" But {best.name} is not in this run's folder: look in that of the run which this one continued. It "
                "may have been deleted."
            )
        self.journal.console.main_warning(told)
        if action == "rollback":
            self.state.put_policy_back(best)
            self.state.optimization.rate_scale *= ROLLBACK_RATE
            guard.rolled_back = True
            self.journal.console.info(f"rolled back: the policy is again {best}, learning rate x {ROLLBACK_RATE:g}")
        elif action == "stop":
            use = f"; use {self.folder.checkpoints / BEST}, which is {best.name}" if is_here else ""
            self.journal.console.info(f"stopped by {GUARD}{use}")
            self._stopped_by = GUARD
        return action

    def _point_best_at(self, look: Look | None) -> None:
        """Let `best` name a look's checkpoint; where this folder does not have it, there is no `best`."""
        checkpoints = self.folder.checkpoints

        def act() -> None:
            if look and (checkpoints / f"step_{look.step}").is_dir():
                point(BEST, checkpoints / f"step_{look.step}")
            else:
                (checkpoints / BEST).unlink(missing_ok=True)

        broadcast_from_main(act)


@contextmanager
def garbage_collected_on_request() -> Iterator[None]:
    """Let Python's garbage collector run only where it is called, and spare it what exists already.

    By itself it would run on every rank at another moment, and all ranks would wait for each of them: half a million
    objects take it some tenths of a second.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _crossed(before: int, after: int, interval: int) -> bool:
    """Whether a multiple of `interval` lies in `(before, after]`; never for interval 0."""
    return interval > 0 and after // interval > before // interval
