"""Every committed YAML file loads, says only what it should, and passes the checks at its number of ranks."""

import pytest

from hyvideo.config.loading import load_config
from hyvideo.distributed.mesh import layout_of
from hyvideo.training.checks import check_config, unread_settings
from tests.support.training import REPOSITORY as ROOT

WORLD_SIZES = {"configs/tiny.yaml": 1, "configs/sage_8gpu.yaml": 8, "configs/sage_64gpu.yaml": 64}
WORLD_SIZES |= {"configs/one_gpu_24gb.yaml": 1, "configs/one_gpu_48gb.yaml": 1}
FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*") if path.is_file())
PIECES = [file for file in FILES if file not in WORLD_SIZES]
UNREAD = ("configs/tiny.yaml", "configs/method/nft.yaml")
"""The first also has settings of GRPO's KL, which the second does not read."""

pytestmark = pytest.mark.usefixtures("at_the_root")


@pytest.mark.parametrize("piece", [None, *PIECES])
@pytest.mark.parametrize("file", [None, "configs/lora.yaml", *WORLD_SIZES])
def test_every_config_and_every_piece_over_it_runs_on_its_number_of_ranks_and_is_read_whole(file, piece, prompts_csv):
    files, csv = [name for name in (file, piece) if name], str(prompts_csv)
    prompts = ["--train_video_csv", csv, "--valid_video_csv", csv]
    config = load_config([*(["--config", *files] if files else []), *prompts])
    check_config(config, WORLD_SIZES.get(file, 8))
    assert (file, piece) == UNREAD or list(unread_settings(config)) == []


@pytest.mark.parametrize("file", ["configs/sage_8gpu.yaml", "configs/sage_64gpu.yaml"])
def test_the_large_configs_say_that_prompts_are_missing(file):
    with pytest.raises(ValueError, match="train_video_csv is empty"):
        check_config(load_config(["--config", file]), WORLD_SIZES[file])


def test_the_64_gpu_config_samples_64_videos_of_16_prompts_as_the_release_recommends():
    config = load_config(["--config", "configs/sage_64gpu.yaml"])
    layout = layout_of(config, 64)
    assert (layout.num_videos // layout.num_rollouts, layout.num_groups // layout.num_rollouts) == (64, 16)


@pytest.mark.parametrize(
    ("name", "expected"), [("sage", "sage_grpo"), ("dance", "dance_grpo"), ("flow", "flow_grpo"), ("cps", "cps")]
)
def test_a_method_changes_the_transition_alone(name, expected):
    cfg, plain = load_config(["--config", f"configs/method/{name}.yaml"]), load_config([])
    assert cfg.rollout.sde_type == expected
    cfg.rollout.sde_type, cfg.run.run_name = plain.rollout.sde_type, plain.run.run_name
    assert cfg == plain


def test_the_adapters_config_changes_what_an_adapter_needs_alone():
    cfg, plain = load_config(["--config", "configs/lora.yaml"]), load_config([])
    assert (cfg.model.use_lora, cfg.optimizer.use_muon, cfg.optimizer.learning_rate) == (True, False, 1e-4)
    cfg.model, cfg.optimizer, cfg.run.run_name = plain.model, plain.optimizer, plain.run.run_name
    assert cfg == plain


KL = {"none": (0.0, True, True, 1.0), "fixed": (1e-5, False, False, 1.0), "step": (1e-5, True, True, 0.0)}
KL |= {"moving": (1e-5, True, False, 1.0), "dual": (1e-5, True, True, 1.0)}


@pytest.mark.parametrize(("name", "expected"), KL.items())
def test_kl_strategies_are_those_of_the_papers_figure_8(name, expected):
    kl = load_config(["--config", f"configs/kl/{name}.yaml"]).kl
    assert (kl.kl_weight, kl.use_moving_KL, kl.use_dual_kl, kl.dual_kl_moving_weight) == expected
