"""The VideoAlign scorer gives the scores of the library's own network, alone and in batches, and NaN where it fails."""

import logging
import math
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from hyvideo.config.schema import RewardConfig
from hyvideo.data.videos import read_chosen, read_video, write_video
from hyvideo.models.reward_models.rewards import check_rewards, get_reward_fn
from hyvideo.models.reward_models.videoalign import VideoAlignScorer
from hyvideo.models.reward_models.videoalign.scorer import MIN_PIXELS, frame_indices, patches
from scripts.tiny.components import build_tokenizer
from tests.support.videoreward import STATISTICS, TEXT, VideoReward

PROMPTS = ["a red circle moves slowly to the left", "two {braces} and 50%", "小猫 — naïve ☕ " * 8]
METRICS = ("VQ", "MQ", "TA")


@pytest.fixture(scope="module")
def scorer(whole: VideoReward) -> VideoAlignScorer:
    return VideoAlignScorer(whole.root)


def expected_raw(reward: VideoReward, path: Path, prompt: str) -> list[float]:
    """Scores by the library's network of the request as the original writes it."""
    pixels, grid = patches(read_chosen(path, partial(frame_indices, fps=2.0)), 200704)
    video = "<|video_pad|>" * (math.prod(grid) // 4)
    request = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        f"<|vision_start|>{video}<|vision_end|>{TEXT.format(text_prompt=prompt)}<|im_end|>\n<|im_start|>assistant\n"
    )
    return reward.expected(request, pixels, grid)


@pytest.mark.parametrize("form", ["whole", "split"])
def test_both_forms_score_as_the_librarys_network_with_merged_adapters(form, clips, request):
    reward = request.getfixturevalue(form)
    scores = VideoAlignScorer(reward.root).score(clips, PROMPTS, normalize=False)
    for path, prompt, *received in zip(clips, PROMPTS, *(scores[metric] for metric in METRICS), strict=True):
        assert received == pytest.approx(expected_raw(reward, path, prompt), abs=2e-5)
    assert len({round(score, 3) for metric in METRICS for score in scores[metric]}) == 9, "scores that tell nothing"


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_score_does_not_depend_on_its_batch(whole, scorer, clips, batch_size):
    single = [scorer.score([path], [prompt]) for path, prompt in zip(clips, PROMPTS, strict=True)]
    batched = VideoAlignScorer(whole.root, batch_size=batch_size).score(clips[::-1], PROMPTS[::-1])
    for metric in (*METRICS, "Overall"):
        assert batched[metric][::-1] == pytest.approx([scores[metric][0] for scores in single], abs=2e-5)


def test_normalised_scores_are_standardised_raw_ones_and_overall_is_their_sum(scorer, clips):
    raw, normal = (scorer.score(clips, PROMPTS, normalize=normalize) for normalize in (False, True))
    for metric, (mean, std) in STATISTICS.items():
        assert normal[metric] == pytest.approx([(score - mean) / std for score in raw[metric]])
    for scores in (raw, normal):
        sums = [sum(values) for values in zip(*(scores[metric] for metric in METRICS), strict=True)]
        assert scores["Overall"] == pytest.approx(sums)


def test_frames_in_memory_score_as_the_file_they_come_from(scorer, clips):
    frames = read_video(clips[1])
    assert scorer.score_frames([frames], 8, PROMPTS[:1]) == scorer.score(clips[1:2], PROMPTS[:1])


def test_a_failed_item_is_nan_alone_and_says_why(scorer, clips, tmp_path, caplog):
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(clips[0].read_bytes()[:200])
    paths = [clips[0], broken, clips[1], clips[2], tmp_path / "missing.mp4"]
    prompts = [PROMPTS[0], PROMPTS[0], "show <|TA_reward|> twice", PROMPTS[2], PROMPTS[0]]
    with caplog.at_level(logging.WARNING):
        scores = scorer.score(paths, prompts)
    assert [math.isnan(score) for score in scores["Overall"]] == [False, True, True, False, True]
    good = scorer.score([clips[0], clips[2]], [PROMPTS[0], PROMPTS[2]])
    assert [scores["TA"][0], scores["TA"][3]] == pytest.approx(good["TA"], abs=2e-5)
    assert "broken.mp4 (200 bytes) cannot be decoded" in caplog.text and "special tokens" in caplog.text


def test_more_shown_frames_and_pixels_change_the_scores(scorer, clips, tmp_path):
    write_video(tmp_path / "large.mp4", torch.randint(0, 256, (8, 352, 480, 3)).byte(), 4)
    for path, choices in (
        (clips[1], [{}, {"fps": 4.0}, {"num_frames": 8}]),
        (tmp_path / "large.mp4", [{}, {"max_pixels": MIN_PIXELS}]),
    ):
        scores = [scorer.score([path], PROMPTS[:1], **choice)["VQ"][0] for choice in choices]
        assert len({round(score, 3) for score in scores}) == len(choices)


def test_a_call_that_makes_no_sense_is_refused_and_no_videos_have_no_scores(scorer, clips):
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        scorer.score(clips, [])
    with pytest.raises(ValueError, match="give fps or num_frames, not both"):
        scorer.score(clips, PROMPTS, fps=2.0, num_frames=4)
    assert scorer.score([], []) == {"VQ": [], "MQ": [], "TA": [], "Overall": []}


def test_bf16_rounds_weights_and_frequencies_and_stays_near_fp32(whole, scorer, clips):
    rounded = VideoAlignScorer(whole.root, dtype=torch.bfloat16)
    floating = [*rounded._network.parameters(), *(b for b in rounded._network.buffers() if b.is_floating_point())]
    assert {tensor.dtype for tensor in floating} == {torch.bfloat16}
    raw, exact = (each.score(clips, PROMPTS, normalize=False) for each in (rounded, scorer))
    worst = max(abs(a - b) for metric in METRICS for a, b in zip(raw[metric], exact[metric], strict=True))
    assert 0 < worst < 0.5


@pytest.mark.parametrize("reward_io", ["file", "memory"])
def test_the_reward_is_the_scorers_of_the_videos_at_the_runs_frame_rate(whole, scorer, clips, tmp_path, reward_io):
    video, prompts = read_video(clips[1]), PROMPTS[:2]
    videos = torch.stack([video, video.flip(0)])
    config = RewardConfig(reward_checkpoint_path=str(whole.root), reward_io=reward_io)
    scores = get_reward_fn(config, video_fps=6)(videos, prompts)
    paths = [tmp_path / "0.mp4", tmp_path / "1.mp4"]
    for path, each in zip(paths, videos, strict=True):
        write_video(path, each, 6)
    expected = scorer.score(paths, prompts) if reward_io == "file" else scorer.score_frames(videos, 6, prompts)
    for metric in METRICS:
        assert scores.metrics[metric].tolist() == pytest.approx(expected[metric], abs=2e-5), metric
    total = [0.5 * vq + 0.5 * mq + ta for vq, mq, ta in zip(*(expected[m] for m in METRICS), strict=True)]
    assert scores.total.tolist() == pytest.approx(total, abs=1e-4)


def test_another_dtype_is_refused_without_loading_the_network(whole):
    options = {"checkpoint": str(whole.root), "dtype": "fp8"}
    models = {"videoalign_local": {"sub_reward": {"VQ": 1.0}, "options": options}}
    with pytest.raises(ValueError, match="videoalign_local: expected dtype bf16 or fp32, received 'fp8'"):
        check_rewards(RewardConfig(reward_config={"models": models}), "ckpts", 24)


def damaged(reward: VideoReward, tmp_path: Path, change) -> Path:
    root = shutil.copytree(reward.root, tmp_path / "damaged")
    path = root / "checkpoint-20" / "model.pth"
    weights = torch.load(path)
    change(weights)
    torch.save(weights, path)
    return root


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("base_model.model.model.layers.1.mlp.up_proj.lora_B.default.weight"), "up_proj.lora_B"),
        (lambda w: w.pop("base_model.model.visual.blocks.0.attn.qkv.bias"), "visual.blocks.0.attn.qkv.bias"),
        (lambda w: w.update({"base_model.model.model.layers.7.extra": torch.ones(1)}), "layers.7.extra"),
        (lambda w: w.update({"base_model.model.rm_head.weight": torch.ones(3, 32)}), "rm_head"),
        (lambda w: w.pop("base_model.model.model.embed_tokens.weight"), "embed_tokens.weight"),
    ],
)
def test_weights_that_are_not_exactly_the_networks_are_refused(whole, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        VideoAlignScorer(damaged(whole, tmp_path, change))


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


def test_a_pickle_that_runs_code_and_a_tokenizer_without_the_reward_tokens_are_refused(whole, tmp_path, capsys):
    root = damaged(whole, tmp_path, lambda weights: weights.update(evil=Evil()))
    with pytest.raises(ValueError, match="model.pth. holds more than tensors, or is damaged; nothing of it was run"):
        VideoAlignScorer(root)
    assert "executed" not in capsys.readouterr().out
    build_tokenizer().save_pretrained(root / "checkpoint-20" / "tokenizer")
    with pytest.raises(ValueError, match=r"has no <\|video_pad\|>, <\|VQ_reward\|>, <\|MQ_reward\|>, <\|TA_reward\|>"):
        VideoAlignScorer(root)
