"""Super-resolution of HunyuanVideo-1.5: a second transformer samples a video again at 1.5 times its sides.

The latents of the base model are enlarged, refined by an upsampler and covered with noise; they stand beside the first
frame among the channels that the second transformer sees, until its noise falls below a level.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers.pipelines.hunyuan_video1_5.image_processor import generate_crop_size_list
from torch import Tensor, nn

from hyvideo.models.model_folder import download_command, read_json, transformer_folder
from hyvideo.models.upsampler import enlarge
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import (
    Conditioning,
    FirstFrames,
    Guidance,
    HunyuanVideoGRPOPipeline,
    SampleNoise,
    first_frame_channels,
)
from hyvideo.pipelines.sampling_defaults import bucket_size

SHIFT = 2.0
NOISE = 0.7
"""Share of noise in the enlarged latents that the transformer sees."""
LOWEST_TIMESTEP = 700.0
"""Below it the transformer no longer sees the enlarged latents."""


@dataclass(frozen=True)
class Stage:
    """How videos of one resolution are sharpened.

    Attributes:
        version: of the second transformer and its upsampler.
        base: side in pixels of the square with as many pixels as a video before, which names its sizes.
        target: and after.
        num_steps: the authors' denoising steps.
    """

    version: str
    base: int
    target: int
    num_steps: int

    def folders(self, root: Path) -> list[Path]:
        """Return the folders of the transformer and the upsampler."""
        return [root / name / self.version for name in ("transformer", "upsampler")]

    def enlarged(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the (height, width) to which videos of `size` are sharpened: that of the nearest proportions.

        A size that the base model does not make by itself is a ValueError that names the nearest one.
        """
        height, width = size
        ratio = width / height
        known, targets = (generate_crop_size_list(side, 16) for side in (self.base, self.target))  # (width, height)
        if (width, height) not in known:
            near_height, near_width = bucket_size(self.base, 16, width=width, height=height)
            raise ValueError(
                f"--sr true sharpens the sizes that the model was trained on; received {height}x{width}, the nearest "
                f"is --fixed_size {near_height}x{near_width}."
            )
        new_width, new_height = min(targets, key=lambda one: abs(one[0] / one[1] - ratio))
        return new_height, new_width


STAGES = {"480p": Stage("720p_sr_distilled", 640, 960, 6), "720p": Stage("1080p_sr_distilled", 960, 1440, 8)}


def stage_of(root: Path, version: str | None) -> Stage:
    """Return how the videos of a model are sharpened; a ValueError names each folder that is missing."""
    resolution = read_json(transformer_folder(root, version) / "config.json").get("ideal_resolution")
    if resolution not in STAGES:
        raise ValueError(
            f"--sr true sharpens videos of {' or '.join(STAGES)}, and needs the layout of the authors' downloads; the "
            f"transformer of '{root}' makes {resolution or 'its videos in that of diffusers'}."
        )
    stage = STAGES[resolution]
    absent = [folder for folder in stage.folders(root) if not (folder / "config.json").is_file()]
    if absent:
        listed = "\n".join(f"  {path}\n    {download_command(root, str(path.relative_to(root)))}" for path in absent)
        raise ValueError(f"--sr true: these folders are missing:\n{listed}")
    return stage


class SuperResolutionPipeline(HunyuanVideoGRPOPipeline):
    """The pipeline over the second transformer, which has channels for the enlarged latents and a mask more."""

    upsampler: nn.Module
    _enlarged: Tensor

    @torch.no_grad()
    def sharpen(
        self,
        latents: Tensor,
        size: tuple[int, int],
        conditioning: Conditioning,
        noise: SampleNoise,
        *,
        on_step: Callable[[int], None] = lambda index: None,
    ) -> Tensor:
        """Return the latents `[B, C, F', H', W']` of videos of `size` (height, width), after the scheduler's steps.

        `latents` are the base model's last ones, `[B, C, F', h', w']` float32, and the first frames of `conditioning`
        have `size`. Sampling starts at the initial `noise`, and its first step covers the enlarged latents. `on_step`
        is called with the index of every finished step.
        """
        factor = self.vae_scale_factor_spatial
        shape = (*latents.shape[1:3], size[0] // factor, size[1] // factor)
        low = self.upsampler(enlarge(latents, shape[2:]))
        low = (1 - NOISE) * low + NOISE * noise.step(0, shape, low.device)
        low = torch.cat([low, torch.ones_like(low[:, :1])], dim=1)
        sharp = noise.initial(shape, low.device)
        for index, timestep in enumerate(self.scheduler.timesteps.tolist()):
            self._enlarged = low if timestep >= LOWEST_TIMESTEP else torch.zeros_like(low)
            sharp, _ = self.denoise_step(sharp, index, conditioning, Guidance(), sde_type="ode", eta=0.0)
            on_step(index)
        del self._enlarged
        return sharp

    def _condition_channels(self, latents: Tensor, images: FirstFrames | None) -> Tensor:
        """Return the first frame, its mask, the enlarged latents and theirs: `[B, 2 C + 2, F', H', W']`."""
        return torch.cat([first_frame_channels(latents, images), self._enlarged], dim=1)
