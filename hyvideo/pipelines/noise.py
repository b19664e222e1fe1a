"""Noise that depends on what a sample is, never on where or with whom it is computed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hyvideo.data.randomness import generator_for


@dataclass(frozen=True)
class SampleNoise:
    """The noise of B samples, each drawn on the CPU from its own seeded generator.

    Attributes:
        seeds: base seed of each sample, length B; in training the run's seed for all.
        stream: what the samples are for (`rollout`, `validation`, ...); streams never share noise.
        round: the rollout round (0 for sampling outside training).
        prompts: index of each sample's prompt, length B.
        generations: number of each sample within its prompt's group, length B.
        share_initial: samples of one prompt start from the same noise (`use_same_noise`).
        repeat_initial: the starting noise is that of round 0 in every round (`published prompt_noise`).
    """

    seeds: Sequence[int]
    stream: str
    round: int
    prompts: Sequence[int]
    generations: Sequence[int]
    share_initial: bool = False
    repeat_initial: bool = False

    def rows(self, chosen: Sequence[int]) -> "SampleNoise":
        """Return the noise of some of the samples."""
        of_samples = {name: [getattr(self, name)[i] for i in chosen] for name in ("seeds", "prompts", "generations")}
        return replace(self, **of_samples)

    def initial(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Return the starting latents `[B, *shape]`, float32."""
        round = 0 if self.repeat_initial else self.round
        return self._draw("initial", round, 0, shape, device, shared=self.share_initial)

    def step(self, index: int, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Return the noise `[B, *shape]` injected at denoising step `index`, float32."""
        return self._draw("step", self.round, index, shape, device, shared=False)

    def _draw(
        self, kind: str, round: int, index: int, shape: Sequence[int], device: torch.device | str, *, shared: bool
    ) -> Tensor:
        stream = f"{self.stream}/{kind}"
        generators = [
            generator_for(seed, stream, round, prompt, 0 if shared else generation, index)
            for seed, prompt, generation in zip(self.seeds, self.prompts, self.generations, strict=True)
        ]
        return draw(generators, shape, device)


def draw(generators: Sequence[torch.Generator], shape: Sequence[int], device: torch.device | str) -> Tensor:
    """Draw `[B, *shape]` float32 on the CPU, one sample per generator.

    It is copied to `device` from pinned memory, so that the host need not wait for the device.
    """
    drawn = torch.stack([torch.randn(*shape, generator=generator) for generator in generators])
    return drawn if torch.device(device).type == "cpu" else drawn.pin_memory().to(device, non_blocking=True)
