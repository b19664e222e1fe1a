"""Encoders that rest in host memory read the prompts of many rounds at one visit to the device."""

from unittest.mock import patch

import pytest

from tests.support.training import collect_round


@pytest.mark.parametrize(("ahead", "expected"), [(32, [4, 4, 4, 4]), (1, [2, 2, 4, 4]), (0, [1, 2, 3, 4])])
def test_prompts_are_encoded_ahead_up_to_the_bound(make_training, monkeypatch, ahead: int, expected: list[int]):
    monkeypatch.setattr("hyvideo.training.collect.AHEAD", ahead)
    training, staying = (make_training(offload=offload, batch_size=2) for offload in ("encoders", None))
    pipeline, seen = training.policy.pipeline, []
    with patch.object(pipeline, "encode_prompts", wraps=pipeline.encode_prompts) as encode:
        for _ in range(4):  # a prompt each
            received, wanted = collect_round(training), collect_round(staying)
            assert received.rollout.latents.equal(wanted.rollout.latents)
            seen.append(encode.call_count)
    assert seen == expected
    assert len({call.args[0][0] for call in encode.call_args_list}) == 4


def test_a_validation_reads_all_its_prompts_at_one_visit_however_few_it_samples_at_once(make_training):
    at_once = {"rollout_micro_batch_size": 2, "validation_num_videos": 4, "validation_interval": 1}
    training, staying = (make_training(offload=offload, **at_once).validation for offload in ("encoders", None))
    pipeline, prompts = training.policy.pipeline, training.prompts
    with patch.object(pipeline, "encode_prompts", wraps=pipeline.encode_prompts) as encode:
        assert training.sample(prompts).videos.equal(staying.sample(prompts).videos) and len(prompts) == 4
    assert [call.args[0] for call in encode.call_args_list] == [prompts]
