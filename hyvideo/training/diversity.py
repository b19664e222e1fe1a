"""How far the videos of one prompt are from each other: a policy that games its reward makes them alike."""

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

NUM_FRAMES = 4
SIDE = 16


def thumbnails(videos: Tensor) -> Tensor:
    """Return what is left of videos for comparison, `[B, D]` float32 in [0, 1] on the CPU.

    Args:
        videos: uint8 `[B, F, H, W, 3]`; 4 frames spread over each (or all, of fewer) are averaged to 16 x 16.
    """
    frames = torch.linspace(0, videos.shape[1] - 1, min(NUM_FRAMES, videos.shape[1])).round().long()
    chosen = videos[:, frames.to(videos.device)].float().permute(0, 1, 4, 2, 3).flatten(0, 1) / 255
    return adaptive_avg_pool2d(chosen, SIDE).reshape(len(videos), -1).cpu()


def group_diversity(points: Tensor, num_generations: int) -> Tensor:
    """Root mean square distance of a group's videos from their mean, per element, `[B / G]`; 0 where all are equal.

    Args:
        points: `[B, D]`; the videos of one prompt lie next to each other.
        num_generations: G, group size; B must be a multiple of it.

    Example:
        >>> group_diversity(torch.tensor([[0.0], [1.0], [0.5], [0.5]]), num_generations=2)
        tensor([0.5000, 0.0000])
    """
    groups = points.view(-1, num_generations, points.shape[1])
    return (groups - groups.mean(1, keepdim=True)).square().mean((1, 2)).sqrt()
