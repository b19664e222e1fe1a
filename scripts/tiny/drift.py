"""What training changed in tiny videos that their reward hardly sees: colours, backgrounds and fine patterns."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hyvideo.models.reward_models.moving_shapes import correct
from scripts.tiny.clips import BACKGROUNDS


def appearance(videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
    """Return per video `[B]` what a drift of training would move, for uint8 videos `[B, F, H, W, 3]`.

    `hits` is 1 where colour and shape are strictly the prompt's. `background` is how far the background, in the middle
    of three grey levels, is from the nearest level of the training clips, 0 to 255. `red`, `green` and `blue` are how
    far each channel's mean is above that of all three. `roughness` is the mean difference of a pixel from its four
    neighbours, which rises with blotches and regular dots alike.
    """
    pixels = videos.float()
    middle = pixels.flatten(1, 3).median(1).values.mean(-1, keepdim=True)
    channels = pixels.mean((1, 2, 3))
    inner = pixels[:, :, 1:-1, 1:-1]
    around = (pixels[:, :, :-2, 1:-1] + pixels[:, :, 2:, 1:-1] + pixels[:, :, 1:-1, :-2] + pixels[:, :, 1:-1, 2:]) / 4
    return {
        "hits": correct(videos, prompts).float(),
        "background": (middle - torch.tensor(BACKGROUNDS)).abs().amin(1),
        **dict(zip(("red", "green", "blue"), (channels - channels.mean(1, keepdim=True)).T, strict=True)),
        "roughness": (inner - around).abs().mean((1, 2, 3, 4)),
    }
