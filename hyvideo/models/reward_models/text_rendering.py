"""Text on screen: how much of the text that a prompt quotes can be read in the video."""

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hyvideo.models.reward_models.registry import RewardContext, RewardModel, register_reward

QUOTED = re.compile(r"\"(.*?)\"|“(.*?)”")
"""The quotes by which HunyuanVideo-1.5 finds the texts for its glyph encoder."""

DETECTION_SIDE = 480
"""Pixels to which the shorter side of smaller frames is enlarged. At 192 pixels it read letters of 10 as well as with
the library's 736, in half of the time."""

MAX_LETTERS = 256
"""Letters that a prompt may quote in all: comparing takes time by their number, and no video shows more."""


def quoted_texts(prompt: str) -> list[str]:
    """Return the texts that a prompt quotes, each once, as `comparable` writes them; blank ones are left out."""
    return [text for text in dict.fromkeys(comparable(a or b) for a, b in QUOTED.findall(prompt)) if text]


def comparable(text: str) -> str:
    """Write a text without what does not count: case, blanks, and the width of characters (Unicode's NFKC)."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def edit_distance(one: str, other: str) -> int:
    """Return the least number of insertions, deletions and substitutions between two texts (Levenshtein 1966)."""
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        diagonal, row[0] = row[0], i
        for j, facing in enumerate(other, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (letter != facing))
    return row[-1]


def legibility(asked: Sequence[str], lines: Sequence[str]) -> float:
    """Return how well a frame shows the asked texts, 0 to 1: the mean over them of 1 - distance / longer length.

    A text is compared with the line, or the lines in a row, that come nearest to it, because a sign may break it. So
    surplus letters next to a text count against it, and other texts elsewhere in the frame do not. `lines` are what was
    read, from top to bottom; all texts are as `comparable` writes them.
    """
    runs = {"".join(lines[i:j]) for i in range(len(lines)) for j in range(i + 1, len(lines) + 1)}
    total = 0.0
    for text in asked:
        best, letters = 0.0, Counter(text)
        # No similarity exceeds the share of letters that both have, whatever their order.
        limits = (((letters & Counter(run)).total() / max(len(text), len(run)), run) for run in runs)
        for limit, run in sorted(limits, reverse=True):
            if limit <= best:
                break
            best = max(best, 1 - edit_distance(text, run) / max(len(text), len(run)))
        total += best
    return total / len(asked)


@register_reward("text_rendering")
class TextRendering(RewardModel):
    """Reads `num_frames` frames, spread over the video, with PP-OCRv6 (rapidocr, whose wheel holds the weights).

    It has no score for a prompt that quotes no text, more than `MAX_LETTERS`, or characters that the recognizer does
    not know. Each scoring call computes on the CPU with `threads` threads.
    """

    metrics = ("TEXT",)

    def __init__(self, context: RewardContext, num_frames: int = 4, threads: int = 4) -> None:
        super().__init__(context)
        import rapidocr  # a second, and only this reward needs it

        models = Path(rapidocr.__file__).parent / "models"
        self._num_frames = num_frames
        self._reader = rapidocr.RapidOCR(
            params={
                "Global.log_level": "critical",  # it warns of every frame without text
                "Global.use_cls": False,  # text that stands on its head is not what was asked for
                "Det.model_path": str(models / "PP-OCRv6_det_small.onnx"),  # a path: nothing is ever downloaded
                "Det.limit_side_len": DETECTION_SIDE,
                "Rec.model_path": str(models / "PP-OCRv6_rec_small.onnx"),
                "EngineConfig.onnxruntime.intra_op_num_threads": min(threads, os.cpu_count() or 1),
            }
        )
        self._reader(np.zeros((64, 64, 3), np.uint8), use_det=False)  # loads the recognizer, and is remembered
        self._known = {comparable(character) for character in self._reader.text_rec.postprocess_op.character}

    def applies(self, prompt: str) -> bool:
        """Whether the prompt quotes at most `MAX_LETTERS`, and the recognizer knows all of them."""
        letters = "".join(quoted_texts(prompt))
        return 0 < len(letters) <= MAX_LETTERS and self._known.issuperset(letters)

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Score videos `[B, F, H, W, 3]` uint8: 1 where every frame shows exactly the quoted texts."""
        scores = [
            self._score(video, quoted_texts(prompt)) if self.applies(prompt) else torch.nan
            for video, prompt in zip(videos, prompts, strict=True)
        ]
        return {"TEXT": torch.tensor(scores)}

    def describe(self) -> str:
        """Say which reader it is, and how many frames it reads."""
        return f"TEXT by PP-OCRv6 small in {self._num_frames} frames"

    def _score(self, video: Tensor, asked: Sequence[str]) -> float:
        chosen = torch.linspace(0, len(video) - 1, self._num_frames).round().long().unique()
        frames = video[chosen].cpu().numpy()[..., ::-1]  # to BGR, as the recognizer was trained
        read = [self._reader(np.ascontiguousarray(frame), use_det=True).txts or () for frame in frames]
        return sum(legibility(asked, [comparable(line) for line in lines]) for lines in read) / len(read)
