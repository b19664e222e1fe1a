"""Compare a plan with one update on this GPU: memory and operations predicted and measured, at the depth that fits.

    python -m benchmarks.plan_on_gpu [--frames 81 --size 480x864 --num_layers 12]

Random weights of the published sizes, one video without guidance, float32 weights under bf16 autocast, blocks
recomputed, Muon. Without --num_layers it takes the largest depth whose prediction fits into 90 % of the GPU.
"""

import argparse
import json
import time

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hyvideo.config.loading import load_config
from hyvideo.config.schema import Config
from hyvideo.models.attention import install_attention
from hyvideo.models.flops import transformer_flops, video_tokens
from hyvideo.models.parallelize import prepare_policy, trainable_parameters
from hyvideo.planning.networks import read_networks
from hyvideo.planning.simulation import Scene, simulate
from hyvideo.planning.workload import latent_shape
from hyvideo.training.optimizer import build_optimizers

NUM_TEXT = 300
DEPTHS = (54, 40, 30, 20, 16, 12, 8, 6, 4)


def main() -> None:
    """Print predicted and measured numbers as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", default="81")
    parser.add_argument("--size", default="480x864")
    parser.add_argument("--num_layers", type=int)
    given = parser.parse_args()
    config = load_config(["--sample_n_frames", given.frames, "--rollout_size", given.size, "--cfg_scale", "1"])
    networks = read_networks(config.model, config.reward)
    scene = Scene(networks.transformer, latent_shape(config, networks), NUM_TEXT, 1, 1)
    limit = 0.9 * torch.cuda.get_device_properties(0).total_memory
    for depth in (given.num_layers,) if given.num_layers else DEPTHS:
        peaks = simulate(config, scene.with_depth(depth), world_size=1)
        if max(peaks.backward, peaks.optimizer) < limit:
            break
    chosen = scene.with_depth(depth)
    num_video = video_tokens(chosen.transformer, chosen.latent_shape)
    flops = transformer_flops(chosen.transformer, num_video=num_video, num_text=NUM_TEXT).training(recompute="full")
    predicted = {"backward": peaks.backward, "optimizer": peaks.optimizer, "flops": flops}
    measured = _measure(config, chosen)
    errors = {name: measured[name] / value - 1 for name, value in predicted.items()}
    print(json.dumps({"layers": depth, "predicted": predicted, "measured": measured, "measured/predicted - 1": errors}))


def _measure(config: Config, scene: Scene) -> dict[str, float]:
    """Make two updates; returns the second's peaks, operations and seconds."""
    with torch.device("cuda"):
        transformer = HunyuanVideo15Transformer3DModel.from_config(dict(scene.transformer))
    prepare_policy(install_attention(transformer), gradient_checkpointing=True)
    parameters = trainable_parameters(transformer)
    optimizers = build_optimizers(parameters, config.optimizer)
    measured: dict[str, float] = {}
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        started = time.monotonic()
        with FlopCounterMode(display=False) as counter, torch.autocast("cuda", torch.bfloat16):
            _velocity(transformer, scene).float().square().mean().backward()
        measured["backward"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        torch.cuda.synchronize()
        measured |= {"optimizer": torch.cuda.max_memory_allocated(), "seconds": time.monotonic() - started}
        measured["flops"] = counter.get_total_flops()
        transformer.zero_grad(set_to_none=True)
    return measured


def _velocity(transformer: HunyuanVideo15Transformer3DModel, scene: Scene) -> torch.Tensor:
    """Call the transformer for one video without guidance."""
    settings, (_, *size) = transformer.config, scene.latent_shape
    options = {"device": "cuda"}
    return transformer(
        hidden_states=torch.randn(1, settings.in_channels, *size, **options),
        timestep=torch.full((1,), 500.0, **options),
        encoder_hidden_states=torch.randn(1, scene.num_text, settings.text_embed_dim, **options),
        encoder_attention_mask=torch.ones(1, scene.num_text, dtype=torch.bool, **options),
        encoder_hidden_states_2=torch.zeros(1, 0, settings.text_embed_2_dim, **options),
        encoder_attention_mask_2=torch.zeros(1, 0, dtype=torch.bool, **options),
        image_embeds=torch.zeros(1, 0, settings.image_embed_dim, **options),
        return_dict=False,
    )[0]


if __name__ == "__main__":
    main()
