"""Compare a plan with one update on this GPU: memory and operations predicted and measured, at the depth that fits.

    python -m benchmarks.plan_on_gpu [--frames 81 --size 480x864 --num_layers 12]

Random weights, one video without guidance, float32 weights under bf16 autocast, blocks recomputed, Muon. Without
--num_layers it takes the largest depth whose prediction fits into 90 % of the GPU. On a CPU name a small network
(--model assets/tiny): this only tries the program out, since a CPU's memory use differs.
"""

import argparse
import json
import sys
from collections.abc import Sequence

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.network import build_inputs
from benchmarks.paired import device, now, peak_bytes
from hyvideo.algorithms.optimizer import build_optimizers
from hyvideo.config.loading import load_config
from hyvideo.config.schema import Config
from hyvideo.models.attention import install_attention
from hyvideo.models.flops import transformer_flops, video_tokens
from hyvideo.models.parallelize import prepare_policy, trainable_parameters
from hyvideo.planning.networks import read_networks
from hyvideo.planning.simulation import SimulatedCase, simulate
from hyvideo.planning.workload import latent_shape

NUM_TEXT = 300
DEPTHS = (54, 40, 30, 20, 16, 12, 8, 6, 4)


def main(argv: list[str]) -> None:
    """Print predicted and measured numbers as one JSON line."""
    parser = argparse.ArgumentParser("plan_on_gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--frames", default="81", help="default 81")
    parser.add_argument("--size", default="480x864", help="HEIGHTxWIDTH; default 480x864")
    parser.add_argument("--num_layers", type=int, help="default: as many as fit")
    parser.add_argument(
        "--model", default="ckpts", help="whose sizes to take; default ckpts, if there, or the published"
    )
    given = parser.parse_args(argv)
    if given.num_layers is None and not torch.cuda.is_available():
        parser.error("there is no GPU here; to try this out on a CPU: --model assets/tiny --num_layers 2 --size 64x64")
    size = ["--sample_n_frames", given.frames, "--rollout_size", given.size]
    try:
        config = load_config(["--pretrained_model_root", given.model, *size, "--cfg_scale", "1"])
    except ValueError as error:
        parser.error(str(error))
    networks = read_networks(config.model, config.reward)
    case = SimulatedCase(networks.transformer, latent_shape(config, networks), NUM_TEXT, 1, 1)
    depth = given.num_layers or _deepest(config, case)
    chosen = case.with_depth(depth)
    peaks = simulate(config, chosen, world_size=1)
    num_video = video_tokens(chosen.transformer, chosen.latent_shape)
    flops = transformer_flops(chosen.transformer, num_video=num_video, num_text=NUM_TEXT).training(recompute="full")
    predicted = {"backward": peaks.backward, "optimizer": peaks.optimizer, "flops": flops}
    measured = _measure(config, chosen)
    errors = {name: measured[name] / value - 1 for name, value in predicted.items()}
    print(json.dumps({"layers": depth, "predicted": predicted, "measured": measured, "measured/predicted - 1": errors}))


def _deepest(config: Config, case: SimulatedCase) -> int:
    """Return the largest depth whose prediction fits into 90 % of the GPU, else the smallest."""
    limit = 0.9 * torch.cuda.get_device_properties(0).total_memory
    for depth in DEPTHS:
        peaks = simulate(config, case.with_depth(depth), world_size=1)
        if max(peaks.backward, peaks.optimizer) < limit:
            break
    return depth


def _measure(config: Config, case: SimulatedCase) -> dict[str, float]:
    """Make three updates; returns the second's peaks and operations, and the third's seconds."""
    with device():
        transformer = HunyuanVideo15Transformer3DModel.from_config(dict(case.transformer))
    prepare_policy(install_attention(transformer), gradient_checkpointing=True)
    parameters = trainable_parameters(transformer)
    optimizers = build_optimizers(parameters, config.optimizer)

    def replay() -> None:
        """Pass forward and back."""
        with torch.autocast(device().type, torch.bfloat16):
            inputs = build_inputs(transformer, case.latent_shape[1:], [case.num_text])
            transformer(**inputs)[0].float().square().mean().backward()

    def step() -> None:
        """Clip and update."""
        nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        for optimizer in optimizers:
            optimizer.step()

    measured: dict[str, float] = {}
    for _ in range(2):
        held = _held(transformer, optimizers)
        with FlopCounterMode(display=False) as counter:
            measured["backward"] = held + peak_bytes(replay)
        measured["flops"] = counter.get_total_flops()
        gradients = sum(p.grad.nbytes for p in parameters.values() if p.grad is not None)
        measured["optimizer"] = held + gradients + peak_bytes(step)
        transformer.zero_grad(set_to_none=True)
    started = now()
    replay()
    step()
    return measured | {"seconds": now() - started}


def _held(transformer: nn.Module, optimizers: Sequence[Optimizer]) -> int:
    """Bytes of weights and optimizer states."""
    states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    return sum(tensor.nbytes for tensor in (*transformer.parameters(), *states) if isinstance(tensor, torch.Tensor))


if __name__ == "__main__":
    main(sys.argv[1:])
