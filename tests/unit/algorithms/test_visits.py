"""Encoders that rest in host memory read the prompts of many rounds at one visit to the device."""

import pytest

from tests.support.training import collect_round


@pytest.mark.parametrize(("ahead", "expected"), [(32, [4, 4, 4, 4]), (1, [2, 2, 4, 4]), (0, [1, 2, 3, 4])])
def test_prompts_are_encoded_ahead_up_to_the_bound(make_training, monkeypatch, ahead: int, expected: list[int]):
    monkeypatch.setattr("hyvideo.training.collect.AHEAD", ahead)
    training, staying = (make_training(offload=offload, batch_size=2) for offload in ("encoders", None))
    pipeline, read, seen = training.policy.pipeline, [], []
    encode = pipeline.encode_prompts
    monkeypatch.setattr(
        pipeline, "encode_prompts", lambda prompts, size: (read.extend(prompts), encode(prompts, size))[1]
    )
    for _ in range(4):  # a prompt each
        received, wanted = collect_round(training), collect_round(staying)
        assert received.rollout.latents.equal(wanted.rollout.latents)
        seen.append(len(read))
    assert seen == expected
    assert len(set(read)) == 4
