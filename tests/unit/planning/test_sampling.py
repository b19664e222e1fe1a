"""The memory of sampling a video: what rests in host memory is not counted, and the plan says what does not fit."""

from functools import cache

import pytest
from torch import nn

from hyvideo.config.loading import load_config
from hyvideo.models.loading import load_pipeline
from hyvideo.models.upsampler import SRTo720pUpsampler
from hyvideo.planning.networks import read_networks
from hyvideo.planning.sampling import rehearse_sampling
from scripts.plan import main

TINY = ("--pretrained_model_root", "assets/tiny", "--validation_fixed_size", "64x64", "--validate_video_length", "33")


@cache
def peaks(offload: bool | str, *flags: str) -> dict[str, float]:
    config = load_config([*TINY, *flags])
    return rehearse_sampling(config, read_networks(config.model, config.reward), offload, num_text=20).peaks


def test_whole_networks_on_the_gpu_count_one_by_one_and_groups_as_two_blocks_and_what_is_around_them():
    pipeline = load_pipeline("assets/tiny", scheduler=None)
    networks = {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}
    held = {name: sum(p.numel() for p in network.parameters()) for name, network in networks.items()}
    others = 2 * held["text_encoder"] + 4 * held["text_encoder_2"] + 2 * held["vae"]
    blocks = [2 * sum(p.numel() for p in block.parameters()) for block in pipeline.transformer.transformer_blocks]
    everything, networks, group = (peaks(offload)["denoise"] for offload in (False, True, "group"))
    assert everything - networks == pytest.approx(others, rel=0.01)
    assert networks - group == pytest.approx(sum(blocks[2:]), rel=0.01)
    assert peaks("group")["encode"] < peaks(True)["encode"] and peaks("group")["decode"] < peaks(True)["decode"]


def test_the_plan_of_sampling_says_whether_it_fits(capsys: pytest.CaptureFixture):
    argv = ["--world_size", "1", "--sampling", "group", "--gpu", "RTX 4090", *TINY]
    assert main(argv) == 0
    assert "of 23 GiB: it fits" in capsys.readouterr().out
    assert main([*argv, "--reserve", "23"]) == 1
    assert "it does not fit" in capsys.readouterr().out


def test_super_resolution_is_planned_with_its_own_network_size_and_steps(capsys: pytest.CaptureFixture):
    flags = "--pretrained_model_root assets/tiny --validation_fixed_size 640x640 --validate_video_length 1"
    config = load_config([*flags.split(), "--validation_num_inference_steps", "3"])
    networks = read_networks(config.model, config.reward)
    plain, sharp = (rehearse_sampling(config, networks, True, num_text=20, sr=sr) for sr in (False, True))
    assert (list(plain.peaks), list(sharp.peaks)[2]) == (["encode", "denoise", "decode"], "sharpen")
    upsampler = sum(4 * weight.numel() for weight in SRTo720pUpsampler(8, 8).parameters())  # it stays on the GPU
    assert sharp.peaks["denoise"] - plain.peaks["denoise"] == pytest.approx(upsampler, rel=0.01)
    assert sharp.peaks["sharpen"] > sharp.peaks["denoise"]
    assert sharp.peaks["decode"] > plain.peaks["decode"] and sharp.flops["denoise"] == plain.flops["denoise"]
    once = 2 * upsampler / 4 * 60 * 60  # every weight of the upsampler at every latent
    per_step = (sharp.flops["sharpen"] - once) / 6 / (sharp.flops["denoise"] / 3 / 2)  # 6 steps, and 3 with guidance
    assert 960**2 / 640**2 < per_step < (960 / 640) ** 4  # linear layers grow with the pixels, attention faster
    argv = ["--world_size", "1", "--sampling", "true", "--sr", *flags.split()]
    assert main([*argv, "--validation_fixed_size", "64x64"]) == 2
    assert "nearest is --fixed_size 640x640" in capsys.readouterr().err
    assert main([*argv[:2], *argv[4:]]) == 2 and "--sr goes with --sampling" in capsys.readouterr().err
    assert main([*argv, "--pretrained_transformer_version", "1080p"]) == 2
    assert "only versions of 480p and 720p are sharpened" in capsys.readouterr().err
