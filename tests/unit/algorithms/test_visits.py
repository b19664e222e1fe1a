"""Encoders that rest in host memory read the prompts of many rounds at one visit to the device."""

import pytest

from hyvideo.data.prompts import Prompt
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import HunyuanVideoGRPOPipeline
from tests.support.training import collect_round


def reads_of(pipeline: HunyuanVideoGRPOPipeline, monkeypatch: pytest.MonkeyPatch) -> list[list[Prompt]]:
    """Return a list to which the prompts of every call of the encoders will be added."""
    read, encode = [], pipeline.encode_prompts
    monkeypatch.setattr(
        pipeline, "encode_prompts", lambda prompts, size: (read.append(list(prompts)), encode(prompts, size))[1]
    )
    return read


@pytest.mark.parametrize(("ahead", "expected"), [(32, [4, 4, 4, 4]), (1, [2, 2, 4, 4]), (0, [1, 2, 3, 4])])
def test_prompts_are_encoded_ahead_up_to_the_bound(make_training, monkeypatch, ahead: int, expected: list[int]):
    monkeypatch.setattr("hyvideo.training.collect.AHEAD", ahead)
    training, staying = (make_training(offload=offload, batch_size=2) for offload in ("encoders", None))
    read, seen = reads_of(training.policy.pipeline, monkeypatch), []
    for _ in range(4):  # a prompt each
        received, wanted = collect_round(training), collect_round(staying)
        assert received.rollout.latents.equal(wanted.rollout.latents)
        seen.append(len(read))
    assert seen == expected
    assert len({prompt for prompts in read for prompt in prompts}) == 4


def test_a_validation_reads_all_its_prompts_at_one_visit_however_few_it_samples_at_once(make_training, monkeypatch):
    at_once = {"rollout_micro_batch_size": 2, "validation_num_videos": 4, "validation_interval": 1}
    training, staying = (make_training(offload=offload, **at_once) for offload in ("encoders", None))
    prompts = training.validation.prompts
    read = reads_of(training.validation.policy.pipeline, monkeypatch)
    received, wanted = (each.validation.sample(prompts).videos for each in (training, staying))
    assert read == [list(prompts)] and len(prompts) > 2 and received.equal(wanted)
