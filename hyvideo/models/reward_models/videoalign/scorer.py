"""Score videos with a VideoReward checkpoint, exactly as its authors' code does; and that as a reward."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from hyvideo.data.videos import read_chosen
from hyvideo.models.model_folder import check_component, readable
from hyvideo.models.reward_models.registry import RewardContext, RewardModel, Videos, register_reward
from hyvideo.models.reward_models.videoalign.network import METRICS, load_network, read_settings
from hyvideo.models.weight_files import DTYPES

PATCH, TEMPORAL_PATCH, MERGE = 14, 2, 2
MIN_PIXELS = 128 * 28 * 28
"""Smaller frames are enlarged to at least this many pixels."""

_MIN_FRAMES, _MAX_FRAMES = 4, 768
_FRAMES_AT_ONCE = 16  # that are float32 in their full size, which takes four times the memory of the file's frames
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_REQUEST = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|>{video}<|vision_end|>{text}<|im_end|>\n<|im_start|>assistant\n"
)
_VIDEO = "<|video_pad|>"
_LOG = logging.getLogger(__name__)


def frame_indices(total: int, video_fps: float, *, fps: float, num_frames: int | None = None) -> list[int]:
    """Choose an even number of frames spread over the whole of a video with `total` frames, `video_fps` per second.

    They are `fps` per second of video, at least 4 if it has them; or `num_frames` in all, rounded to even, at least 2
    (else a ValueError). Of a shorter video all frames are shown, the last one twice where their number is odd, as in
    the original.
    """
    if num_frames is not None:
        count = round(num_frames / TEMPORAL_PATCH) * TEMPORAL_PATCH
        if count < TEMPORAL_PATCH:
            raise ValueError(f"VideoAlign: num_frames is {num_frames}, but must be even and at least 2.")
        if count > total:
            return [*range(total), *[total - 1] * (total % TEMPORAL_PATCH)]
    else:
        most = min(_MAX_FRAMES, total) // TEMPORAL_PATCH * TEMPORAL_PATCH
        wanted = min(max(total / video_fps * fps, _MIN_FRAMES), most)
        count = max(TEMPORAL_PATCH, round(wanted / TEMPORAL_PATCH) * TEMPORAL_PATCH)
    return torch.linspace(0, total - 1, count).round().long().tolist()


def patches(frames: Tensor, max_pixels: int) -> tuple[Tensor, tuple[int, int, int]]:
    """Resize, normalise and cut uint8 frames `[N, H, W, 3]`, N even, as the vision tower takes them.

    Height and width become multiples of 28 with MIN_PIXELS to `max_pixels` pixels; sides of a ratio beyond 200 are a
    ValueError. Patches are `[T h w, 3 * 2 * 14 * 14]` float32, grouped by 2x2 neighbours, with their grid (T, h, w).
    """
    height, width = smart_resize(*frames.shape[1:3], PATCH * MERGE, MIN_PIXELS, max_pixels)
    parts = frames.permute(0, 3, 1, 2).split(_FRAMES_AT_ONCE)
    resized = [interpolate(part.float(), (height, width), mode="bicubic", antialias=True) for part in parts]
    pixels = torch.cat(resized).clamp(0, 255).round() / 255
    pixels = (pixels - torch.tensor(_MEAN).view(3, 1, 1)) / torch.tensor(_STD).view(3, 1, 1)
    grid = (len(frames) // TEMPORAL_PATCH, height // PATCH, width // PATCH)
    pattern = "(T t) c (h a p) (w b q) -> (T h w a b) (c t p q)"  # a, b: place among the 2x2 neighbours
    return rearrange(pixels, pattern, t=TEMPORAL_PATCH, a=MERGE, b=MERGE, p=PATCH, q=PATCH), grid


@dataclass(frozen=True)
class _Item:
    """One video and prompt, ready for the network."""

    token_ids: Tensor
    pixels: Tensor
    grid: tuple[int, int, int]
    reward_positions: Tensor


class VideoAlignScorer:
    """The three scores of VideoAlign and their sum, float32.

    `checkpoint_root` is the VideoReward folder with `model_config.json`, `checkpoint-*` and the scoring text. With
    `own_files` video files were made here, and need not be read in a process of their own.

    Example:
        >>> scorer = VideoAlignScorer("ckpts/VideoReward", "cuda", torch.bfloat16)
        >>> scorer.score(["a.mp4"], ["a red ball rolls over grass"])
        {"VQ": [0.41], "MQ": [-0.2], "TA": [1.1], "Overall": [1.31]}
    """

    def __init__(
        self,
        checkpoint_root: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        batch_size: int = 8,
        own_files: bool = True,
    ) -> None:
        with readable(Path(checkpoint_root), "VideoReward"):
            self.settings = read_settings(Path(checkpoint_root))
            self._tokenizer, special = _load_tokenizer(self.settings.checkpoint / "tokenizer")
            self._video_token, *self._reward_tokens = special
            # One `.to` converts the rotary frequencies as well, which the original rounds together with the weights.
            self._network = load_network(self.settings).to(device=device, dtype=dtype)
        self._batch_size, self._own_files = batch_size, own_files

    def score(
        self,
        video_paths: Sequence[str | Path],
        prompts: Sequence[str],
        normalize: bool = True,
        num_frames: int | None = None,
        fps: float | None = None,
        max_pixels: int | None = None,
    ) -> dict[str, list[float]]:
        """Score B video files for their B prompts: VQ, MQ, TA and Overall (their sum), B numbers each.

        A file that cannot be decoded, or a prompt that contains the network's own special tokens, gives NaN for its own
        item only, and a warning says why.

        With `normalize` each metric's mean is subtracted and the rest divided by its spread, as the checkpoint records
        them. `fps` frames per second of video are shown, or `num_frames` in all (both are a ValueError), of at most
        `max_pixels` each; more frames give higher scores.
        """
        if num_frames is not None and fps is not None:
            raise ValueError(f"VideoAlign: give fps or num_frames, not both; received {fps} and {num_frames}.")
        if num_frames is None and fps is None:
            num_frames = self.settings.num_frames
        choose = partial(frame_indices, fps=self.settings.fps if fps is None else fps, num_frames=num_frames)
        read = partial(read_chosen, choose=choose, own=self._own_files)
        return self._score(lambda path: read(Path(path)), video_paths, prompts, normalize, max_pixels)

    def score_frames(
        self, videos: Sequence[Tensor], video_fps: float, prompts: Sequence[str]
    ) -> dict[str, list[float]]:
        """Score B videos in memory, uint8 `[F, H, W, 3]` at `video_fps` frames per second, as `score` by default."""
        choice = {"fps": self.settings.fps, "num_frames": self.settings.num_frames}
        return self._score(lambda video: video[frame_indices(len(video), video_fps, **choice)].cpu(), videos, prompts)

    def to(self, device: torch.device | str) -> None:
        """Move the network."""
        self._network.to(device)

    def _score(
        self,
        read: Callable[[Any], Tensor],
        videos: Sequence[Any],
        prompts: Sequence[str],
        normalize: bool = True,
        max_pixels: int | None = None,
    ) -> dict[str, list[float]]:
        """Score what `read` makes frames of; raw scores are NaN where it cannot."""
        items = {}
        for index, (video, prompt) in enumerate(zip(videos, prompts, strict=True)):
            try:
                items[index] = self._prepare(read(video), prompt, max_pixels or self.settings.max_pixels)
            except ValueError as error:
                _LOG.warning("video %d of %d has no score: %s", index + 1, len(prompts), error)
        raw = torch.full((len(prompts), len(METRICS)), math.nan)
        by_length = sorted(items, key=lambda index: len(items[index].token_ids))
        for start in range(0, len(by_length), self._batch_size):
            chosen = by_length[start : start + self._batch_size]
            raw[chosen] = self._run([items[index] for index in chosen])
        scores = {}
        for metric, values in zip(METRICS, raw.T.tolist(), strict=True):
            mean, std = self.settings.statistics[metric] if normalize else (0.0, 1.0)
            scores[metric] = [(value - mean) / std for value in values]
        scores["Overall"] = [sum(values) for values in zip(*scores.values(), strict=True)]
        return scores

    def _prepare(self, frames: Tensor, prompt: str, max_pixels: int) -> _Item:
        """Cut frames into patches and write the request around them."""
        pixels, grid = patches(frames, max_pixels)
        num_tokens = math.prod(grid) // MERGE**2
        text = self.settings.text.replace("{text_prompt}", prompt)
        request = _REQUEST.format(video=_VIDEO * num_tokens, text=text)
        token_ids = torch.tensor(self._tokenizer(request)["input_ids"])
        positions = torch.isin(token_ids, torch.tensor(self._reward_tokens)).nonzero().flatten()
        num_video_tokens = int((token_ids == self._video_token).sum())
        if token_ids[positions].tolist() != self._reward_tokens or num_video_tokens != num_tokens:
            raise ValueError(f"VideoAlign: the prompt contains special tokens of the network: {prompt!r}.")
        return _Item(token_ids, pixels, grid, positions)

    @torch.inference_mode()
    def _run(self, items: Sequence[_Item]) -> Tensor:
        """Run a batch; raw scores `[B, 3]`."""
        device = next(self._network.parameters()).device
        token_ids = torch.nn.utils.rnn.pad_sequence(
            [item.token_ids for item in items], batch_first=True, padding_value=self._tokenizer.pad_token_id
        )
        return self._network(
            token_ids.to(device),
            torch.cat([item.pixels for item in items]).to(device),
            torch.tensor([item.grid for item in items], device=device),
            torch.stack([item.reward_positions for item in items]).to(device),
        ).cpu()


@register_reward("videoalign_local")
class VideoAlignReward(RewardModel):
    """Normalised VQ, MQ and TA of VideoReward.

    Its folder is `checkpoint`, or `VideoReward` below the model root; `dtype` as in `RewardContext.dtype_name`.
    """

    metrics = METRICS
    reads = "file"

    def __init__(self, context: RewardContext, checkpoint: str | None = None, dtype: str | None = None) -> None:
        super().__init__(context)
        self._dtype = context.dtype_name("videoalign_local", dtype)
        self._scorer = VideoAlignScorer(
            self._folder(context, checkpoint),
            device=context.device,
            dtype=DTYPES[self._dtype],
            batch_size=context.batch_size,
            own_files=context.own_files,
        )

    @classmethod
    def check(cls, context: RewardContext, checkpoint: str | None = None, dtype: str | None = None) -> None:
        """Read what the folder declares."""
        context.dtype_name("videoalign_local", dtype)
        read_settings(cls._folder(context, checkpoint))

    def __call__(self, videos: Videos, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Score mp4 files, or frames `[B, F, H, W, 3]` at the run's frame rate."""
        if isinstance(videos, Tensor):
            scores = self._scorer.score_frames(videos, self.context.video_fps, prompts)
        else:
            scores = self._scorer.score(videos, prompts)
        return {metric: torch.tensor(scores[metric]) for metric in METRICS}

    def to(self, device: torch.device | str) -> None:
        """Move the network."""
        self._scorer.to(device)

    def describe(self) -> str:
        """Say what the scores depend on."""
        settings = self._scorer.settings
        frames = f"{settings.num_frames} frames" if settings.num_frames else f"{settings.fps:g} frames per second"
        return f"normalised VQ, MQ, TA from {frames}, {self._dtype}"

    @staticmethod
    def _folder(context: RewardContext, checkpoint: str | None) -> Path:
        return Path(checkpoint) if checkpoint else context.model_root / "VideoReward"


def _load_tokenizer(folder: Path) -> tuple[AutoTokenizer, list[int]]:
    """Return the tokenizer, and its ids of the video token and the three reward tokens."""
    with readable(folder, "the tokenizer"):
        check_component(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    tokens = [_VIDEO, *(f"<|{metric}_reward|>" for metric in METRICS)]
    missing = [token for token in tokens if token not in tokenizer.get_vocab()]
    if missing:
        raise ValueError(f"VideoAlign: the tokenizer in {folder} has no {', '.join(missing)}.")
    return tokenizer, tokenizer.convert_tokens_to_ids(tokens)
