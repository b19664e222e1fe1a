"""The transformer of HunyuanVideo-1.5 at its real size, random weights: utilisation, memory, ratio to stock attention.

Needs a GPU that holds 54 layers in bf16 twice (weights and gradients) with recomputed blocks: about 80 GB.
Example: `python -m benchmarks.real_network`
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diffusers import HunyuanVideo15Transformer3DModel

from benchmarks.network import PASSES, build_inputs, build_transformer, fast_dtype
from benchmarks.paired import Result, compare, device, median_seconds, peak_bytes, print_results
from hyvideo.models.attention import install_attention
from hyvideo.models.flops import PassFlops, transformer_flops, video_tokens
from hyvideo.models.parallelize import compile_blocks, prepare_policy
from hyvideo.observability.matrix_peak import measured_matrix_tflops


@dataclass(frozen=True)
class Case:
    """What goes through the network: latents `(F', H', W')` of one video, and valid text tokens per row."""

    name: str
    latents: tuple[int, int, int]
    text: tuple[int, ...] = (300,)


CASES = (
    Case("352x624x81", (21, 22, 39)),
    Case("480x864x81", (21, 30, 54)),
    Case("480x864x81_guided", (21, 30, 54), (300, 12)),
)
STOCK_LAYERS = 8
"""Layers of the comparison with the stock attention, of which two networks are held."""

RECOMPUTED = {"full": "full", "cheap": "cheap", "elementwise": "elementwise", "compiled": "elementwise"}
"""What of a block each variant recomputes in the backward pass."""


def measure(cases: tuple[Case, ...] = CASES, **config: Any) -> list[Result]:
    """Measure utilisation of all layers, then the ratio to the stock attention with few of them.

    `config` replaces settings of the network's own, to try this out on a small one.
    """
    peak = measured_matrix_tflops(device(), fast_dtype())
    results = []
    for variant in RECOMPUTED:
        transformer = install_attention(build_transformer(fast_dtype(), **config))
        prepare_policy(transformer, gradient_checkpointing=True, recompute=RECOMPUTED[variant])
        if variant == "compiled":
            compile_blocks(transformer)
        for case in cases:
            results += [_utilisation(kind, variant, transformer, case, peak) for kind in PASSES]
        del transformer
    stock = build_transformer(fast_dtype(), **{"num_layers": STOCK_LAYERS} | config)
    ours = install_attention(copy.deepcopy(stock))
    return results + [result for case in cases for result in _against_stock(stock, ours, case)]


def _utilisation(
    kind: str, variant: str, transformer: HunyuanVideo15Transformer3DModel, case: Case, peak: float
) -> Result:
    """Time a pass; count the operations it needs, recomputation not counted, against the measured matrix peak."""
    run = PASSES[kind](transformer, build_inputs(transformer, case.latents, case.text))
    memory = peak_bytes(run)
    seconds = median_seconds(run)
    needed = sum(flops.total if kind == "forward" else flops.model for flops in _flops(transformer.config, case))
    tflops = needed / seconds / 1e12
    facts = {"mfu_of_measured_peak": tflops / peak, "tflops": tflops, "measured_peak_tflops": peak}
    facts |= {"seconds": seconds, "peak_gb_beyond_weights": memory / 1e9}
    name = f"real_network/{case.name}/{kind}_{variant}"
    return Result(name, "operations needed / measured matrix peak", None, facts)


def _flops(config: Mapping[str, Any], case: Case) -> list[PassFlops]:
    num_video = video_tokens(config, case.latents)
    return [transformer_flops(config, num_video=num_video, num_text=length) for length in case.text]


def _against_stock(
    stock: HunyuanVideo15Transformer3DModel, ours: HunyuanVideo15Transformer3DModel, case: Case
) -> list[Result]:
    """Compare passes of a few layers; every layer costs the same."""
    inputs = build_inputs(stock, case.latents, case.text, padded=True)
    return [
        compare(
            f"real_network/{case.name}/{kind}_against_stock",
            f"stock / trimmed, {stock.config.num_layers} layers",
            PASSES[kind](stock, inputs),
            PASSES[kind](ours, inputs),
            pairs=5,
        )
        for kind in PASSES
    ]


if __name__ == "__main__":
    print_results(measure())
