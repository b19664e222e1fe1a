"""The numbers of plans in README.md and docs/planning.md are those that `scripts.plan` gives today."""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.first_light.stages import BUNDLED, REAL_TRUNK, Place, large_run
from hyvideo.config.loading import load_config
from hyvideo.distributed.gpus import find_gpu
from hyvideo.evaluation.original_command import placement
from hyvideo.models.transformer import transformer_flops, video_tokens
from hyvideo.planning.assumptions import Assumptions
from hyvideo.planning.networks import read_networks
from hyvideo.planning.plan import GIB, TIMED, Plan, Search, make_plan
from hyvideo.planning.rehearsal import rehearse
from hyvideo.planning.sampling import rehearse_sampling
from tests.support.training import REPOSITORY as ROOT

PLANNING, README = ROOT / "docs" / "planning.md", ROOT / "README.md"
ONE_GPU = "--sp_size 1 --activation_checkpointing full --batch_size 4 --validation_num_videos 8"
TWO_GPUS = "--batch_size 4 --validation_num_videos 8"
VIDEO = "--validation_fixed_size 480x848 --validate_video_length 121"
NFT = "configs/method/nft.yaml"
pytestmark = pytest.mark.usefixtures("at_the_root")


def rows_of(page: Path, header: str) -> list[list[str]]:
    """The cells of the table whose first column is called so, of those with as many columns as the header."""
    _, _, rest = page.read_text(encoding="utf-8").partition(f"\n| {header} |")
    lines = [line for line in rest.split("\n\n")[0].splitlines()[2:] if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def recipe(world_size: int, *more: str) -> list[str]:
    return ["--config", f"configs/sage_{max(8, world_size)}gpu.yaml", *more]


@functools.cache
def planned(world_size: int, flags: tuple[str, ...], gpu: str = "H100", assumed: Assumptions | None = None) -> Plan:
    config, assumed = load_config(list(flags)), assumed or Assumptions()
    return make_plan(config, world_size=world_size, gpu=find_gpu(gpu), assumptions=assumed)


def seconds(world_size: int, *flags: str) -> float:
    return sum(planned(world_size, flags).seconds.values())


def about(value: float, cell: str) -> bool:
    """Whether a cell says a value, within 1 % and what it is rounded to."""
    number = cell.replace(",", "").split()[0]
    return abs(value - float(number)) <= 0.01 * value + 0.5 / 10 ** len(number.partition(".")[2])


def flags_in(cell: str) -> list[str]:
    named = re.search(r"`((?:--)?\w+ [\w.]+)`", cell)
    return f"--{named[1].removeprefix('--')}".split() if named else []


@pytest.mark.slow
def test_the_assumed_utilisation_is_what_an_h200_reached_by_the_operations_that_plans_count():
    measured = json.loads((ROOT / "benchmarks/results/first_light/nvidia-h200.json").read_text(encoding="utf-8"))
    took = measured["findings"]["rank/compiled/round 1"]["seconds"]
    config = large_run(Place(Path(), small=False), "rank_compiled")
    config = replace(config, model=replace(config.model, pretrained_model_root=str(BUNDLED)))
    bundled = read_networks(config.model, config.reward)
    networks = replace(bundled, transformer=bundled.transformer | REAL_TRUNK)
    done = rehearse(config, networks, world_size=8, num_text=15)
    flops = sum(done.flops[phase] for phase in TIMED)
    reached = f"{flops / took / find_gpu('H200').teraflops / 1e12:.2f}"
    assert f"{Assumptions().utilisation:.2f}" == reached
    page = " ".join(PLANNING.read_text(encoding="utf-8").split())
    assert f"at `--utilisation` ({reached})" in page and f"reached {reached} with compiled blocks" in page
    assert f"it executed {flops / 1e15:.2f}e15 operations, by the plan's own count, in {took:.1f} s" in page


def test_the_page_says_what_padding_costs_at_the_recipes_size():
    config = load_config(recipe(8))
    networks = read_networks(config.model, config.reward)
    num_video = video_tokens(networks.transformer, (32, 21, 22, 39))  # 81 frames of 352x624
    trimmed = transformer_flops(networks.transformer, num_video=num_video, num_text=Assumptions().num_text)
    padded = transformer_flops(networks.transformer, num_video=num_video, num_text=1000, num_glyph=256, num_vision=729)
    # rollout, anchor and update forward; backward twice the linear layers, and 2.5 times fused attention
    padded_round, trimmed_round = (5 * flops.linear + 5.5 * flops.attention for flops in (padded, trimmed))
    page = " ".join((ROOT / "docs" / "performance.md").read_text(encoding="utf-8").split())
    costs = f"{padded_round / trimmed_round:.2f} times"
    assert f"has {num_video:,} tokens, so that padding costs {costs} the operations of a round" in page
    readme = " ".join(README.read_text(encoding="utf-8").split())
    assert f"whose padding costs real videos of {num_video:,} tokens only {costs} as many operations" in readme


@pytest.mark.slow
def test_the_network_that_the_recipe_for_64_gpus_asks_for_is_the_slowest_that_does_not_hold_it_up():
    def takes(network: float) -> float:
        assumed = Assumptions(network=network)
        return sum(planned(64, tuple(recipe(64)), assumed=assumed).seconds.values())

    comment = (ROOT / "configs" / "sage_64gpu.yaml").read_text(encoding="utf-8")
    enough = int(re.search(r"sends (\d+) GB/s to", comment)[1])
    assert takes(enough) == takes(1e9) < takes(enough - 1)
    assert f"at 1 GB/s an update takes {takes(1):.0f} s instead of {takes(enough):.0f})" in comment
    plan = planned(64, tuple(recipe(64)))
    assert f"leave it: {plan.leaving / 1e9:.0f} GB per GPU" in comment
    assert f"of 64 GPUs sends, {plan.leaving / 1e9:.0f} GB leave its machine" in PLANNING.read_text(encoding="utf-8")


@pytest.mark.slow
def test_readme_and_page_have_one_answer_for_gpus_of_40_gb():
    (cell,) = (cells[1] for cells in rows_of(README, "I want to") if cells[0] == "use eight GPUs of 40 GB")
    flags = re.search("`(.+?)`", cell)[1]
    plan = planned(8, (*recipe(8), *flags.split()), "A100-40GB")
    needed, update = re.search(r"([\d.]+) GiB with reserve, by plan (\d+) s per update on A100s", cell).groups()
    assert plan.fits and about(plan.needed, needed) and about(sum(plan.seconds.values()), update)
    page = " ".join(PLANNING.read_text(encoding="utf-8").split("**Eight GPUs of 40 GB**")[1].split("\n\n")[0].split())
    peak = re.search(r"([\d.]+) GiB \(([\d.]+) with the reserve\)", page)
    assert f"`{flags}`" in page and about(plan.rehearsal.peak / GIB, peak[1]) and peak[2] == needed
    assert f"{update} s per update on A100s" in page


@pytest.mark.slow
@pytest.mark.parametrize("row", rows_of(PLANNING, "GPUs | video"), ids=" ".join)
def test_the_table_of_recipes(row: list[str]):
    world_size = int(row[0])
    plan = planned(world_size, (*recipe(world_size, "--rollout_size", row[1].split(",")[0]), *flags_in(row[1])))
    done, update = plan.rehearsal, sum(plan.seconds.values())
    told = [done.peaks[phase] / GIB for phase in ("rollout", "reward", "anchor", "update")]
    told += [plan.flops * world_size / plan.videos / 1e15]
    told += [sum(done.sent_in(phase, "weights") for phase in TIMED) / 1e9, update, plan.videos * 3600 / update]
    assert all(about(value, cell) for value, cell in zip(told, row[2:], strict=True)), told
    assert plan.fits


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in rows_of(PLANNING, "GPUs | video") if flags_in(row[1])], ids=" ".join)
def test_the_first_advice_for_a_recipe_that_does_not_fit_is_the_pages_flag(row: list[str]):
    world_size, (flag, value) = int(row[0]), flags_in(row[1])
    config = load_config(recipe(world_size, "--rollout_size", row[1].split(",")[0]))
    advice = Search(config, world_size, find_gpu("H100"), Assumptions(), print).nearest_that_fits()
    assert advice is not None and advice[0] == {flag.removeprefix("--"): value}


@pytest.mark.slow
@pytest.mark.parametrize(("config", "gpu"), [("one_gpu_48gb", "L40S"), ("one_gpu_24gb", "RTX 4090")])
def test_the_paragraph_and_the_config_of_one_gpu(config: str, gpu: str):
    plan = planned(1, ("--config", f"configs/{config}.yaml"), gpu)
    assert plan.fits and plan.seconds is not None
    peak, update = plan.rehearsal.peak / GIB, sum(plan.seconds.values())
    page = " ".join(PLANNING.read_text(encoding="utf-8").split("**One GPU of 48 GB**")[1].split("\n\n")[0].split())
    assert any(about(peak, cell) for cell in re.findall(r"([\d.]+) (?:GiB|of GPU)", page))
    assert any(about(update, cell) for cell in re.findall(r"(\d+) s\b", page))
    comment = (ROOT / "configs" / f"{config}.yaml").read_text(encoding="utf-8")
    told = re.search(r"([\d.]+) GiB \(([\d.]+) with the reserve\)", comment)
    assert about(peak, told[1]) and about(plan.needed, told[2]) and f"{update / 60:.0f} minutes" in comment


@pytest.mark.slow
@pytest.mark.parametrize("row", rows_of(README, "GPUs | trained"), ids=" ".join)
def test_the_table_of_the_readme(row: list[str]):
    world_size, adapter = int(row[0]), row[1] == "adapter"
    more = {1: ONE_GPU, 2: TWO_GPUS}.get(world_size, "")
    flags = recipe(world_size, *(["configs/lora.yaml"] if adapter else []), *more.split(), "--max_steps", "100")
    plan = planned(world_size, tuple(flags))
    update = sum(plan.seconds.values()) / (1 if row[4].endswith(" s") else 60)
    told = [plan.needed, plan.videos, update, sum(plan.hours.values()) * world_size, plan.checkpoint_bytes / 1e9]
    assert all(about(value, cell) for value, cell in zip(told, row[2:], strict=True)), told
    assert plan.fits


@pytest.mark.slow
@pytest.mark.parametrize("row", rows_of(PLANNING, "GPUs | trained"), ids=" ".join)
def test_the_table_of_algorithms(row: list[str]):
    world_size = int(row[0])
    pieces = ["configs/lora.yaml"] if row[1].startswith("adapter") else []
    more = ONE_GPU.split() if world_size == 1 else []
    told = [
        seconds(world_size, *recipe(world_size, *pieces, *algorithm), *more, *guidance)
        for algorithm, guidance in (([], []), ([NFT], []), ([NFT], ["--cfg_scale", "1"]))
    ]
    assert all(about(value, cell) for value, cell in zip(told, row[2:], strict=True)), told


@pytest.mark.slow
@pytest.mark.parametrize("row", rows_of(ROOT / "docs" / "weights.md", "`--offload`"), ids=" ".join)
def test_the_table_of_sampling_on_a_small_gpu(row: list[str]):
    adapter = "--use_lora --lora_target_modules all-linear --lora_r 64" if "adapter of rank 64" in row[0] else ""
    config = load_config([*VIDEO.split(), *adapter.split()])
    offload = placement(re.search(r"`(\w+)`", row[0])[1])
    found = rehearse_sampling(config, read_networks(config.model, config.reward), offload)
    peaks = [peak / GIB for peak in found.peaks.values()]
    needed = max(peaks) + Assumptions().reserved(max(peaks))
    assert all(about(value, cell) for value, cell in zip([*peaks, needed], row[2:], strict=True)), [*peaks, needed]
    assert offload != "group" or needed < 14


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in rows_of(PLANNING, "setting") if flags_in(row[0])], ids=" ".join)
def test_the_table_of_settings(row: list[str]):
    told = [seconds(8, *recipe(8), *flags_in(row[0]), "--rollout_size", size) for size in ("352x624", "480x864")]
    assert all(about(value, cell) for value, cell in zip(told, row[1:3], strict=True)), told
