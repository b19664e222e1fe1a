"""What the rewards cost at their released sizes, with random weights: memory of the weights and videos per second.

Networks get what they would see of a video of 81 frames of 352x624; reading and resizing it is not timed. The rewards
without a network of their own run whole. Example: `python -m benchmarks.rewards --only pick_score`
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel, Qwen2VLConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.modeling_utils import local_torch_dtype

from benchmarks.paired import device, machine_kind, median_seconds
from hyvideo.models.reward_models.moving_shapes import MovingShapesReward
from hyvideo.models.reward_models.registry import RewardContext
from hyvideo.models.reward_models.text_rendering import TextRendering
from hyvideo.models.reward_models.videoalign.network import RewardNetwork

NUM_FRAMES = 8
"""What `clip_score`, `pick_score`, `vlm_checks`, and VideoAlign at its 2 frames per second see of a video."""

GRID = (NUM_FRAMES // 2, 24, 44)
"""Patches over time, height and width that VideoAlign makes of the video."""

NUM_QUESTIONS = 3
REPEATS = 3


@dataclass(frozen=True)
class Cost:
    """What was measured: GiB of weights, and videos per second; None where the network is too large to run here."""

    gib: float
    videos_per_second: float | None


def clip(width: int, vision: tuple[int, int, int], projection: int) -> Cost:
    """A CLIP with `vision` width, layers and heads."""
    text = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 12 if width == 768 else 24}
    text |= {"num_attention_heads": width // 64}
    size, layers, heads = vision
    tower = {"hidden_size": size, "intermediate_size": 4 * size, "num_hidden_layers": layers}
    tower |= {"num_attention_heads": heads, "patch_size": 14}
    config = CLIPConfig(text_config=text, vision_config=tower, projection_dim=projection)
    with device(), local_torch_dtype(torch.float32):
        network = CLIPModel(config).eval()
        pixels, ids = torch.randn(NUM_FRAMES, 3, 224, 224), torch.randint(0, 400, (1, 77))
    return _cost(network, lambda: (network.get_image_features(pixels), network.get_text_features(ids)))


def videoreward_config() -> Qwen2VLConfig:
    """The configuration of VideoReward's base, a Qwen2-VL of 2 B parameters."""
    language = qwen2_language(1536, 8960, 28, 12, 2, 151_660)
    return Qwen2VLConfig(text_config=language, vision_config={"hidden_size": 1536}, video_token_id=151_656)


def video_reward(
    config: Qwen2VLConfig, grid: tuple[int, int, int], videos: int, dtype: torch.dtype
) -> tuple[RewardNetwork, Callable[[], Tensor]]:
    """Make a random reward network, and what scores as many random videos by it.

    `grid` are the patches of a video over time, height and width.
    """
    tokens = math.prod(grid) // 4
    with device(), local_torch_dtype(dtype):
        network = RewardNetwork(config, 1).eval()
        ids = torch.randint(0, 400, (videos, tokens + 200))
        ids[:, 20 : 20 + tokens] = config.video_token_id
        pixels, grids = torch.randn(videos * math.prod(grid), 1176), torch.tensor([grid] * videos)
        where = torch.tensor([[tokens + 190, tokens + 192, tokens + 194]] * videos)
    return network, lambda: network(ids, pixels, grids, where)


def qwen2_language(width: int, inner: int, layers: int, heads: int, key_heads: int, words: int) -> dict[str, Any]:
    """Return the settings of a Qwen2 language model."""
    half = width // heads // 2
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": words,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [half // 4, half * 3 // 8, half * 3 // 8],
        },
    }


def vision_language(width: int, inner: int, layers: int, heads: int, tower: tuple[int, int, int], *, run: bool) -> Cost:
    """A Qwen3-VL with `tower` width, inner width and layers, in bfloat16; every question is one forward pass."""
    language = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
    }
    size, tower_inner, depth = tower
    vision = {
        "hidden_size": size,
        "intermediate_size": tower_inner,
        "depth": depth,
        "num_heads": 16,
        "out_hidden_size": width,
        "deepstack_visual_indexes": [depth // 4, depth // 2, 3 * depth // 4],
    }
    config = Qwen3VLConfig(text_config=language, vision_config=vision, tie_word_embeddings=width <= 2560)
    with device() if run else torch.device("meta"), local_torch_dtype(torch.bfloat16):
        network = Qwen3VLForConditionalGeneration(config).eval()
    if not run:
        return _cost(network, None)
    grid = (1, 20, 36)
    each = math.prod(grid) // 4
    with device():
        ids = torch.randint(0, 400, (1, NUM_FRAMES * (each + 2) + 40))
        for frame in range(NUM_FRAMES):
            begin = 5 + frame * (each + 2)
            ids[:, begin : begin + each] = config.image_token_id
        pixels = torch.randn(NUM_FRAMES * math.prod(grid), 1536)
        grids = torch.tensor([grid] * NUM_FRAMES)
    images = (ids == config.image_token_id).int()
    asked = {"input_ids": ids, "mm_token_type_ids": images, "image_grid_thw": grids, "use_cache": False}
    return _cost(
        network, lambda: [network(pixel_values=pixels, logits_to_keep=1, **asked) for _ in range(NUM_QUESTIONS)]
    )


def text_rendering() -> Cost:
    """The reward that reads texts, on a sign that all frames show."""
    sign = Image.new("RGB", (624, 352), "grey")
    ImageDraw.Draw(sign).text((200, 130), "OPEN", font_size=90)
    videos, reward = torch.tensor(np.array(sign)).expand(1, 81, -1, -1, -1), TextRendering(RewardContext(), threads=2)
    return _cost(nn.Module(), lambda: reward(videos, ['a sign that says "OPEN"']))


def moving_shapes() -> Cost:
    """The tiny model's reward on videos of its size."""
    videos, reward = torch.randint(0, 256, (1, 17, 64, 64, 3), dtype=torch.uint8), MovingShapesReward()
    return _cost(nn.Module(), lambda: reward(videos, ["a red circle moves slowly to the left"]))


COSTS: dict[str, Callable[[], Cost]] = {
    "clip_score, CLIP ViT-L/14": lambda: clip(768, (1024, 24, 16), 768),
    "pick_score, CLIP ViT-H/14": lambda: clip(1024, (1280, 32, 16), 1024),
    "videoalign_local, VideoReward": lambda: _cost(*video_reward(videoreward_config(), GRID, 1, torch.bfloat16)),
    "vlm_checks, Qwen3-VL-2B": lambda: vision_language(2048, 6144, 28, 16, (1024, 4096, 24), run=True),
    "vlm_checks, Qwen3-VL-8B": lambda: vision_language(
        4096, 12288, 36, 32, (1152, 4304, 27), run=torch.cuda.is_available()
    ),
    "text_rendering, PP-OCRv6": text_rendering,
    "moving_shapes, 17 frames of 64x64": moving_shapes,
}
"""Reward and network -> how it is measured."""


def _cost(network: nn.Module, score: Callable[[], object] | None) -> Cost:
    """Count the weights and time `score`, which treats one video."""
    gib = sum(weight.nbytes for weight in network.parameters()) / 2**30
    if score is None:
        return Cost(gib, None)
    with torch.inference_mode():
        return Cost(gib, 1 / median_seconds(score, REPEATS))


def main(argv: Sequence[str]) -> int:
    """Print a line per reward; returns the exit status."""
    parser = argparse.ArgumentParser("benchmarks.rewards", description=__doc__)
    rewards = sorted({name.split(",")[0] for name in COSTS})
    parser.add_argument("--only", nargs="+", choices=rewards, default=rewards, help="some of them")
    only = parser.parse_args(argv).only
    print(f"{machine_kind()}: GiB of weights, videos per second")
    for name, measure in COSTS.items():
        if name.split(",")[0] in only:
            cost = measure()
            speed = f"{cost.videos_per_second:.2g}" if cost.videos_per_second else "not run"
            print(f"{name}: {cost.gib:.1f} GiB, {speed}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
