"""Credit maps (TVRL, 2026): where in a video its score comes from, on the grid of its latents."""

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, adaptive_avg_pool3d, avg_pool2d, interpolate

Grid = tuple[int, int, int]
"""Latent frames, height and width of a video."""

MEAN_TOLERANCE = 1e-3
"""How far the mean of a map may be from 1."""


def credit_map(saliency: Tensor, num_frames: int, grid: Grid, window: int = 1) -> Tensor:
    """Pool how much a score depends on each pixel to the latents, smooth it and bring its mean to 1.

    The first latent frame stands for the first frame, the others for equal parts of the rest. Where frames were left
    out, the line between their neighbours stands for them.

    Args:
        saliency: `[B, N, H, W]`, at least 0, of frames that are spread evenly from the first to the last.
        num_frames: frames of the video, 1 or more.
        grid: of its latents.
        window: side, odd, of the square of positions in a frame over which the map is averaged (3 in TVRL).

    Returns:
        `[B, F', H', W']` float32, without gradient; 1 everywhere for a video that is 0 everywhere.
    """
    frames, *size = grid
    pooled = adaptive_avg_pool2d(saliency.detach().float(), size)
    if saliency.shape[1] != num_frames:
        between = interpolate(pooled[:, None], (num_frames, *size), mode="trilinear", align_corners=True)
        pooled = between[:, 0]
    if frames > 1:
        rest = adaptive_avg_pool3d(pooled[:, None, 1:], (frames - 1, *size))[:, 0]
        pooled = torch.cat([pooled[:, :1], rest], 1)
    smooth = avg_pool2d(pooled, window, stride=1, padding=window // 2, count_include_pad=False)
    mean = smooth.mean((1, 2, 3), keepdim=True)
    return torch.where(mean > 0, smooth / mean.clamp(min=torch.finfo(torch.float32).tiny), 1.0)


def checked_credit(name: str, credit: object, grid: Grid, failed: Tensor) -> Tensor:
    """Return the map `[B, *grid]` that a reward gave, float32 on the CPU, 1 for the videos that `failed`, `[B]` bool.

    A ValueError names a reward whose map has another shape or complex numbers, or for one video negative or infinite
    values, NaN, or a mean that is not 1.
    """
    shape = [len(failed), *grid]
    if not isinstance(credit, Tensor) or list(credit.shape) != shape or credit.is_complex():
        given = f"{list(credit.shape)} {credit.dtype}" if isinstance(credit, Tensor) else f"{credit!r:.80}"
        raise ValueError(
            f"The reward {name} must give a credit map {shape} of real numbers: latent frames, height and width of "
            f"every video; it gave {given}."
        )
    credit = torch.where(failed.view(-1, 1, 1, 1), 1.0, credit.detach().float().cpu())
    flat = credit.flatten(1).double()
    least, most, mean = flat.amin(1), flat.amax(1), flat.mean(1)
    wrong = ~((least >= 0) & most.isfinite() & ((mean - 1).abs() <= MEAN_TOLERANCE))  # every comparison with NaN fails
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise ValueError(
            f"The reward {name} must give credit maps of finite values, at least 0, with mean 1; that of video {first} "
            f"goes from {float(least[first]):g} to {float(most[first]):g} with mean {float(mean[first]):g}."
        )
    return credit
