"""perf/*: needed operations over seconds, by hand."""

from collections.abc import Callable

import pytest

from hyvideo.models.flops import transformer_flops
from hyvideo.training.performance import Performance
from hyvideo.training.trainer import Trainer
from tests.support.training import collect_round, pairs_of

SECONDS = {"time/rollout": 2.0, "time/reward": 1.0, "time/anchor": 1.0, "time/update": 4.0}


@pytest.mark.parametrize(("cfg_scale", "use_lora"), [(1.0, False), (4.0, False), (1.0, True)])
def test_utilisation_counts_each_evaluation_of_valid_tokens(
    make_trainer: Callable[..., Trainer], cfg_scale: float, use_lora: bool
):
    trainer = make_trainer(cfg_scale=cfg_scale, use_lora=use_lora, updates_per_rollout=2)
    trajectory = collect_round(trainer)
    first, second = pairs_of(trainer, trajectory, num_updates=2)
    update = trainer.update
    performance = Performance(update.pipeline, update.guidance, trainer.config, trainer.mesh, peak_tflops=1e-3)
    row = performance.row(trajectory, first, SECONDS)

    config = update.pipeline.transformer.config
    conditions = [trajectory.conditioning] + ([update.guidance.negative] if cfg_scale != 1.0 else [])
    texts = [(int(c.text_mask[i].sum()), int(c.glyph_mask[i].sum())) for c in conditions for i in range(len(c))]
    passes = [transformer_flops(config, num_video=8, num_text=text, num_glyph=glyph) for text, glyph in texts]
    per_video = [passes[prompt].total + sum(p.total for p in passes[2:]) for prompt in (0, 0, 1, 1)]
    linear = [passes[prompt].linear for prompt in (0, 0, 1, 1)]
    assert row["perf/mfu_rollout"] == pytest.approx(4 * sum(per_video) / 2.0 / 1e9)
    trained = 2 * (3 * sum(per_video) - (sum(linear) if use_lora else 0))  # each update has two steps of each video
    assert row["perf/mfu_update"] == pytest.approx(trained / 4.0 / 1e9)
    assert row["perf/videos_per_gpu_hour"] == pytest.approx(3600 * 4 / 8.0)

    later = performance.row(trajectory, second, SECONDS | {"time/rollout": 0.0, "time/reward": 0.0})
    assert later["perf/mfu_rollout"] == row["perf/mfu_rollout"]
    assert later["perf/videos_per_gpu_hour"] == pytest.approx(3600 * 4 / (8.0 + 5.0))
