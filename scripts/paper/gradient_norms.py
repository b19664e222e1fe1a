"""Gradient of each denoising step on the bundled tiny model against its theory, before and after the equalizer.

Example: `python -m scripts.paper.gradient_norms`

Two gradients of the log-probability of a rollout's own transitions are measured (paper Eq. 8-9, A.5): by the velocity,
which the theory gives exactly, and by all weights of the network, which the theory cannot know: the network's own
sensitivity differs from level to level.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.nn.utils import get_total_norm

from hyvideo.config.loading import load_config
from hyvideo.config.settings import parse_size
from hyvideo.data.prompts import read_prompts
from hyvideo.grpo.gradient_equalizer import equalizer_scales
from hyvideo.models.attention import install_attention
from hyvideo.models.loading import load_pipeline
from hyvideo.models.parallelize import prepare_policy, trainable_parameters
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Conditioning, Guidance, HunyuanVideoGRPOPipeline, SampleNoise
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
from scripts.paper.study import BLACK, BLUE, FAILS, HOLDS, ORANGE, SAMPLERS, Claim, Study, legend_below, paragraph, tidy
from scripts.reports.markdown import markdown_table

STEPS, ETA, SEED = 20, 0.5, 42


def find(num_videos: int) -> dict[str, Any]:
    """Theory and measurement at every step of every sampler, averaged over videos, one per prompt."""
    config = load_config(["--config", "configs/tiny.yaml"])
    scheduler = FlowMatchDiscreteScheduler(shift=config.rollout.infer_flow_shift_video)
    scheduler.set_timesteps(STEPS)
    pipeline = load_pipeline(
        config.model.pretrained_model_root, pipeline_class=HunyuanVideoGRPOPipeline, scheduler=scheduler
    )
    prepare_policy(install_attention(pipeline.transformer), gradient_checkpointing=False)
    prompts = [prompt.text for prompt in read_prompts(config.data.train_video_csv)[:num_videos]]
    size = (config.rollout.sample_n_frames, parse_size(config.rollout.rollout_size))
    shape = pipeline.latent_shape(*size)
    samplers = {}
    for sampler in SAMPLERS:
        tracks = [
            _track(pipeline, pipeline.encode([text]), number, shape, sampler) for number, text in enumerate(prompts)
        ]
        norms = scheduler.gradient_norms(sde_type=sampler, eta=ETA)
        velocity, weights = torch.tensor(tracks, dtype=torch.float64).mean(0).T.tolist()
        samplers[sampler] = {
            "theory": norms.tolist(),
            "scale": equalizer_scales(norms).tolist(),
            "by_velocity": velocity,
            "by_weights": weights,
        }
    settings = {"steps": STEPS, "shift": scheduler.config.shift, "eta": ETA, "videos": num_videos, "seed": SEED}
    return {"settings": settings, "sigma": scheduler.sigmas[:-1].tolist(), "samplers": samplers}


def _track(
    pipeline: HunyuanVideoGRPOPipeline, prompt: Conditioning, number: int, shape: Sequence[int], sampler: str
) -> list[tuple[float, float]]:
    """Follow one video through its steps: norm of the gradient by the velocity, and by the weights, of each."""
    noise = SampleNoise([SEED], "gradient", 0, [number], [0])
    latents = noise.initial(shape)
    track = []
    for index in range(STEPS):
        velocity = pipeline.velocity(latents, index, prompt, Guidance())
        mean, std = pipeline.scheduler.transition(velocity, latents, index, sde_type=sampler, eta=ETA)
        step_noise = noise.step(index, shape)
        following = pipeline.scheduler.sample_next(mean, std, step_noise).detach()
        if float(std) == 0:
            track.append((0.0, 0.0))
        else:
            log_prob = pipeline.scheduler.log_prob(following, mean, std, sde_type=sampler)
            by_velocity, *by_weights = torch.autograd.grad(
                log_prob.sum(), [velocity, *trainable_parameters(pipeline.transformer).values()]
            )
            rms = step_noise.square().mean().sqrt()
            per_noise = by_velocity.norm() * by_velocity.numel() ** 0.5 / rms
            track.append((float(per_noise), float(get_total_norm(by_weights))))
        latents = following
    return track


def draw(found: Mapping[str, Any]) -> Figure:
    """Columns are samplers; above the velocity's gradient with its theory, below the weights' before and after."""
    figure = Figure(figsize=(10, 4.8), layout="constrained")
    panels = figure.subplots(2, 4, sharex=True, sharey="row")
    for column, (sampler, values) in enumerate(found["samplers"].items()):
        sigma, theory, scale, by_velocity, by_weights = _trained(found["sigma"], values)
        above, below = panels[:, column]
        above.plot(sigma, theory, color=BLACK, linewidth=1.2, label="theory")
        above.plot(sigma, by_velocity, "o", color=BLUE, markersize=4, label="measured")
        above.plot(sigma, by_velocity * scale, "s", color=ORANGE, markersize=3.5, label="measured, equalized")
        below.plot(sigma, by_weights, "o", color=BLUE, markersize=4)
        below.plot(sigma, by_weights * scale, "s", color=ORANGE, markersize=3.5)
        tidy(above, title=SAMPLERS[sampler])
        tidy(below, xlabel="noise level σ")
        for axes in (above, below):
            axes.set_yscale("log")
    panels[0, 0].invert_xaxis()
    panels[0, 0].set_ylabel("gradient by the velocity\n(|∂ log p / ∂v| · √D)", fontsize=9)
    panels[1, 0].set_ylabel("gradient by the weights\n(norm)", fontsize=9)
    legend_below(figure, panels[0, 0], columns=3)
    return figure


def describe(found: Mapping[str, Any]) -> str:
    """Say what was measured and how far the steps spread."""
    settings = found["settings"]
    rows = [
        [SAMPLERS[sampler], *(f"{spread:.3g}" for spread in list(spreads(found["sigma"], values).values())[:-1])]
        for sampler, values in found["samplers"].items()
    ]
    text = paragraph(
        f"""The bundled model samples {settings["videos"]} videos in {settings["steps"]} steps (shift
        {settings["shift"]:g}, eta {settings["eta"]:g}). The gradient that reaches the *weights* also depends on how
        sensitive the network is at each level, which the equalizer does not know. Ratio of the largest to the smallest
        step:"""
    )
    header = ["sampler", "by the velocity", "equalized", "by the weights", "equalized"]
    return f"{text}\n\n{markdown_table(header, rows)}"


def claims(found: Mapping[str, Any]) -> Sequence[Claim]:
    """Theory holds; equalized gradients have one size in the velocity, and are more even in the weights."""
    spread = {sampler: spreads(found["sigma"], values) for sampler, values in found["samplers"].items()}
    error = max(values["error"] for values in spread.values())
    even = all(values["weights_equalized"] < values["weights"] for values in spread.values())
    before, after = ([values[name] for values in spread.values()] for name in ("weights", "weights_equalized"))
    return [
        Claim(
            "the gradient of a step's log-probability by the velocity has the scale N_t, which the equalizer removes",
            HOLDS if error < 0.01 and max(s["velocity_equalized"] for s in spread.values()) < 1.02 else FAILS,
            f"measurement and theory differ by a share of {error:.0e} at most; true by construction",
        ),
        Claim(
            "the equalizer evens out the gradients that reach the network's weights, whatever the sampler",
            HOLDS if even else FAILS,
            f"largest over smallest step {min(before):.0f} to {max(before):.0f} before, {min(after):.1f} to "
            f"{max(after):.1f} after; so not quite to one scale",
        ),
    ]


def spreads(sigma: Sequence[float], values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Largest over smallest gradient of the trained steps, and the largest relative error of the theory."""
    _, theory, scale, by_velocity, by_weights = _trained(sigma, values)
    sizes = {"velocity": by_velocity, "velocity_equalized": by_velocity * scale}
    sizes |= {"weights": by_weights, "weights_equalized": by_weights * scale}
    error = float(np.abs(by_velocity / theory - 1).max())
    return {name: float(size.max() / size.min()) for name, size in sizes.items()} | {"error": error}


def _trained(sigma: Sequence[float], values: Mapping[str, Sequence[float]]) -> np.ndarray:
    """Level, theory, scale and both measurements of the stochastic steps only."""
    columns = np.array([sigma, *(values[name] for name in ("theory", "scale", "by_velocity", "by_weights"))])
    return columns[:, columns[1] > 0]


STUDY = Study("gradient_norms", "Gradient norm over the noise level", describe, claims, draw)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num_videos", type=int, default=8, help="videos, one per prompt; default 8")
    STUDY.publish(find(parser.parse_args().num_videos))
