"""A round of every committed recipe, two blocks deep, has no surprise on GPUs that do not exist."""

from dataclasses import replace
from pathlib import Path

import pytest

from hyvideo.config.loading import load_config
from hyvideo.planning.networks import read_networks
from hyvideo.planning.rehearsal import rehearse
from tests.support.training import REPOSITORY

CONFIGS = REPOSITORY / "configs"
BASE, FEW = ("configs/sage_8gpu.yaml",), "--grpo_sampling_steps 2 --mini_batch_size_per_update 1".split()
FEW += "--validation_num_inference_steps 2".split()
RECIPES = [(8, BASE), (1, ("configs/one_gpu_24gb.yaml",)), (8, (*BASE, "configs/method/nft.yaml"))]
RECIPES += [(8, (*BASE, "configs/lora.yaml", "configs/kl/dual.yaml")), (8, (*BASE, "configs/distilled.yaml"))]
LIKE_THEM = [
    (64, ("configs/sage_64gpu.yaml", "configs/accumulate_4.yaml", "configs/reward/a.yaml")),
    (8, (*BASE, "configs/published.yaml", "configs/reward/b.yaml")),
    (1, ("configs/one_gpu_48gb.yaml",)),
    (8, (*BASE, "configs/method/sage.yaml", "configs/kl/step.yaml")),
    (8, (*BASE, "configs/method/dance.yaml", "configs/kl/fixed.yaml")),
    (8, (*BASE, "configs/method/flow.yaml", "configs/kl/moving.yaml")),
    (8, (*BASE, "configs/method/cps.yaml", "configs/kl/none.yaml")),
]


@pytest.mark.usefixtures("at_the_root")
@pytest.mark.parametrize(
    ("world_size", "files"),
    [*RECIPES, *(pytest.param(*recipe, marks=pytest.mark.slow) for recipe in LIKE_THEM)],
    ids=lambda value: Path(value[-1]).stem if isinstance(value, tuple) else str(value),
)
def test_a_recipe_runs_on_gpus_without_a_surprise(world_size, files):
    config = load_config(["--config", *files, *FEW])
    networks = read_networks(config.model, config.reward)
    shallow = replace(networks, transformer={**networks.transformer, "num_layers": 2})
    assert rehearse(config, shallow, world_size=world_size).surprises == ()


def test_no_recipe_is_left_out():
    rehearsed = {name for _, files in RECIPES + LIKE_THEM for name in files}
    own = {"configs/tiny.yaml", "configs/demo.yaml"}  # which tests run on real tensors
    assert {str(path.relative_to(REPOSITORY)) for path in CONFIGS.rglob("*.yaml")} == rehearsed | own
