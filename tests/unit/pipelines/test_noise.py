"""Noise belongs to a sample: not to its batch, its rank or the order of computation."""

from dataclasses import replace

import pytest
import torch

from hyvideo.data.samplers import GroupSampler
from hyvideo.distributed.layout import Layout
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import SampleNoise

SHAPE = (4, 2, 2, 2)
NOISE = SampleNoise(seeds=[7, 7, 7, 8], stream="rollout", round=2, prompts=[5, 5, 6, 5], generations=[0, 1, 0, 0])


@pytest.mark.parametrize("rows", [[0], [3, 1], [2, 2, 0]])
def test_a_sample_has_its_noise_in_any_batch_and_order(rows):
    names = ("seeds", "prompts", "generations")
    part = replace(NOISE, **{name: [getattr(NOISE, name)[row] for row in rows] for name in names})
    assert torch.equal(part.step(1, SHAPE), NOISE.step(1, SHAPE)[rows])
    assert torch.equal(part.initial(SHAPE), NOISE.initial(SHAPE)[rows])


def test_a_videos_noise_is_the_same_on_one_rank_and_on_two():
    def drawn(batch_size: int, dp_size: int) -> torch.Tensor:
        ranks = []
        layout = Layout(dp_size, batch_size=batch_size, num_generations=4)
        for rank in range(dp_size):
            sampler = GroupSampler(5, layout.num_groups, 4, layout.positions(rank), seed=1)
            videos = sampler.next_round()
            prompts, generations = zip(*((video.prompt_index, video.generation) for video in videos), strict=True)
            ranks.append(SampleNoise([1] * batch_size, "rollout", 0, prompts, generations).step(3, SHAPE))
        return torch.cat(ranks)

    assert torch.equal(drawn(8, 1), drawn(4, 2))


def test_everything_a_sample_is_changes_its_noise():
    draws = [
        *NOISE.initial(SHAPE),
        *NOISE.step(0, SHAPE),
        *NOISE.step(1, SHAPE),
        *replace(NOISE, round=3).step(0, SHAPE),
        *replace(NOISE, stream="validation").step(0, SHAPE),
    ]
    for i, first in enumerate(draws):
        assert not any(torch.equal(first, second) for second in draws[:i])


def test_a_start_may_repeat_in_every_round_or_be_shared_by_a_group_but_a_step_never():
    second, third = (replace(NOISE, round=index, repeat_initial=True) for index in (2, 3))
    assert torch.equal(second.initial(SHAPE), third.initial(SHAPE))
    assert not torch.equal(second.initial(SHAPE)[0], second.initial(SHAPE)[1])
    assert not torch.equal(second.step(0, SHAPE), third.step(0, SHAPE))
    shared = replace(NOISE, share_initial=True)
    start, step = shared.initial(SHAPE), shared.step(0, SHAPE)
    assert torch.equal(start[0], start[1])
    assert not torch.equal(start[0], start[2])
    assert not torch.equal(step[0], step[1])


def test_noise_is_standard_normal_float32_on_the_cpu():
    noise = NOISE.step(0, (16, 8, 16, 16))
    assert (noise.dtype, noise.device.type) == (torch.float32, "cpu")
    assert noise.mean().abs() < 0.01
    assert abs(noise.std() - 1) < 0.01
