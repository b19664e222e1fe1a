"""What decides a round, what its updates make of it, what it costs, and algorithms of one's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from hyvideo.algorithms.algorithm import Evaluations, Trajectory, algorithm_class, over_micro_batches
from hyvideo.config.loading import load_config
from hyvideo.data.prompts import Prompt
from hyvideo.distributed.mesh import Layout, Mesh
from hyvideo.grpo.timesteps import Pairs
from hyvideo.models.parallelize import trainable_parameters
from hyvideo.models.reward_models.rewards import Scores
from hyvideo.observability.metrics import read_metrics
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Rollout
from hyvideo.training.collect import Rounds
from hyvideo.training.guard import ReplayWatch
from hyvideo.training.run import Run
from tests.support import training as support
from tests.support.equal_runs import assert_same, rows_of
from tests.support.programs import write_shown_files
from tests.support.ranks import run_on_ranks
from tests.support.reward_weighted import RewardWeighted
from tests.support.rewards import scoring_with
from tests.support.training import (
    ALGORITHMS,
    PROMPTS,
    REPOSITORY,
    GradientRecorder,
    collect_round,
    weights_of,
    write_prompts,
)


def all_differ(tensors: list[Tensor]) -> bool:
    return not any(torch.equal(*two) for two in combinations(tensors, 2))


def next_updates(training: Run) -> tuple[Pairs, ...]:
    """The pairs of the next round's updates; its videos are all zero: only what is chosen for them counts."""
    round = training.rounds.next()
    scores = Scores({}, torch.zeros(round.num_videos), {})
    rollout = Rollout(*[torch.zeros(len(round.prompts), 1)] * 4)
    trajectory = Trajectory(round.index, (), round.positions, None, (), rollout, scores, {})
    return training.algorithm.compare(trajectory).updates


def next_steps(training: Run) -> Tensor:
    """A row of trained steps for each of the next round's four videos."""
    return next_updates(training)[0].step_index.view(-1, 4).T


def test_every_video_of_every_round_and_seed_starts_from_noise_of_its_own(make_training, tmp_path):
    csv = write_prompts(tmp_path / "one.csv", PROMPTS[:1])
    runs = [make_training(train_video_csv=csv, seed=seed, grpo_sampling_steps=1) for seed in (42, 43)]
    assert all_differ([start for run in runs for _ in range(2) for start in collect_round(run).rollout.latents[:, 0]])


def test_with_noise_per_prompt_rounds_start_alike_and_with_one_per_group_its_videos(make_training, tmp_path):
    csv = write_prompts(tmp_path / "two.csv", PROMPTS[:2])
    training = make_training(train_video_csv=csv, published="prompt_noise", grpo_sampling_steps=1)
    first, second = (collect_round(training) for _ in range(2))
    again = [second.prompts.index(prompt) + place for prompt in dict.fromkeys(first.prompts) for place in range(2)]
    assert torch.equal(first.rollout.latents[:, 0], second.rollout.latents[again, 0])
    assert all_differ([*first.rollout.latents[:, 0]])
    assert all_differ([*first.rollout.latents[:, 1], *second.rollout.latents[:, 1]])
    latents = collect_round(make_training(use_same_noise=True)).rollout.latents
    assert torch.equal(latents[0, 0], latents[1, 0]) and torch.equal(latents[2, 0], latents[3, 0])
    assert all_differ([latents[0, 0], latents[2, 0], *latents[:, 1]])


def test_every_video_has_its_prompts_conditioning_and_is_compared_within_its_group_by_bounded_advantages(make_training):
    training = make_training()
    trajectory = collect_round(training)
    assert len(trajectory) == 4 and len(trajectory.conditioning) == 2  # one row per unique prompt
    videos = [3, 0, 1]
    conditioning = trajectory.conditioning_of(torch.tensor(videos))
    for row, video in enumerate(videos):
        expected = training.policy.pipeline.encode([trajectory.prompts[video]])
        assert torch.equal(conditioning.text[row], expected.text[0])
        assert torch.equal(conditioning.glyph[row], expected.glyph[0])
    for bound in (5.0, 0.5):
        training = make_training(adv_clip_max=bound, grpo_sampling_steps=1)
        trajectory = collect_round(training)
        scores = training.reward(trajectory.rollout.videos, trajectory.prompts)
        assert torch.equal(trajectory.scores.total, scores.total)
        assert trajectory.prompts[0] == trajectory.prompts[1] != trajectory.prompts[2] == trajectory.prompts[3]
        groups = scores.total.view(2, 2)
        expected = (groups - groups.mean(1, keepdim=True)) / groups.std(1, correction=0, keepdim=True)
        advantages = training.algorithm.compare(trajectory).advantages.view(2, 2)
        torch.testing.assert_close(advantages, expected.clamp(-bound, bound), rtol=1e-4, atol=1e-4)
        assert advantages.abs().max() >= 0.5


def test_the_seed_decides_prompts_noisy_steps_and_trained_steps_anew_each_round(make_training, tmp_path):
    csv = write_prompts(tmp_path / "many.csv", [f"prompt {number}" for number in range(50)])
    orders, chosen, noisy = [], [], []
    for seed in (42, 43):
        training = make_training(train_video_csv=csv, seed=seed)
        chosen += [next_steps(training) for _ in range(2)]
        orders.append([training.rounds.next().prompt_indices for _ in range(25)])
        windowed = make_training(train_video_csv=csv, seed=seed, sde_window="per_group", sde_window_size=1)
        noisy += [windowed.algorithm.noisy_steps(index, 4) for index in range(2)]
    assert orders[0] != orders[1] and all_differ(chosen) and all_differ(noisy)
    assert all_differ([*chosen[0]])  # each video has an order of its own
    assert next_steps(make_training(enable_timestep_permutation=False)).tolist() == [[0, 1, 2, 3]] * 4


def test_an_update_takes_as_much_of_each_group_that_a_rank_has_a_part_of(make_training):
    """The first of two ranks has half of both groups: its videos 0 to 3, and 4 to 7."""
    training = make_training(gradient_accumulation_steps=2, updates_per_rollout=3)
    training.config.grpo.num_generations = 8
    training.rounds = Rounds(training.config, training.rounds.prompts, Mesh(layout=Layout(world_size=2)))
    for pairs in next_updates(training):
        assert abs((pairs.sample_index < 4).sum() - (pairs.sample_index >= 4).sum()) <= 1


NFT = ["--algorithm", "nft"]
WINDOW = ["--sde_window", "first", "--sde_window_size"]
OWN = ["--algorithm", "tests.support.reward_weighted:RewardWeighted"]


@pytest.mark.parametrize(
    ("flags", "expected", "num_copies"),
    [
        ([], Evaluations(20, 20, 20), 1),
        (["--kl_weight", "0"], Evaluations(20, 0, 20), 0),
        (["--use_lora", "--use_moving_KL", "false"], Evaluations(20, 20, 20), 0),
        (["--timestep_fraction", "0.6"], Evaluations(20, 12, 12), 1),
        ([*WINDOW, "4"], Evaluations(20, 4, 4), 1),
        ([*WINDOW, "4", "--timestep_fraction", "0.5"], Evaluations(20, 2, 2), 1),
        (["--anchor_fraction", "0.25"], Evaluations(20, 5, 20), 1),
        ([*WINDOW, "1", "--anchor_fraction", "0.5"], Evaluations(20, 1, 1), 1),
        (["--sde_type", "cps"], Evaluations(20, 19, 19), 1),
        (NFT, Evaluations(20, 20, 20), 1),
        ([*NFT, "--timestep_fraction", "0.29"], Evaluations(20, 5, 5), 1),
        ([*NFT, "--algorithm_options", "kl_weight=1e-4", "--timestep_fraction", "0.5"], Evaluations(20, 20, 10), 2),
        ([*NFT, "--algorithm_options", "kl_weight=1e-4", "--use_lora"], Evaluations(20, 40, 20), 1),
        (OWN, Evaluations(20, 0, 20), 0),
    ],
    ids=str,
)
def test_every_step_is_sampled_once_and_trained_steps_cost_one_more_per_phase(flags, expected, num_copies):
    config = load_config(flags)
    algorithm = algorithm_class(config.grpo.algorithm)
    assert (algorithm.evaluations(config), algorithm.num_copies(config)) == (expected, num_copies)


PATH = OWN[1]


def test_an_algorithm_of_ones_own_trains_and_a_resumed_run_equals_an_uninterrupted_one(trained):
    whole, first = (trained(algorithm=PATH, max_steps=steps) for steps in (2, 1))
    assert isinstance(whole.algorithm, RewardWeighted)
    given = first.folder.checkpoints / "step_1"
    resumed = trained(algorithm=PATH, max_steps=2, resume_from_checkpoint=given)
    assert rows_of(resumed.folder.path) == rows_of(whole.folder.path)[1:]
    assert_same(weights_of(resumed), weights_of(whole))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"algorithm": "standard"},
            "there is no 'standard'; expected one of grpo, grpo_one_pass, nft, or module:Class",
        ),
        ({"algorithm": "tests.support.reward_weighted:Missing"}, "cannot be imported"),
        ({"algorithm": "pathlib:Path"}, "must be a subclass of hyvideo.algorithms.algorithm.Algorithm"),
        ({"sde_type": "tests.support.reward_weighted:missing"}, "sde_type: .* cannot be imported"),
        ({"sde_type": "sage"}, "did you mean 'sage_grpo'"),
    ],
)
def test_what_is_no_algorithm_or_sampler_is_refused(make_training, settings, said):
    with pytest.raises(ValueError, match=said):
        make_training(**settings)


def test_it_has_the_final_latents_alone_and_one_that_miscounts_its_updates_is_told_what_its_number_means(make_training):
    training = make_training(algorithm=PATH, updates_per_rollout=2)
    assert training.algorithm.updates_per_round == 1  # as its class says
    rollout = collect_round(training).rollout
    assert rollout.latents.shape[:2] == (4, 1) and rollout.means is None and rollout.log_probs is None
    training = make_training(algorithm=PATH)
    training.algorithm.updates_per_round = 2
    told = "RewardWeighted made 1 updates of a round, but its updates_per_round is 2: .* follows updates_per_rollout, 1"
    with pytest.raises(ValueError, match=told):
        training.train()
    where = training.whereabouts()
    assert where.startswith("Rank 0 failed in phase 'between phases") and "resume" not in where
    assert where.endswith(", update 2. No checkpoint was saved yet.")


def test_the_tutorials_sampler_and_trust_region_train_with_exact_replay_and_equal_pulls(trained, tmp_path, monkeypatch):
    write_shown_files(REPOSITORY / "docs" / "tutorial.md", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    settings = {"algorithm": "ideas.farther:Farther", "sde_type": "ideas.fading:fading", "updates_per_rollout": 2}
    training = trained(**settings, kl_weight=0.01, max_steps=2, mini_batch_size_per_update=6)
    assert training.policy.stochastic_steps().tolist() == [True, True, True, False]
    first, second = rows_of(training.folder.path)
    assert max(first["ratio/max_deviation"], first["replay/mean_error"]) < 1e-5 < first["grad_norm"]
    pulls = torch.tensor([first[f"velocity_grad/step_{step:02d}"] for step in range(3)])
    before = pulls / training.algorithm.scales[:3]
    assert pulls.max() / pulls.min() < 1.4 < before.max() / before.min()
    told = second["loss/policy"] + second["kl/coef"] * max(second["kl/position"], second["kl/velocity"])
    assert second["kl/position"] > 0 and second["loss/total"] == pytest.approx(told, rel=1e-5)


@contextmanager
def another_text_layer(training: Run, trajectory: Trajectory) -> Iterator[Trajectory]:
    del training.policy.pipeline.text_encoder.layers[-1]
    rows = dict(zip(trajectory.conditioning_rows, trajectory.prompts, strict=True))
    conditioning = training.policy.encode([Prompt(rows[row], row, None, None) for row in range(len(rows))])
    yield replace(trajectory, conditioning=conditioning)


@contextmanager
def a_stale_policy(training: Run, trajectory: Trajectory) -> Iterator[Trajectory]:
    moved = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in trainable_parameters(training.policy.transformer).values():
            weight.add_(0.05 * weight.abs().mean() * torch.randn(weight.shape, generator=moved))
    yield trajectory


@contextmanager
def another_attention_kernel(training: Run, trajectory: Trajectory) -> Iterator[Trajectory]:
    with sdpa_kernel(SDPBackend.MATH):
        yield trajectory


def gradient(training: Run, trajectory: Trajectory, *, on_policy: bool) -> tuple[Tensor, dict[str, float]]:
    """The gradient of a round's first update, and its metrics; no weight is changed."""
    algorithm = training.algorithm
    recorder = GradientRecorder(training)
    compared = replace(algorithm.compare(trajectory), anchor_means=trajectory.rollout.means)
    metrics = algorithm.update(compared, compared.updates[0], 0.0, on_policy=on_policy)
    return recorder.gradient, metrics


@pytest.mark.parametrize(
    ("mismatch", "deviation", "ours", "recorded"),
    [
        (another_text_layer, (0.05, 0.5), 0.9, 0.85),
        (a_stale_policy, (0.01, 0.2), 0.98, 0.9),
        (another_attention_kernel, (0.0, 1e-5), 0.999, 1.1),
    ],
)
def test_the_ratio_shows_it_and_the_first_gradient_keeps_its_way(make_training, mismatch, deviation, ours, recorded):
    """Cosines with the gradient of a faithful replay. The clip by recorded ratios silences pairs before any step."""
    training = make_training(clip_range=1e-4)
    trajectory = collect_round(training)
    faithful, metrics = gradient(training, trajectory, on_policy=True)
    assert metrics["ratio/max_deviation"] == 0
    with mismatch(training, trajectory) as replayed:
        on_policy, metrics = gradient(training, replayed, on_policy=True)
        clipped, _ = gradient(training, replayed, on_policy=False)
    assert deviation[0] <= metrics["ratio/max_deviation"] < deviation[1] and metrics["clip_fraction"] == 0
    assert ours < torch.cosine_similarity(faithful, on_policy, dim=0)
    assert torch.cosine_similarity(faithful, clipped, dim=0) < recorded


@pytest.mark.parametrize(
    ("replayed", "cause"),
    [(1, "the rollout computes 4 videos together and the update 1"), (4, "The settings do not explain it")],
)
def test_a_mismatch_is_told_once_with_its_likely_cause(replayed, cause):
    config = load_config(["--config", "configs/tiny.yaml", "--batch_size", "8"])
    config.rollout.rollout_micro_batch_size, config.grpo.mini_batch_size_per_update = 4, replayed
    watch = ReplayWatch(config)
    assert watch.observe({"loss/total": 1.0}) is None  # an algorithm without ratios
    assert watch.observe({"ratio/max_deviation": 1e-4}) is None  # the clip range itself
    told = watch.observe({"ratio/max_deviation": 2e-3})
    assert all(part in told for part in ("ratio/max_deviation is 2.0e-03", "clip_range 0.0001", cause))
    assert watch.observe({"ratio/max_deviation": 2e-3}) is None


def test_a_run_warns_once_and_goes_on_and_only_its_first_updates_are_on_policy(make_training, capsys):
    training = make_training(rollout_micro_batch_size=1, max_steps=2)
    training.policy.pipeline.autocast_dtype = torch.bfloat16
    training.train()
    assert training.state.step == 2 and capsys.readouterr().err.count("ratio/max_deviation is") == 1
    training = make_training(updates_per_rollout=2, clip_range=1e-6, learning_rate=1e-4)
    first, second = training.algorithm.updates(collect_round(training))
    assert first["clip_fraction"] == 0 == first["kl/velocity"]
    assert second["clip_fraction"] > 0 != second["kl/velocity"]


EAGER = {"use_muon": True, "weight_decay": 0.1, "lr_warmup_steps": 0, "updates_per_rollout": 2, "base_interval": 0}


def learnt(training: Run) -> list[Any]:
    """Everything that an update may change, but the number of updates: numbers, and tensors as bytes."""
    optimization, algorithm = training.algorithm.optimization, training.algorithm
    moments = [optimizer.state_dict()["state"] for optimizer in optimization.optimizers]
    state = [weights_of(training), moments, optimization.ema.state_dict(), algorithm.tensors(), algorithm.facts()]
    return [part.numpy().tobytes() if isinstance(part, Tensor) else part for part in tree_leaves(state)]


def only_the_first_round_differs(training: Run) -> None:
    """Score the videos of every later round alike."""
    told, rounds = training.reward, iter(range(9))

    def score(videos: Tensor, prompts: list[str]) -> Scores:
        scores = told(videos, prompts)
        same = {name: torch.full_like(values, 0.3) for name, values in scores.metrics.items()}
        alike = Scores(same, torch.full_like(scores.total, 0.3), scores.weights)
        return alike if next(rounds) else scores

    training.reward = scoring_with(training.reward, score)


@pytest.mark.parametrize("settings", ALGORITHMS.values(), ids=ALGORITHMS)
def test_equal_scores_move_neither_weights_nor_moments_average_anchor_or_controller(make_training, settings):
    """The round before moved them, so that a KL, momentum and decay have something to act on."""
    training = make_training(**{**settings, **EAGER, "max_steps": 4})
    only_the_first_round_differs(training)
    start = weights_of(training)
    training.config.run.max_steps = 2
    training.train()
    before = learnt(training)
    assert any(not torch.equal(start[name], value) for name, value in weights_of(training).items())
    training.config.run.max_steps = 4
    training.algorithm.anchor.refresh = lambda *_: None  # the anchor's own schedule goes on
    training.train()
    assert learnt(training) == before
    rows = read_metrics(training.folder.path / "metrics.jsonl")
    assert [row["update/without_signal"] for row in rows] == [0, 0, 1, 1]
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and training.algorithm.optimization.updates == 4
    assert rows[1]["advantage/largest"] > 0 == rows[2]["advantage/largest"]
    log = (training.folder.path / "console.log").read_text()
    assert "Update 3 left the weights as they were" in log and "Update 2 left" not in log


def test_the_velocity_term_has_no_gradient_in_a_rounds_first_update(make_training):
    """There its value is 0 and its gradient the sampled noise, however large its weight."""
    gradients = {}
    for weight in (0.0, 1e6):
        training = make_training(use_dual_kl=True, dual_kl_step_weight=weight, kl_schedule="fixed")
        trajectory, recorder = collect_round(training), GradientRecorder(training)
        compared = training.algorithm.compare(trajectory)
        metrics = training.algorithm.update(compared, compared.updates[0], 1.0, on_policy=True)
        gradients[weight] = recorder.gradient
        assert metrics["kl/velocity"] == 0
        pairs = support.pairs_of(training, trajectory)[0]
        support.update(training, trajectory, pairs, trajectory.rollout.means, 1.0)
        gradients["later", weight] = recorder.gradient
    assert torch.equal(gradients[0.0], gradients[1e6])
    assert not torch.equal(gradients["later", 0.0], gradients["later", 1e6])


def largest_on(ranks_advantage: list[float]) -> float:
    numbers = {"advantage/largest": torch.tensor(ranks_advantage[torch.distributed.get_rank()])}
    return over_micro_batches([numbers], [1.0], largest={"advantage/largest"})["advantage/largest"]


def test_a_signal_on_any_rank_is_a_signal_for_all():
    assert run_on_ranks(2, largest_on, [0.0, 1.5]) == [1.5, 1.5]
