"""What decides the videos of a round: noise of their own, and the seed."""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from hyvideo.distributed.layout import Layout
from hyvideo.distributed.mesh import Mesh
from hyvideo.training.trainer import Trainer
from tests.support.training import PROMPTS, collect_round, write_prompts


def all_differ(tensors: list[Tensor]) -> bool:
    return not any(torch.equal(first, second) for first, second in combinations(tensors, 2))


def test_every_video_of_every_round_and_seed_starts_from_noise_of_its_own(
    make_trainer: Callable[..., Trainer], tmp_path: Path
):
    csv, starts = write_prompts(tmp_path / "one.csv", PROMPTS[:1]), []
    for seed, round_index in ((42, 0), (42, 1), (43, 0)):
        trainer = make_trainer(train_video_csv=csv, seed=seed, grpo_sampling_steps=1)
        trainer.state.round = round_index
        starts += trainer._collect().rollout.latents[:, 0]
    assert all_differ(starts)


def test_with_one_noise_per_group_its_videos_differ_by_their_steps_alone(make_trainer: Callable[..., Trainer]):
    latents = collect_round(make_trainer(use_same_noise=True)).rollout.latents
    assert torch.equal(latents[0, 0], latents[1, 0]) and torch.equal(latents[2, 0], latents[3, 0])
    assert all_differ([latents[0, 0], latents[2, 0], *latents[:, 1]])


def test_advantages_are_bounded_as_asked(make_trainer: Callable[..., Trainer]):
    advantages = collect_round(make_trainer(adv_clip_max=0.5, grpo_sampling_steps=1)).advantages
    assert advantages.sort().values.tolist() == [-0.5, -0.5, 0.5, 0.5]


def test_the_seed_decides_prompts_noisy_steps_and_trained_steps_anew_each_round(
    make_trainer: Callable[..., Trainer], tmp_path: Path
):
    csv = write_prompts(tmp_path / "many.csv", [f"prompt {number}" for number in range(50)])
    orders, chosen, noisy = [], [], []
    for seed in (42, 43):
        trainer = make_trainer(train_video_csv=csv, seed=seed)
        orders.append([trainer.state.sampler.next_round() for _ in range(25)])
        for trainer.state.round in range(2):
            (pairs,) = trainer._choose_pairs()
            chosen.append(pairs.step_index.view(4, 4).T)  # a row per video
        trainer.config.rollout.sde_window, trainer.config.rollout.sde_window_size = "per_group", 1
        for trainer.state.round in range(2):
            noisy.append(trainer._noisy_steps())
    assert orders[0] != orders[1]
    assert all_differ(chosen) and all_differ(noisy)
    assert all_differ([*chosen[0]])  # each video has an order of its own
    trainer.config.rollout.sde_window, trainer.config.grpo.enable_timestep_permutation = "all", False
    assert trainer._choose_pairs()[0].step_index.view(4, 4).T.tolist() == [[0, 1, 2, 3]] * 4


def test_with_a_stride_every_video_is_trained_at_the_same_evenly_spaced_steps(make_trainer: Callable[..., Trainer]):
    (pairs,) = make_trainer(timestep_stride=True, timestep_fraction=0.5)._choose_pairs()
    assert [sorted(row) for row in pairs.step_index.view(2, 4).T.tolist()] == [[0, 2]] * 4


def test_an_update_takes_as_much_of_each_group_that_a_rank_has_a_part_of(make_trainer: Callable[..., Trainer]):
    """The first of two ranks has half of both groups: its videos 0 to 3, and 4 to 7."""
    trainer = make_trainer(gradient_accumulation_steps=2, updates_per_rollout=3)
    trainer.mesh, trainer.config.grpo.num_generations = Mesh(layout=Layout(2)), 8
    for pairs in trainer._choose_pairs():
        assert abs((pairs.sample_index < 4).sum() - (pairs.sample_index >= 4).sum()) <= 1
