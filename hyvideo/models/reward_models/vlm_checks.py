"""Yes/no questions about a video, answered by the likelihood of "Yes" against "No" under a vision-language model."""

import base64
import hashlib
import io
import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hyvideo.config.outside import as_value_error
from hyvideo.data.checks import Check, read_checks
from hyvideo.models.model_folder import check_component, local_folder, readable
from hyvideo.models.reward_models.registry import (
    RewardContext,
    RewardFailureError,
    RewardModel,
    pretrained,
    register_reward,
)
from hyvideo.models.reward_models.remote.exchange import ChatServer, Fault
from hyvideo.models.weight_files import DTYPES

TEMPLATE = "These are frames of one video, in order. {question} Answer Yes or No."
"""What is asked after the frames, unless the option `template` says otherwise."""

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
"""Model types that run in this process; a server may run any."""

_ANSWERS = ("yes", "no")
_TOP = 20  # likeliest tokens that are asked for, the most that the protocol allows
_LOG = logging.getLogger(__name__)


def _word(token: str) -> str:
    """Write a token without what marks a blank before it, and in lower case."""
    return token.strip("Ġ▁ ").casefold()


def odds_of_yes(log_probs: Mapping[str, float]) -> float:
    """Return P(yes) / (P(yes) + P(no)) from log-probabilities of first tokens; NaN if neither is among them.

    Every way to write the answers counts: `Yes`, `yes`, ` YES`. One that is not among the tokens has no probability.
    """
    mass = dict.fromkeys(_ANSWERS, 0.0)
    for token, log_prob in log_probs.items():
        if (word := _word(token)) in mass:
            mass[word] += math.exp(log_prob)
    total = sum(mass.values())
    return mass["yes"] / total if total > 0 else math.nan


class LocalJudge:
    """A Qwen2.5-VL or Qwen3-VL in this process, which sees every frame as an image of at most `max_pixels`.

    A ValueError says that the folder cannot be read, or lacks weights or the answers' tokens.
    """

    def __init__(self, checkpoint: str, max_pixels: int, device: torch.device | str, dtype: torch.dtype) -> None:
        self.network = pretrained(AutoModelForImageTextToText, checkpoint, "vlm_checks", dtype=dtype)
        with readable(Path(checkpoint), "the model for vlm_checks"):
            self._tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
            self._images = Qwen2VLImageProcessorPil.from_pretrained(checkpoint, local_files_only=True)
            self._image = self._tokenizer.convert_ids_to_tokens(self.network.config.image_token_id)
            if self._asked(2, "").count(self._image) != 2:
                raise ValueError(f"its chat template must write {self._image} once for every image")
        vision, images = self.network.config.vision_config, self._images
        of_images = (images.patch_size, images.merge_size, images.temporal_patch_size)
        if of_images != (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size):
            raise ValueError(  # others would not fit, and large ones would fill the memory
                f"vlm_checks: the image processor in '{checkpoint}' cuts patches of other sizes than the model's."
            )
        words = {id: _word(token) for token, id in self._tokenizer.get_vocab().items()}
        self._answers = [[id for id, word in words.items() if word == answer] for answer in _ANSWERS]
        if not all(self._answers):
            raise ValueError(f"vlm_checks: the tokenizer in '{checkpoint}' has no single token for Yes or for No.")
        self.network.eval().to(device)
        self._max_pixels = max_pixels

    def yes(self, frames: Tensor, text: str) -> Tensor:
        """Return the probability of yes against no, 0-dim float32, for frames uint8 `[N, H, W, 3]`."""
        images, device, config = self._images, self.network.device, self.network.config
        least = (images.patch_size * images.merge_size) ** 2
        shown = images(
            list(frames.numpy()),
            size={"shortest_edge": least, "longest_edge": self._max_pixels},
            input_data_format="channels_last",
            return_tensors="pt",
        )
        num_tokens = int(shown.image_grid_thw[0].prod()) // images.merge_size**2
        asked = self._asked(len(frames), text).replace(self._image, self._image * num_tokens)
        tokens = self._tokenizer(asked, return_tensors="pt").input_ids.to(device)
        logits = self.network(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            mm_token_type_ids=(tokens == config.image_token_id).int(),
            pixel_values=shown.pixel_values.to(device, self.network.dtype),
            image_grid_thw=shown.image_grid_thw.to(device),
            use_cache=False,
            logits_to_keep=1,
        ).logits[0, -1]
        yes, no = (logits[ids].float().logsumexp(0) for ids in self._answers)
        return (yes - no).sigmoid()

    def _asked(self, num_images: int, text: str) -> str:
        """Write a request by the tokenizer's chat template, in which every image is one token."""
        content = [*[{"type": "image"}] * num_images, {"type": "text", "text": text}]
        return self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )


class RemoteJudge:
    """A model of a chat server; a ValueError if it does not answer, refuses, or answers without log-probabilities."""

    def __init__(self, url: str, model: str, max_pixels: int, context: RewardContext) -> None:
        self._server, self._max_pixels = ChatServer(url, model, context, "vlm_checks: server"), max_pixels
        with as_value_error("vlm_checks", Fault, RewardFailureError):
            self._first_token(torch.full((1, 56, 56, 3), 128, dtype=torch.uint8), "Is it grey? Yes or No.")

    def yes(self, frames: Tensor, text: str) -> Tensor:
        """Return the probability of yes against no, 0-dim, for frames as above; a Fault where none can be had."""
        height, width = frames.shape[1:3]
        scale = min(1.0, math.sqrt(self._max_pixels / (height * width)))
        if scale < 1:
            size = (max(1, int(height * scale)), max(1, int(width * scale)))
            resized = interpolate(frames.permute(0, 3, 1, 2).float(), size, mode="bicubic", antialias=True)
            frames = resized.clamp(0, 255).round().to(torch.uint8).permute(0, 2, 3, 1)
        odds = odds_of_yes(self._first_token(frames, text))
        if math.isnan(odds):
            raise Fault(f"neither Yes nor No is among the likeliest answers of {self._server.model} to {text!r:.200}")
        return torch.tensor(odds)

    def _first_token(self, frames: Tensor, text: str) -> dict[str, float]:
        """Return log-probabilities of the answer's likeliest first tokens to frames uint8 `[N, H, W, 3]` and a text."""
        content: list[dict[str, object]] = []
        for frame in frames:
            file = io.BytesIO()
            Image.fromarray(frame.cpu().numpy()).save(file, "PNG", compress_level=1)
            url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
            content.append({"type": "image_url", "image_url": {"url": url}})
        content.append({"type": "text", "text": text})
        answer = self._server.complete(content, max_tokens=1, temperature=0, logprobs=True, top_logprobs=_TOP)
        told = answer.logprobs
        if told is None or not told.content or not told.content[0].top_logprobs:
            raise Fault(f"{self._server.model} answers without log-probabilities, which are needed")
        return {token.token: token.logprob for token in told.content[0].top_logprobs}


@dataclass(frozen=True)
class Options:
    """Options of `vlm_checks`, see docs/rewards.md; those that do not go together are a ValueError."""

    checkpoint: str | None = None  # folder of a model of FAMILIES
    server: str | None = None  # instead of it, address of a chat server, up to and with `/v1`
    model: str | None = None  # as the server calls it
    num_frames: int = 8
    max_pixels: int = 200704
    template: str = TEMPLATE
    dtype: str | None = None  # None: bf16 on a GPU, fp32 on the CPU
    csv: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if (self.checkpoint is None) == (self.server is None) or (self.server is None) != (self.model is None):
            raise ValueError("vlm_checks: give either the option checkpoint, or both server and model.")
        fits = "{question}" in self.template and self.template.isprintable() and len(self.template) <= 300
        if not fits or self.num_frames < 1 or self.max_pixels < 32 * 32:
            raise ValueError(
                "vlm_checks: expected num_frames >= 1, max_pixels >= 1024 and a template of one line of 300 characters "
                f"with {{question}}; received {self}."
            )


@register_reward("vlm_checks")
class VlmChecks(RewardModel):
    """Mean over a prompt's checks of the probability of the expected answer, 0 to 1 (VQAScore, Lin et al. 2024).

    Its options are those of `Options`; a ValueError as there and of `LocalJudge` and `RemoteJudge`.
    """

    metrics = ("CHECKS",)

    def __init__(self, context: RewardContext, **options: Any) -> None:
        super().__init__(context)
        self._options, self._checks = _checked(context, options)
        chosen, name = self._options, context.dtype_name("vlm_checks", self._options.dtype)
        if chosen.server is None:
            self._judge = LocalJudge(chosen.checkpoint, chosen.max_pixels, context.device, DTYPES[name])
            what = f"{Path(chosen.checkpoint).name}, {name}"
        else:
            self._judge = RemoteJudge(chosen.server, chosen.model, chosen.max_pixels, context)
            what = f"{chosen.model} at {chosen.server}"
        asked = hashlib.sha256(repr(sorted(self._checks.items())).encode()).hexdigest()[:8]
        shown = f"{chosen.num_frames} frames of at most {chosen.max_pixels} pixels"
        self._about = f"CHECKS by {what}, {shown}, {chosen.template!r}, questions {asked}"
        self._threads = ThreadPoolExecutor(1 if chosen.server is None else context.in_flight, "vlm-checks")

    @classmethod
    def check(cls, context: RewardContext, **options: Any) -> None:
        """Read the checks and ask the server once; of a checkpoint read only what it is."""
        chosen, _ = _checked(context, options)
        if chosen.server is not None:
            RemoteJudge(chosen.server, chosen.model, chosen.max_pixels, context)

    def applies(self, prompt: str) -> bool:
        """Whether the prompt has checks."""
        return prompt in self._checks

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Score videos `[B, F, H, W, 3]` uint8; NaN and a warning where the server keeps failing."""
        chosen = torch.linspace(0, videos.shape[1] - 1, self._options.num_frames).round().long().unique()
        shown = [video[chosen].cpu() for video in videos]
        asked = [(video, check) for video, prompt in enumerate(prompts) for check in self._checks.get(prompt, ())]
        answers = self._threads.map(lambda one: self._likelihood(shown[one[0]], one[1]), asked)
        of_videos: list[list[float]] = [[] for _ in prompts]
        for (video, _), answer in zip(asked, answers, strict=True):
            of_videos[video].append(answer)
        return {"CHECKS": torch.tensor([sum(each) / len(each) if each else math.nan for each in of_videos])}

    def to(self, device: torch.device | str) -> None:
        """Move the network, if it is here."""
        if isinstance(self._judge, LocalJudge):
            self._judge.network.to(device)

    def describe(self) -> str:
        """Say who answers, what it sees and what it is asked."""
        return self._about

    @torch.no_grad()
    def _likelihood(self, frames: Tensor, check: Check) -> float:
        """Return the probability of the expected answer; NaN where the server failed."""
        try:
            yes = float(self._judge.yes(frames, self._options.template.replace("{question}", check.question)))
        except Fault as fault:
            _LOG.warning("a video has no score by vlm_checks: %s", fault)
            return math.nan
        return yes if check.answer == "yes" else 1 - yes


def _checked(context: RewardContext, options: Mapping[str, Any]) -> tuple[Options, dict[str, tuple[Check, ...]]]:
    """Return the options and the prompts' checks; a checkpoint of another family is refused."""
    chosen = Options(**options)
    context.dtype_name("vlm_checks", chosen.dtype)
    if chosen.checkpoint is not None:
        check_component(local_folder(chosen.checkpoint, "vlm_checks"))
        with readable(Path(chosen.checkpoint), "the configuration for vlm_checks"):
            config = AutoConfig.from_pretrained(chosen.checkpoint, local_files_only=True, trust_remote_code=False)
        if config.model_type not in FAMILIES:
            raise ValueError(
                f"vlm_checks: '{chosen.checkpoint}' is a {config.model_type}; in this process runs "
                f"{' or '.join(FAMILIES)}. Any other runs on a server: give the options server and model."
            )
    return chosen, read_checks(context.prompt_csvs if chosen.csv is None else chosen.csv)
