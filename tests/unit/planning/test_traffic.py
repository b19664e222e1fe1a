"""Bytes sent, by hand; `tests/distributed/test_communication.py` counts them in real collectives."""

import pytest

from hyvideo.planning.traffic import ParameterCounts, Traffic, count_parameters, token_traffic, weight_traffic
from tests.support.tiny_model import build_transformer

REAL = {
    "num_attention_heads": 16,
    "attention_head_dim": 128,
    "num_layers": 54,
    "patch_size": 1,
    "patch_size_t": 1,
    "out_channels": 32,
}


def test_64_gpus_send_what_the_formulas_of_sharding_give():
    """8.33e9 weights over 64 ranks: bf16 gathered twice, float32 gradients once; 34,020 tokens over two ranks."""
    parameters = ParameterCounts(8_165_000_000, 165_000_000, 8_330_000_000, 0)
    sizes = {"num_shards": 64, "block_bytes": 2, "around_bytes": 4}
    forward = weight_traffic(parameters, **sizes, training=False)
    both = weight_traffic(parameters, **sizes, training=True)
    assert forward.weights == pytest.approx((2 * 8.165e9 + 4 * 0.165e9) * 63 / 64)
    assert both.weights - 2 * forward.weights == pytest.approx(4 * 8.33e9 * 63 / 64)
    tokens = token_traffic(REAL, num_video=34_020, num_condition=300, sp_size=2, token_bytes=2, training=False)
    assert tokens.tokens == pytest.approx(54 * 4 * 2 * 17_010 * 2048 / 2) == pytest.approx(7.5e9, rel=0.01)


def test_a_training_pass_sends_tokens_again_for_what_is_recomputed_and_for_gradients():
    sizes = {"num_video": 100, "num_condition": 10, "sp_size": 4}
    once = token_traffic(REAL, **sizes, training=False).tokens
    assert token_traffic(REAL, **sizes, training=True).tokens == 2 * once
    assert token_traffic(REAL, **sizes, training=True, recompute=True).tokens == 3 * once
    assert token_traffic(REAL, **sizes, rows=2, training=False).tokens == 2 * once


def test_one_rank_sends_nothing():
    parameters = ParameterCounts(100, 10, 110, 90)
    assert weight_traffic(parameters, num_shards=1, training=True) == Traffic()
    sizes = {"num_video": 100, "num_condition": 10, "sp_size": 1}
    assert token_traffic(REAL, **sizes, training=True, recompute=True) == Traffic()


def test_copies_reduce_each_shards_gradients_and_traffic_adds_up():
    parameters = ParameterCounts(800, 0, 800, 0)
    assert weight_traffic(parameters, num_shards=4, dp_replicate=2, training=True).copies == 2 * (4 * 800 // 4) // 2
    assert weight_traffic(parameters, num_shards=4, dp_replicate=2, training=False).copies == 0
    assert (Traffic(1, 2, 3, 4) + Traffic(10, 20, 30, 40)).times(2) == Traffic(22, 44, 66, 88)


def test_weights_are_counted_by_where_they_are_and_whether_they_are_trained():
    transformer = build_transformer().requires_grad_(False)
    transformer.proj_out.requires_grad_(True)
    transformer.transformer_blocks[0].attn.norm_q.requires_grad_(True)
    counts = count_parameters(transformer)
    assert counts.total == sum(parameter.numel() for parameter in transformer.parameters())
    assert counts.blocks == sum(parameter.numel() for parameter in transformer.transformer_blocks.parameters())
    trained = (*transformer.proj_out.parameters(), transformer.transformer_blocks[0].attn.norm_q.weight)
    assert counts.trained == sum(parameter.numel() for parameter in trained)
    assert counts.trained_matrices == transformer.proj_out.weight.numel()
