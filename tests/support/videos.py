"""Videos whose content is known."""

import torch
from torch import Tensor


def moving_square(num_frames: int = 9, height: int = 64, width: int = 64, colour=(220, 40, 40)) -> Tensor:
    """Return uint8 frames `[F, H, W, 3]` of a square of 12 pixels that moves right by 2 pixels a frame, on white."""
    frames = torch.full((num_frames, height, width, 3), 255, dtype=torch.uint8)
    for f in range(num_frames):
        frames[f, 4:16, 2 * f : 2 * f + 12] = torch.tensor(colour, dtype=torch.uint8)
    return frames
