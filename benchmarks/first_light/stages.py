"""What is tried and measured, each stage in a process of its own. A stage yields findings: a name and numbers."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from diffusers import HunyuanVideo15Transformer3DModel
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel, Qwen2VLConfig
from transformers.modeling_utils import local_torch_dtype

from benchmarks.first_light import second_visit
from benchmarks.first_light.second_visit import Findings
from benchmarks.paired import device, median_seconds
from benchmarks.plain_loop import make_round
from benchmarks.rewards import GRID, qwen2_language, video_reward, videoreward_config
from hyvideo.config.loading import load_config
from hyvideo.config.schema import Config
from hyvideo.observability.metrics import read_metrics
from hyvideo.planning.networks import encoder_configs, make_vae, read_networks
from hyvideo.planning.peak_memory import PeakMemory
from hyvideo.planning.rehearsal import rehearse, told_by_this_rank
from hyvideo.training.build import open_run
from hyvideo.training.run import Run
from scripts.reports.improvement import read_held_out

GIB = 2**30


@dataclass(frozen=True)
class Place:
    """Where a stage runs: its folder for runs and models, and whether small sizes are for a CPU."""

    folder: Path
    small: bool


@dataclass(frozen=True)
class Stage:
    """What makes findings, in one of the parts; it is stopped after so many seconds."""

    part: int
    seconds: int
    run: Callable[[Place], Findings]


def versions(place: Place) -> Findings:
    """Versions, the GPU, and the order in which attention kernels are preferred."""
    facts: dict[str, Any] = {module.__name__: module.__version__ for module in (torch, diffusers, transformers)}
    if device().type == "cuda":
        q = torch.randn(1, 8, 512, 128, device=device(), dtype=torch.bfloat16)
        F.scaled_dot_product_attention(q, q, q)
        order = [SDPBackend(number).name for number in torch._C._get_sdp_priority_order()]  # set by the first call
        facts |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        facts |= {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "attention": " ".join(order)}
        facts |= {"gpu": torch.cuda.get_device_name(), "gib": torch.cuda.get_device_properties(0).total_memory / GIB}
    yield "versions", facts


def attention(place: Place) -> Findings:
    """Which kernel is fast, and does it give the same bits with and without gradients, as a replay needs?"""
    on_gpu = device().type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    kernels: dict[str, SDPBackend | None] = {"default": None}
    if on_gpu:
        kernels |= {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    sizes = ((2, 300),) if place.small else ((16, 18_318), (8, 18_318), (16, 34_320))
    for heads, length in sizes:
        shape = (1, heads, length, 128)
        q, k, v = (torch.randn(shape, device=device(), dtype=dtype, requires_grad=True) for _ in range(3))
        attend = partial(F.scaled_dot_product_attention, q, k, v)
        for name, kernel in kernels.items():
            with sdpa_kernel(kernel or list(SDPBackend.__members__.values())[1:5]):
                with torch.no_grad():
                    first, again = attend(), attend()
                trained = attend()
                gradient = torch.autograd.grad(trained, q, torch.ones_like(trained))[0]
                forward = median_seconds(torch.no_grad()(attend))
                both = median_seconds(lambda: torch.autograd.grad(attend(), (q, k, v), torch.ones_like(trained)))  # noqa: B023
            flops = 4 * length**2 * heads * 128
            yield (
                f"attention/{heads} heads, {length} tokens, {name}",
                {
                    "same_bits_with_gradient": torch.equal(first, trained.detach()),
                    "same_bits_again": torch.equal(first, again),
                    "finite_gradient": bool(gradient.isfinite().all()),
                    "forward_tflops": flops / forward / 1e12,
                    "backward_tflops": 2.5 * flops / max(both - forward, 1e-9) / 1e12,
                },
            )


LAUNCHED = [sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node 1".split()]
"""How a program is started as the one rank of a launcher."""

TINY = (
    *("--config", "configs/tiny.yaml", "--dtype", "bf16", "--cfg_scale", "4", "--update_ref_model_step", "2"),
    *("--updates_per_rollout", "1", "--batch_size", "8", "--save_interval", "2", "--validation_interval", "0"),
    *("--rollout_micro_batch_size", "4", "--mini_batch_size_per_update", "4", "--grpo_sampling_steps", "4"),
    *("--max_steps", "4"),
)

VARIANTS: dict[str, tuple[str, ...]] = {
    "muon": ("--use_muon", "true"),
    "torchrun": ("--use_muon", "true", "--enable_fsdp", "true"),
    "offloads": (*("--offload", "anchor", "reward", "encoders"), *("--async_save", "true", "--reward_async", "true")),
    "lora": (
        *("--use_lora", "true", "--learning_rate", "1e-4", "--sde_window", "sliding", "--sde_window_size", "2"),
        *("--use_muon", "false"),
    ),
    "elementwise": ("--activation_checkpointing", "elementwise"),
    "compiled": ("--enable_compile", "true", "--max_steps", "2"),
}


def program(place: Place, variants: Sequence[str]) -> Findings:
    """Run `post_train.py` on the bundled model, all variants at once, and continue each from its checkpoint."""
    chosen = variants[:1] if place.small else variants
    with ThreadPoolExecutor(len(chosen)) as pool:
        for variant, facts in zip(chosen, pool.map(partial(_run_and_resume, place), chosen), strict=True):
            yield f"program/{variant}", facts


def _run_and_resume(place: Place, variant: str) -> dict[str, Any]:
    folder = place.folder / f"program_{variant}"
    program = [*(LAUNCHED if variant == "torchrun" else [sys.executable]), "post_train.py"]
    flags = [*TINY, *VARIANTS[variant], "--output_dir", str(folder)]
    facts: dict[str, Any] = {}
    for step, more in (("run", ()), ("resume", ("--max_steps", "6", "--resume_from_checkpoint", "latest"))):
        ended = subprocess.run([*program, *flags, *more], capture_output=True, text=True, check=False)
        facts |= {f"{step}_status": ended.returncode}
        if ended.returncode:
            facts |= {f"{step}_error": ended.stderr[-1500:]}
            break
    rows = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else []
    if rows:
        facts |= {name: max(row[name] for row in rows) for name in ("ratio/max_deviation", "replay/mean_error")}
        facts |= {name: rows[-1][name] for name in ("grad_norm", "kl/position", "reward/mean")}
    return facts


LARGE: dict[str, tuple[str, ...]] = {
    "rank_full": ("--use_muon", "true", "--sp_size", "2", "--enable_fsdp", "true", "--grpo_sampling_steps", "3"),
    "adapter": (
        *("--use_lora", "true", "--use_muon", "false", "--use_moving_KL", "false", "--enable_fsdp", "false"),
        *("--learning_rate", "1e-4", "--grpo_sampling_steps", "2"),
    ),
}
LARGE["rank_elementwise"] = (*LARGE["rank_full"], "--activation_checkpointing", "elementwise")
LARGE["rank_compiled"] = (*LARGE["rank_elementwise"], "--enable_compile", "true")

COMPILED = {False: ("--enable_compile", "true"), True: ()}
"""Flags by whether sizes are small: a CPU compiles for minutes."""

PLANS = "planned_gib.json"
"""What `--plan` writes: the planned peak of each large run."""

BUNDLED = Path(__file__).parents[2] / "assets" / "tiny"

REAL_TRUNK = {
    "num_attention_heads": 16,
    "attention_head_dim": 128,
    "num_layers": 54,
    "num_refiner_layers": 2,
    "patch_size": 1,
    "rope_axes_dim": [16, 56, 56],
}
"""Where the released transformer is larger than the bundled one; channels and widths of text stay the bundled ones."""

SMALL_TRUNK = {
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "num_layers": 2,
    "patch_size": 1,
    "rope_axes_dim": [8, 12, 12],
}

STD = 0.02
"""Of the weights; norms start at 1 and biases at 0."""


def large_run(place: Place, name: str, *more: str) -> Config:
    """Return the settings of a run of the random model: 2 % more video tokens than 81 frames of 352x624 really have.

    `more` are flags beside those of `LARGE`.
    """
    size, frames = ("64x64", "17") if place.small else ("176x320", "81")
    return load_config(
        [
            *("--config", "configs/tiny.yaml", "--pretrained_model_root", str(place.folder / "model")),
            *("--dtype", "bf16", "--cfg_scale", "6", "--rollout_size", size, "--sample_n_frames", frames),
            *("--num_generations", "2", "--batch_size", "2", "--learning_rate", "1e-5"),
            *("--rollout_micro_batch_size", "1", "--mini_batch_size_per_update", "1", "--updates_per_rollout", "1"),
            *("--activation_checkpointing", "full", "--update_ref_model_step", "100", "--max_steps", "100"),
            *("--validation_interval", "0"),
            *("--output_dir", str(place.folder / name), *LARGE[name], *more),
        ]
    )


def write_random_model(folder: Path, *, small: bool) -> None:
    """Write a model folder, unless it is there; 16 GB with the released sizes.

    The transformer's weights are random, and the small parts around it are the bundled model's. Everything else is
    real: the run reads it from disk, shards it and trains it.
    """
    if (folder / "model_index.json").is_file():
        return
    shutil.copytree(BUNDLED, folder, ignore=shutil.ignore_patterns("transformer", "model_index.json"))
    config: dict[str, Any] = json.loads((BUNDLED / "transformer" / "config.json").read_text(encoding="utf-8"))
    torch.manual_seed(0)
    with device(), local_torch_dtype(torch.float32 if small else torch.bfloat16), torch.no_grad():
        transformer = HunyuanVideo15Transformer3DModel.from_config(config | (SMALL_TRUNK if small else REAL_TRUNK))
        for module in transformer.modules():
            for name, weight in module.named_parameters(recurse=False):
                if name == "bias":
                    nn.init.zeros_(weight)
                elif weight.ndim == 1:
                    nn.init.ones_(weight)
                else:
                    nn.init.normal_(weight, std=STD)
    transformer.save_pretrained(folder / "transformer", max_shard_size="4GB")
    shutil.copy(BUNDLED / "model_index.json", folder)  # last: the folder is whole


def plan_gib(place: Place, name: str) -> float:
    """Work out the peak of a large run; neither a GPU nor the random weights are needed."""
    config = large_run(place, name)
    config = replace(config, model=replace(config.model, pretrained_model_root=str(BUNDLED)))  # for its encoders
    bundled = read_networks(config.model, config.reward)
    trunk = SMALL_TRUNK if place.small else REAL_TRUNK
    networks = replace(bundled, transformer={**bundled.transformer, **trunk})
    ranks = 8 if config.parallel.enable_fsdp else 1
    return rehearse(config, networks, world_size=ranks, num_text=15).peak / GIB


def planned_gib(place: Place, name: str) -> float:
    """Return the peak that `--plan` has written, or work it out."""
    path = place.folder / PLANS
    return json.loads(path.read_text(encoding="utf-8"))[name] if path.is_file() else plan_gib(place, name)


@contextmanager
def opened(place: Place, name: str, *more: str) -> Iterator[Run]:
    """Open a large run; one with sharded weights as rank 0 of 8, whose others would send what it sends itself."""
    config = large_run(place, name, *more)
    write_random_model(place.folder / "model", small=place.small)
    if config.parallel.enable_fsdp:
        dist.init_process_group("fake", rank=0, world_size=8)
    try:
        with told_by_this_rank():
            yield open_run(config)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _rounds(name: str, training: Run, count: int) -> Findings:
    """Make rounds; of each its seconds, its phases and its peak."""
    for number in range(count):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        start = time.monotonic()
        make_round(training)
        row = read_metrics(training.folder.path / "metrics.jsonl")[-1]
        facts = {"seconds": time.monotonic() - start}
        facts |= {key: value for key, value in row.items() if key.startswith(("time/", "perf/", "ratio/", "replay/"))}
        if torch.cuda.is_available():
            facts |= {"peak_gib": torch.cuda.max_memory_allocated() / GIB}
            facts |= {"reserved_gib": torch.cuda.max_memory_reserved() / GIB}
        yield f"{name}/round {number}", facts | {"grad_norm": row["grad_norm"]}


def rank(place: Place, variant: str) -> Findings:
    """Be rank 0 of 8 that train all weights: the kernels and the memory are real, what other ranks send is not."""
    planned = planned_gib(place, f"rank_{variant}")
    with opened(place, f"rank_{variant}") as training:
        yield f"rank/{variant}/built", {"planned_peak_gib": planned}
        yield from _rounds(f"rank/{variant}", training, 2)


def adapter(place: Place) -> Findings:
    """Train an adapter on one GPU, whole: save it, and load it again."""
    planned = planned_gib(place, "adapter")
    with opened(place, "adapter") as training:
        yield "adapter/built", {"planned_peak_gib": planned}
        yield from _rounds("adapter", training, 2)
        state, checkpoints = training.state, training.folder.checkpoints
        start = time.monotonic()
        state.save(checkpoints, keep_last=1, keep_every=0)
        state.finish_save()
        state.load(checkpoints / f"step_{state.step}", may_change=())
        yield "adapter/saved and loaded", {"seconds": time.monotonic() - start, "step": state.step}


def decoder(place: Place) -> Findings:
    """Decode one video with the released VAE's sizes: seconds and memory."""
    settings = load_config(["--config", "configs/tiny.yaml"] if place.small else [])
    networks = read_networks(settings.model, settings.reward)
    with device():
        network = make_vae(networks.vae)
    if device().type == "cpu":
        network = network.float()
    for size in ((3, 6, 6),) if place.small else ((21, 22, 39), (21, 30, 54)):
        latents = torch.randn(1, network.config.latent_channels, *size, device=device(), dtype=network.dtype)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            seconds = median_seconds(lambda: network.decode(latents))  # noqa: B023
            facts = {"seconds": seconds, "finite": bool(network.decode(latents)[0].isfinite().all())}
        if torch.cuda.is_available():
            facts |= {"planned_peak_gib": _decoding_gib(networks.vae, latents.shape)}
            facts |= {"peak_gib": torch.cuda.max_memory_allocated() / GIB}
        yield f"decoder/latents {'x'.join(map(str, size))}", facts


def _decoding_gib(vae: Mapping[str, Any], shape: Sequence[int]) -> float:
    """Work out the peak of decoding latents on a device that does not exist, the VAE's weights included."""
    with torch.device("meta"), torch.no_grad():
        network = make_vae(vae)
        with PeakMemory() as memory:
            network.decode(torch.empty(*shape, dtype=torch.float16))
    return (memory.peak + sum(weight.nbytes for weight in network.parameters())) / GIB


def frozen(place: Place) -> Findings:
    """Run the language model and the reward network at their released sizes, in half precision."""
    on_gpu = device().type == "cuda"
    text = encoder_configs(Path(), "t2v").text
    scored = videoreward_config()
    if place.small:
        language = qwen2_language(64, 64, 4, 4, 2, 500)
        vision = {"depth": 2, "embed_dim": 64, "num_heads": 4, "hidden_size": 64}
        text = Qwen2_5_VLTextConfig(**language)
        scored = Qwen2VLConfig(text_config=language, vision_config=vision, video_token_id=496)
    with device(), torch.inference_mode(), local_torch_dtype(torch.float16 if on_gpu else torch.float32):
        model = Qwen2_5_VLTextModel(text).eval()
        ids = torch.randint(0, 400, (1, 408))
        seconds = median_seconds(lambda: model(input_ids=ids))
        states = model(input_ids=ids, output_hidden_states=True).hidden_states[-3]
        yield "frozen/language model", {"seconds": seconds, "finite": bool(states.isfinite().all())}
    videos, grid = (1, (3, 4, 6)) if place.small else (4, GRID)
    _, score = video_reward(scored, grid, videos, torch.bfloat16 if on_gpu else torch.float32)
    with torch.inference_mode():
        facts = {"videos": videos, "seconds": median_seconds(score), "finite": bool(score().isfinite().all())}
    yield "frozen/reward network", facts


def learning(place: Place) -> Findings:
    """Train as the demo does, in fp32 and in bf16. On CPUs, in fp32, it gains +0.99 base standard deviations."""
    dtypes = ("fp32",) if place.small else ("fp32", "bf16")
    with ThreadPoolExecutor(len(dtypes)) as pool:
        for dtype, facts in zip(dtypes, pool.map(partial(_demo, place), dtypes), strict=True):
            yield f"learning/{dtype}", facts


def _demo(place: Place, dtype: str) -> dict[str, Any]:
    folder, start = place.folder / f"learning_{dtype}", time.monotonic()
    flags = ("-m", "scripts.tiny.demo", "--dtype", dtype, "--output_dir", str(folder))
    short = ("--max_steps", "2", "--validation_interval", "0") if place.small else ()
    shutil.rmtree(folder, ignore_errors=True)
    ended = subprocess.run([*LAUNCHED, *flags, *short], capture_output=True, text=True, check=False)
    if ended.returncode:
        return {"status": ended.returncode, "error": ended.stderr[-1500:]}
    gains = read_held_out(folder).gains
    facts = {"minutes": (time.monotonic() - start) / 60, "reward": str(gains["reward"])}
    return facts | {name: gain.in_base_std for name, gain in gains.items() if name != "reward"}


def waits(place: Place) -> Findings:
    """Where does the host wait for the GPU in a round, how long do clipping and Muon take, what weighs the KL term?"""
    with opened(place, "rank_full", "--output_dir", str(place.folder / "waits")) as training:
        yield from _rounds("waits", training, 1)
        yield "waits/places", second_visit.waits(training, partial(make_round, training))
        row = read_metrics(training.folder.path / "metrics.jsonl")[-1]
        yield "waits/kl", {name: row.get(name) for name in ("kl/gradient_share", "kl/coef", "kl/position")}
        yield "waits/optimizer", second_visit.optimizer(training)


def kernels(place: Place) -> Findings:
    """Which kernels take the time of a compiled round whose prompts have 300 tokens?"""
    csv, more_words = place.folder / "prompts.csv", " a" * (second_visit.TEXT_TOKENS - 14)
    csv.write_text(f"prompt\na red circle moves slowly to the left{more_words}\n", encoding="utf-8")
    more = ("--train_video_csv", str(csv), "--profile", "true", "--output_dir", str(place.folder / "kernels"))
    with opened(place, "rank_compiled", *more) as training:
        yield from _rounds("kernels", training, 4)  # the profile is of the third and the fourth
        training.journal.profile.finish()
        yield "kernels/table", {"phases.md": (place.folder / "kernels/profile/phases.md").read_text(encoding="utf-8")}


def texts(place: Place) -> Findings:
    """How long does a compiled step take with texts of new lengths, the first time and the second?"""
    with opened(place, "rank_compiled", "--output_dir", str(place.folder / "texts")) as training:
        yield from second_visit.texts(training)


def one_pass(place: Place) -> Findings:
    """How much faster is an adapter trained in one pass, in compiled blocks, and is its gradient the same?"""
    gradients = []
    for algorithm in ("grpo", "grpo_one_pass"):
        more = ("--algorithm", algorithm, "--kl_weight", "0", "--output_dir", str(place.folder / algorithm))
        with opened(place, "adapter", *COMPILED[place.small], *more) as training:
            of_rounds = second_visit.keep_gradients(training)
            yield from _rounds(f"one_pass/{algorithm}", training, 2)
            gradients.append(of_rounds[0])
        del training, of_rounds  # a second model would not fit beside it
    two, one = gradients
    yield "one_pass/gradient", {"relative_difference": float((one - two).norm() / two.norm())}


def short_videos(place: Place) -> Findings:
    """How long does a video of 480x480x5 take in 10 steps without guidance (UniRL's workload, whose steps we guess)?"""
    size = () if place.small else ("--rollout_size", "240x240", "--sample_n_frames", "5", "--grpo_sampling_steps", "10")
    videos, together = (4, "2") if place.small else (16, "4")
    more = ("--batch_size", str(videos), "--rollout_micro_batch_size", together, "--cfg_scale", "1")
    more += ("--mini_batch_size_per_update", together, "--output_dir", str(place.folder / "short_videos"))
    with opened(place, "adapter", *size, *COMPILED[place.small], *more) as training:
        for name, facts in _rounds("short_videos", training, 2):
            yield name, facts | {"seconds_per_video": facts["seconds"] / videos}


STAGES: dict[str, Stage] = {
    "versions": Stage(1, 60, versions),
    "attention": Stage(1, 90, attention),
    "program": Stage(1, 200, partial(program, variants=("muon", "torchrun", "offloads", "lora"))),
    "rank_full": Stage(1, 220, partial(rank, variant="full")),
    "rank_compiled": Stage(2, 400, partial(rank, variant="compiled")),
    "rank_elementwise": Stage(2, 150, partial(rank, variant="elementwise")),
    "decoder": Stage(3, 90, decoder),
    "frozen": Stage(3, 90, frozen),
    "adapter": Stage(3, 200, adapter),
    "program_more": Stage(3, 180, partial(program, variants=("elementwise", "compiled"))),
    "learning": Stage(4, 400, learning),
    "matrices": Stage(5, 60, lambda place: second_visit.matrices(place.small)),
    "copies": Stage(5, 60, lambda place: second_visit.copies(place.small)),
    "waits": Stage(5, 300, waits),
    "stock": Stage(5, 120, lambda place: second_visit.stock(place.small)),
    "kernels": Stage(6, 400, kernels),
    "texts": Stage(6, 190, texts),
    "one_pass": Stage(7, 300, one_pass),
    "short_videos": Stage(7, 250, short_videos),
}
"""In the order of risk retired per minute."""


def run_stage(name: str, place: Place, results: Path) -> None:
    """Run one stage in this process, and append each finding to a file as soon as it is made."""
    for finding, facts in STAGES[name].run(place):
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": finding, "facts": facts}) + "\n")
