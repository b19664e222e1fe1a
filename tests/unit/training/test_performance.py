"""perf/*: needed operations over seconds, by hand."""

import pytest

from hyvideo.models.flops import transformer_flops
from hyvideo.training.run import Performance
from tests.support.training import collect_round

SECONDS = {"time/rollout": 2.0, "time/reward": 1.0, "time/anchor": 1.0, "time/update": 4.0}


@pytest.mark.parametrize(("cfg_scale", "use_lora"), [(1.0, False), (4.0, False), (1.0, True)])
def test_utilisation_counts_each_evaluation_of_valid_tokens(make_training, cfg_scale: float, use_lora: bool):
    training = make_training(cfg_scale=cfg_scale, use_lora=use_lora, updates_per_rollout=2)
    trajectory = collect_round(training)
    policy = training.policy
    performance = Performance(policy, training.config, training.mesh, peak_tflops=1e-3, updates_per_round=2)
    row = performance.row(trajectory, 8, SECONDS)

    config = policy.transformer.config
    conditions = [trajectory.conditioning] + ([policy.guidance.negative] if cfg_scale != 1.0 else [])
    texts = [(len(c.text[i]), len(c.glyph[i])) for c in conditions for i in range(len(c))]
    passes = [transformer_flops(config, num_video=8, num_text=text, num_glyph=glyph) for text, glyph in texts]
    per_video = [passes[prompt].total + sum(p.total for p in passes[2:]) for prompt in (0, 0, 1, 1)]
    linear = [passes[prompt].linear for prompt in (0, 0, 1, 1)]
    assert row["perf/mfu_rollout"] == pytest.approx(4 * sum(per_video) / 2.0 / 1e9)
    trained = 2 * (3 * sum(per_video) - (sum(linear) if use_lora else 0))  # each update has two steps of each video
    assert row["perf/mfu_update"] == pytest.approx(trained / 4.0 / 1e9)
    assert row["perf/videos_per_gpu_hour"] == pytest.approx(3600 * 4 / 8.0)

    later = performance.row(trajectory, 8, SECONDS | {"time/rollout": 0.0, "time/reward": 0.0})
    assert later["perf/mfu_rollout"] == row["perf/mfu_rollout"]
    assert later["perf/videos_per_gpu_hour"] == pytest.approx(3600 * 4 / (8.0 + 5.0))
