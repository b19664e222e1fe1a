"""Text on screen, read by the recognizer's real weights in clips that are drawn here."""

import random
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts
from PIL import Image, ImageDraw, ImageFont

from hyvideo.config.schema import RewardConfig
from hyvideo.models.reward_models import text_rendering
from hyvideo.models.reward_models.registry import RewardContext
from hyvideo.models.reward_models.rewards import get_reward_fn
from hyvideo.models.reward_models.text_rendering import TextRendering, edit_distance, legibility, quoted_texts

FONT = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
SIGN = 'A neon sign that says "Open Late" above a door'


def frame(*signs: tuple[str, int, int], pixels: int = 36, angle: float = 0) -> Image.Image:
    """One frame with texts (text, x, y) of a height, turned by an angle in degrees."""
    image = Image.new("RGB", (320, 192), (30, 90, 60))
    for text, x, y in signs:
        layer = Image.new("L", image.size)
        ImageDraw.Draw(layer).text((x, y), text, fill=255, font=ImageFont.truetype(FONT, pixels))
        image.paste((250, 240, 220), mask=layer.rotate(angle, Image.Resampling.BICUBIC))
    return image


def video(*frames: Image.Image) -> torch.Tensor:
    """uint8 `[1, F, H, W, 3]`."""
    return torch.from_numpy(np.stack(frames))[None]


@pytest.fixture(scope="module")
def reward() -> TextRendering:
    return TextRendering(RewardContext(), num_frames=2, threads=1)


def score(reward: TextRendering, clip: torch.Tensor, prompt: str = SIGN) -> float:
    return float(reward(clip, [prompt])["TEXT"])


def test_the_right_text_beats_one_wrong_letter_beats_another_text_beats_none(reward):
    texts = ("OPEN LATE", "OPEN LANE", "OPERA BAR", "")
    scores = [score(reward, video(frame((text, 40, 70)))) for text in texts]
    assert scores[:2] == pytest.approx([1, 1 - 1 / 8]) and scores[3] == 0
    assert scores[0] > scores[1] > 0.5 > scores[2] > scores[3]


@pytest.mark.parametrize(
    "clip",
    [
        video(frame(("OPEN LATE", 10, 40)), frame(("OPEN LATE", 90, 100))),
        video(frame(("open late", 40, 80), pixels=10)),
        video(frame(("Open Late", 60, 70), angle=20)),
        video(frame(("OPEN", 90, 40), ("LATE", 90, 90))),
        video(frame(("OPEN LATE", 40, 40), ("Tickets here", 40, 110), pixels=28)),
    ],
    ids=["moving", "small", "slanted", "on two lines", "beside another text"],
)
def test_a_text_is_read_wherever_and_however_it_stands(reward, clip):
    assert score(reward, clip) == 1


def test_several_texts_and_frames_are_averaged(reward):
    prompt = 'Two signs, "OPEN LATE" and “Cafe Roma”'
    both = frame(("Cafe Roma", 40, 20), ("OPEN LATE", 40, 110))
    assert score(reward, video(both), prompt) == 1
    one = score(reward, video(frame(("OPEN LATE", 40, 70))), prompt)
    assert 0.5 <= one < 0.75
    assert score(reward, video(both, frame(("OPEN LATE", 40, 70))), prompt) == pytest.approx((1 + one) / 2)


def test_a_prompt_without_text_or_in_unknown_letters_is_left_to_the_other_rewards(reward):
    prompts = [SIGN, "a door", 'a sign "Живот"', 'a sign ""']
    assert [reward.applies(prompt) for prompt in prompts] == [True, False, False, False]
    assert reward.applies(f'a page "{"a" * 256}"') and not reward.applies(f'a page "{"a" * 257}"')
    models = {"text_rendering": {"sub_reward": {"TEXT": 2.0}}, "brightness": {"sub_reward": {"length": 1.0}}}
    both = get_reward_fn(RewardConfig(reward_config={"models": models}))
    clips = video(frame(("OPEN LATE", 40, 70))).expand(4, -1, -1, -1, -1)
    scores = both(clips, prompts)
    assert scores.total.tolist() == [2 + len(SIGN), *map(len, prompts[1:])]
    assert scores.metrics["TEXT"].isnan().tolist() == [False, True, True, True]
    assert scores.weighted()["TEXT"].tolist() == [1, 0, 0, 0] and not scores.failed().any()
    assert both.check_prompts(prompts) is None

    alone = get_reward_fn(RewardConfig(reward_model="text_rendering", reward_weights={"TEXT": 1.0}))
    scores = alone(clips, prompts)
    assert scores.total.isnan().tolist() == [False, True, True, True] and not scores.failed().any()
    assert "3 of 4 training prompts, such as 'a door'" in alone.check_prompts(prompts)
    with pytest.raises(ValueError, match="cannot judge the videos of 1 of 1 training prompts, such as 'a door'"):
        alone.check_prompts(["a door"])


def test_it_quotes_as_the_models_glyph_encoder_does():
    prompt = 'He said "No Way", then “Café” and "No Way" again, "unfinished'
    assert extract_glyph_texts(prompt) == 'Text "No Way". Text "Café". '
    assert quoted_texts(prompt) == ["noway", "café"]


def test_surplus_letters_beside_a_text_count_and_other_lines_do_not():
    pairs = [("", ""), ("kitten", "sitting"), ("flaw", "lawn"), ("abc", ""), ("", "abc"), ("same", "same")]
    assert [edit_distance(one, other) for one, other in pairs] == [0, 3, 2, 3, 3, 0]
    assert legibility(["open"], ["xx", "open", "yy"]) == 1 and legibility(["open"], ["openopen"]) == 0.5
    assert legibility(["open"], []) == 0


def test_lines_that_cannot_be_nearer_than_what_was_found_are_not_compared(monkeypatch):
    draw, compared = random.Random(1), []
    lines = ["".join(draw.choices("abcdef", k=draw.randrange(1, 9))) for _ in range(40)]
    texts = ["".join(draw.choices("abcdefg", k=5)) for _ in range(20)]
    runs = ["".join(lines[i:j]) for i in range(40) for j in range(i + 1, 41)]
    best = [max(1 - edit_distance(text, run) / max(len(text), len(run)) for run in runs) for text in texts]
    monkeypatch.setattr(text_rendering, "edit_distance", lambda *pair: compared.append(pair) or edit_distance(*pair))
    assert legibility(texts, lines) == pytest.approx(sum(best) / 20)
    assert len(compared) < len(texts) * len(runs) / 10
