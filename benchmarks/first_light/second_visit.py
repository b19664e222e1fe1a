"""What the first visit to a GPU left open; stages like those of `benchmarks.first_light.stages`, which lists them."""

import copy
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from os.path import relpath
from typing import Any

import torch
from torch import nn

from benchmarks.network import SMALL, build_inputs, build_transformer, fast_dtype, forward_pass, training_pass
from benchmarks.paired import device, median_seconds
from hyvideo.data.prompts import Prompt
from hyvideo.models.attention import install_attention
from hyvideo.training.run import Run

Findings = Iterator[tuple[str, dict[str, Any]]]
NEEDS_GPU = {"not measured": "it needs a GPU"}
TEXT_TOKENS = 300


def matrices(small: bool) -> Findings:
    """What do matrix products reach at the sizes of a block, and what would fp8 with a scale per row gain?"""
    rows, width, inner = (256, 64, 256) if small else (18_318, 2048, 8192)
    a, b = torch.randn(rows, width, device=device()), torch.randn(inner, width, device=device())
    low = a.to(fast_dtype()), b.to(fast_dtype())
    seconds, expected = median_seconds(lambda: low[0] @ low[1].T), a @ b.T
    flops = 2 * rows * width * inner / 1e12
    yield "matrices/" + str(fast_dtype()).removeprefix("torch."), {"tflops": flops / seconds}
    if device().type == "cpu":
        yield "matrices/fp8", NEEDS_GPU
        return
    scales = [x.abs().amax(1, keepdim=True) / 448 for x in (a, b)]
    eighths = [(x / scale).to(torch.float8_e4m3fn) for x, scale in zip((a, b), scales, strict=True)]
    multiply = partial(torch._scaled_mm, eighths[0], eighths[1].T, scales[0], scales[1].T, out_dtype=torch.bfloat16)
    error = float((multiply().float() - expected).norm() / expected.norm())
    yield "matrices/fp8", {"tflops": flops / median_seconds(multiply), "relative_error": error}


def copies(small: bool) -> Findings:
    """How fast are copies to the GPU and back, from pageable and from pinned memory?"""
    size = 2**20 if small else 2**30
    for kind in ("pageable", "pinned"):
        if kind == "pinned" and device().type == "cpu":
            yield "copies/pinned", NEEDS_GPU
            return
        host = torch.empty(size, dtype=torch.uint8, pin_memory=kind == "pinned")
        there = torch.empty(size, dtype=torch.uint8, device=device())
        to, back = (median_seconds(partial(x.copy_, y, non_blocking=True)) for x, y in ((there, host), (host, there)))
        yield f"copies/{kind}", {"to_gb_per_s": size / to / 1e9, "from_gb_per_s": size / back / 1e9}


def waits(run: Run, make_round: Callable[[], None]) -> dict[str, Any]:
    """Count where PyTorch sees the host wait for the GPU in one round; by file and line."""
    if device().type == "cpu":
        make_round()
        return NEEDS_GPU
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            make_round()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = Counter(f"{relpath(each.filename)}:{each.lineno}" for each in told if "synchroniz" in str(each.message))
    return {"in_all": places.total()} | dict(places.most_common(20))


def optimizer(run: Run) -> dict[str, Any]:
    """Seconds of clipping and of the optimizer's step, each alone."""
    weights, optimizers = list(run.algorithm.optimization.parameters.values()), run.algorithm.optimization.optimizers
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    clip = median_seconds(lambda: nn.utils.clip_grad_norm_(weights, 1.0))
    facts = {"clip_seconds": clip, "step_seconds": median_seconds(lambda: [each.step() for each in optimizers])}
    for each in optimizers:
        each.zero_grad()
    return facts


def keep_gradients(run: Run) -> list[torch.Tensor]:
    """Return a list to which every update adds its gradient, clipped, in host memory."""
    kept: list[torch.Tensor] = []
    weights = run.algorithm.optimization.parameters.values()
    run.algorithm.optimization.optimizers[0].register_step_pre_hook(
        lambda *call: kept.append(torch.cat([w.grad.flatten().float().cpu() for w in weights if w.grad is not None]))
    )
    return kept


def texts(run: Run) -> Findings:
    """How long do a first and a second step take with a text of a length that compiled blocks have not seen?"""
    policy = run.policy
    shape = policy.pipeline.latent_shape(policy.num_frames, policy.size)
    latents = torch.randn(1, *shape, device=device())
    for words in (31, 62, 93, 124, 155, 186):
        conditioning = policy.encode([Prompt("a " * words, words, None, None)])
        seconds = []
        for _ in range(2):
            start = time.monotonic()
            with torch.no_grad():
                policy.step(latents, 0, conditioning)[0].sum().item()
            seconds.append(time.monotonic() - start)
        yield f"texts/{len(conditioning.text[0])} tokens", {"first_seconds": seconds[0], "second_seconds": seconds[1]}


def stock(small: bool) -> Findings:
    """How much faster than the stock network is ours, of eight blocks, with 300 valid text tokens?"""
    config, video = (SMALL, (2, 8, 8)) if small else ({"num_layers": 8}, (21, 22, 39))
    theirs = build_transformer(fast_dtype(), **config)
    ours, inputs = install_attention(copy.deepcopy(theirs)), build_inputs(theirs, video, (TEXT_TOKENS,), padded=True)
    for kind, make in (("training", training_pass), ("forward", forward_pass)):
        seconds = [median_seconds(make(network, inputs)) for network in (theirs, ours)]
        yield f"stock/{kind}", {"stock_seconds": seconds[0], "our_seconds": seconds[1]}
