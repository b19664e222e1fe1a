"""Scores of single frames by a CLIP of the transformers library: fit to the prompt, and visual quality."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import CLIPModel, CLIPTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from hyvideo.models.model_folder import check_component, local_folder, readable
from hyvideo.models.reward_models.registry import RewardContext, RewardModel, pretrained, register_reward


class _FrameReward(RewardModel):
    """Mean over `num_frames` frames, spread over the video, of the score that a CLIP gives each.

    `checkpoint` is the folder of the CLIP with its tokenizer and image processor; one that cannot be read or lacks
    weights is a ValueError. `scale` is "usual", or "published" for the units of flow_grpo's scorers, in which the
    numbers of the paper's tables seem to be (it does not say).
    """

    published: ClassVar[float | None] = None
    """What flow_grpo's scorer divides the logit by."""

    def __init__(self, context: RewardContext, checkpoint: str, num_frames: int = 8, scale: str = "usual") -> None:
        super().__init__(context)
        self.check(context, checkpoint, num_frames, scale)
        network = pretrained(CLIPModel, checkpoint, self.metrics[0], dtype=torch.float32)
        with readable(Path(checkpoint), f"the CLIP for {self.metrics[0]}"):
            self._tokenizer = CLIPTokenizerFast.from_pretrained(checkpoint, local_files_only=True)
            self._processor = CLIPImageProcessorPil.from_pretrained(checkpoint, local_files_only=True)
        side = network.config.vision_config.image_size
        given = [getattr(self._processor, name, None) for name in ("size", "crop_size", "pad_size")]
        sizes = [size for sizes in given if sizes for size in dict(sizes).values() if size]
        if max(sizes, default=0) > 2 * side:  # the middle is cut out of an image that might fill the memory
            raise ValueError(f"{self.metrics[0]}: '{checkpoint}' makes images of {sizes} for a CLIP of {side} pixels.")
        longest = network.config.text_config.max_position_embeddings  # not every tokenizer's files say it
        self._tokenizer.model_max_length = min(self._tokenizer.model_max_length, longest)
        self._network = network.eval().to(context.device)
        self._num_frames, self._is_published = num_frames, scale == "published"

    @classmethod
    def check(cls, context: RewardContext, checkpoint: str, num_frames: int = 8, scale: str = "usual") -> None:
        """Refuse a folder that is not there, or a scale that the metric does not have."""
        scales = ["usual", *(["published"] if cls.published else [])]
        if scale not in scales:
            raise ValueError(f"{cls.metrics[0]}: scale must be one of {', '.join(scales)}; received {scale!r}.")
        check_component(local_folder(checkpoint, cls.metrics[0]))

    @torch.inference_mode()
    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Score videos `[B, F, H, W, 3]` uint8; texts are cut at the CLIP's context length."""
        scores, chosen = [], torch.linspace(0, videos.shape[1] - 1, self._num_frames).round().long()
        for video, text in zip(videos, self._text_vectors(prompts), strict=True):
            pixels = self._processor(list(video[chosen].cpu().numpy()), return_tensors="pt").pixel_values
            frames = self._network.get_image_features(pixels.to(self._network.device)).pooler_output
            frames = F.normalize(frames, dim=-1)
            logits = self._network.logit_scale.exp() * (frames @ text)
            scores.append(logits / self.published if self._is_published else self._score(frames, text))
        return {self.metrics[0]: torch.stack(scores).mean(1).cpu()}

    def to(self, device: torch.device | str) -> None:
        """Move the network."""
        self._network.to(device)

    def _text_vectors(self, texts: Sequence[str]) -> Tensor:
        """Return the texts' unit vectors `[B, D]`."""
        tokens = self._tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
        return F.normalize(self._network.get_text_features(**tokens.to(self._network.device)).pooler_output, dim=-1)

    @abstractmethod
    def _score(self, frames: Tensor, text: Tensor) -> Tensor:
        """Return the score of every frame `[N]` from their unit vectors `[N, D]` and the prompt's `[D]`."""


@register_reward("clip_score")
class ClipScore(_FrameReward):
    """CLIPScore (Hessel et al. 2021) on the common scale of 0 to 100: `100 max(cos, 0)`."""

    metrics = ("CLIPScore",)
    published = 30.0

    def _score(self, frames: Tensor, text: Tensor) -> Tensor:
        return 100 * (frames @ text).clamp_min(0)


@register_reward("pick_score")
class PickScore(_FrameReward):
    """PickScore (Kirstain et al. 2023): the cosine times the network's own temperature, about 20 for good images."""

    metrics = ("PickScore",)
    published = 26.0

    def _score(self, frames: Tensor, text: Tensor) -> Tensor:
        return self._network.logit_scale.exp() * (frames @ text)


@register_reward("clip_iqa")
class ClipIqa(_FrameReward):
    """CLIP-IQA (Wang et al. 2023): probability, 0 to 1, that a frame is a good photo and not a bad one.

    It asks nothing of the prompt. The position embedding is kept, as for any CLIP of the transformers library.
    """

    metrics = ("CLIPIQA",)

    def _text_vectors(self, texts: Sequence[str]) -> Tensor:
        """Return for each prompt the same `[D, 2]`, the vectors of a good and of a bad photo."""
        return super()._text_vectors(["Good photo.", "Bad photo."]).T.expand(len(texts), -1, -1)

    def _score(self, frames: Tensor, text: Tensor) -> Tensor:
        return (self._network.logit_scale.exp() * frames @ text).softmax(-1)[:, 0]
