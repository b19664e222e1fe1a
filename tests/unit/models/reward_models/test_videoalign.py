"""VideoAlign: settings as its authors' code reads them, frames cut as the library does, the scores of its network."""

import logging
import math
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.nn.functional import interpolate
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hyvideo.config.schema import RewardConfig
from hyvideo.data.videos import read_chosen, read_video, write_video
from hyvideo.models.reward_models.rewards import check_rewards, get_reward_fn
from hyvideo.models.reward_models.videoalign import VideoAlignScorer
from hyvideo.models.reward_models.videoalign.network import read_settings
from hyvideo.models.reward_models.videoalign.scorer import MIN_PIXELS, frame_indices, patches
from scripts.tiny.components import build_tokenizer
from tests.support.limits import bounded_memory
from tests.support.rewards import moving_square
from tests.support.videoreward import STATISTICS, TEXT, VideoReward, write_model_config, write_videoreward


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> VideoReward:
    """The released form: one model.pth, one output."""
    return write_videoreward(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three videos of different sizes, lengths and frame rates."""
    folder = tmp_path_factory.mktemp("clips")
    paths = []
    for index, (frames, height, width, fps) in enumerate([(9, 64, 96, 8), (24, 48, 48, 8), (5, 80, 64, 24)]):
        noise = torch.rand(3, frames, height // 8, width // 8, generator=torch.Generator().manual_seed(index))
        video = torch.nn.functional.interpolate(noise, scale_factor=8, mode="bilinear").mul(255).byte()
        paths.append(folder / f"{index}.mp4")
        write_video(paths[-1], video.permute(1, 2, 3, 0), fps)
    return paths


def test_frames_are_spread_over_the_whole_video():
    for total, video_fps, choice, expected in (
        (81, 24, {"fps": 2.0}, [0, 16, 32, 48, 64, 80]),  # 6.75 frames, rounded to even
        (25, 24, {"fps": 2.0}, [0, 8, 16, 24]),  # at least 4
        (5, 24, {"fps": 2.0}, [0, 1, 3, 4]),
        (3, 24, {"fps": 2.0}, [0, 2]),  # an odd count of frames gives an even choice
        (1, 24, {"fps": 2.0}, [0, 0]),
        (33, 24, {"fps": 2.0, "num_frames": 5}, [0, 11, 21, 32]),
        (33, 24, {"fps": 2.0, "num_frames": 8}, [0, 5, 9, 14, 18, 23, 27, 32]),
        (4, 24, {"fps": 2.0, "num_frames": 6}, [0, 1, 2, 3]),  # all there are
        (5, 24, {"fps": 2.0, "num_frames": 6}, [0, 1, 2, 3, 4, 4]),
    ):
        assert frame_indices(total, video_fps, **choice) == expected


@given(st.integers(1, 2000), st.floats(1, 120), st.floats(0.1, 60))
def test_any_video_gives_an_even_number_of_its_own_frames_in_order(total, video_fps, fps):
    indices = frame_indices(total, video_fps, fps=fps)
    assert len(indices) % 2 == 0 and 2 <= len(indices) <= 768
    assert indices == sorted(indices) and indices[0] == 0 and indices[-1] == total - 1


def test_the_shown_frames_of_a_file_are_read_and_of_a_short_one_all(tmp_path):
    write_video(path := tmp_path / "a.mp4", moving_square(10), 5)
    choose = partial(frame_indices, fps=2.0)
    assert torch.equal(read_chosen(path, choose), read_video(path)[[0, 3, 6, 9]])
    assert torch.equal(read_chosen(path, partial(choose, num_frames=12)), read_video(path))
    with pytest.raises(ValueError, match="num_frames is 0, but must be even and at least 2"):
        read_chosen(path, partial(choose, num_frames=0))


def test_patches_of_a_still_are_those_of_the_librarys_image_processor():
    frame = torch.randint(0, 256, (336, 448, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    cut, grid = patches(frame.expand(4, -1, -1, -1), 336 * 448)
    expected = Qwen2VLImageProcessorPil(do_resize=False)([np.asarray(frame)], return_tensors="pt")
    assert grid == (2, 24, 32)
    torch.testing.assert_close(cut, expected.pixel_values.repeat(2, 1), atol=1e-5, rtol=0)


def test_large_frames_are_shrunk_as_pillow_shrinks_them():
    noise = torch.randint(40, 216, (1, 3, 88, 156), generator=torch.Generator().manual_seed(0)).float()
    frame = interpolate(noise, (704, 1248), mode="bilinear")[0].permute(1, 2, 0).byte()
    cut, grid = patches(frame.expand(2, -1, -1, -1), 200704)
    size = (grid[2] * 14, grid[1] * 14)
    small = torch.from_numpy(np.array(Image.fromarray(frame.numpy()).resize(size, Image.Resampling.BICUBIC)))
    expected, _ = patches(small.expand(2, -1, -1, -1), 200704)
    assert (cut - expected).abs().max() * 0.26862954 * 255 < 1.5  # grey levels


def test_a_patch_holds_two_frames_one_after_the_other():
    frames = torch.zeros(4, 336, 448, 3, dtype=torch.uint8)
    frames[1], frames[2] = 255, 128
    cut, grid = patches(frames, 336 * 448)
    pairs = cut.view(grid[0], -1, 3, 2, 196)[:, :, 0].mean((1, 3))
    black, grey, white = ((value / 255 - 0.48145466) / 0.26862954 for value in (0, 128, 255))
    torch.testing.assert_close(pairs, torch.tensor([[black, white], [grey, black]]), atol=1e-4, rtol=0)


def test_frames_are_resized_into_the_bounds_without_a_copy_of_all_as_float():
    # too large, and too small: enlarged to 336x336, at least 100352 pixels
    for size, bounded in (((352, 624), (1, 24, 42)), ((64, 64), (1, 24, 24))):
        assert patches(torch.zeros(2, *size, 3, dtype=torch.uint8), 200704)[1] == bounded
    frames = torch.zeros(96, 720, 1280, 3, dtype=torch.uint8)  # 253 MiB, as float 1 GiB
    with bounded_memory(800 * 2**20):
        pixels, grid = patches(frames, MIN_PIXELS)
    assert len(pixels) == math.prod(grid) and grid[0] == 48


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder without weights; settings are all that is read."""
    for step in ("checkpoint-9", "checkpoint-100", "checkpoint-old"):
        (tmp_path / step).mkdir()
    (tmp_path / "detailed_special.txt").write_text(TEXT)
    write_model_config(tmp_path)
    return tmp_path


def only_module(root: Path, text: str) -> None:
    (root / "detailed_special.txt").rename(root / "prompt_template.py").write_text(text)


def test_the_newest_checkpoint_a_base_beside_it_and_statistics_where_there_are_any_are_taken(root):
    settings = read_settings(root)
    assert settings.checkpoint == root / "checkpoint-100"
    assert settings.base == "nowhere/base" and settings.statistics == STATISTICS
    (root / "base").mkdir()
    write_model_config(root, inference_config=None)
    settings = read_settings(root)
    assert settings.base == str(root / "base") and set(settings.statistics.values()) == {(0.0, 1.0)}


def test_the_text_is_taken_from_the_authors_module_without_running_it_and_named_if_it_is_another(root, caplog):
    only_module(root, f"raise SystemExit\nOTHER = 1\nDETAILED_PROMPT_WITH_SPECIAL_TOKEN = {TEXT!r}\n")
    with caplog.at_level(logging.WARNING):
        assert read_settings(root).text == TEXT
    assert f"{root / 'prompt_template.py'} is not the published one" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: (root / "detailed_special.txt").unlink(), "no scoring text"),
        (lambda root: (root / "detailed_special.txt").write_text("{text_prompt}"), "VQ_reward.* exactly once"),
        (lambda root: (root / "detailed_special.txt").write_bytes(b"\xff"), "Cannot load VideoReward .*utf-8"),
        (lambda root: (root / "detailed_special.txt").write_bytes(bytes(2**20 + 1)), "more than"),
        (lambda root: (root / "model_config.json").unlink(), "Cannot read .*model_config.json': .*No such file"),
        (lambda root: (root / "model_config.json").write_text("{"), "Cannot read .*model_config.json"),
        (lambda root: (root / "model_config.json").write_text('{"data_config": {}}'), "Cannot load .*model_config"),
        (lambda root: write_model_config(root, output_dim=2), "output_dim\n.*Input should be 1 or 3"),
        (lambda root: write_model_config(root, reward_token="last"), "reward_token 'special', received 'last'"),
        (lambda root: write_model_config(root, eval_dim=["VQ"]), r"eval_dim .* received \['VQ'\]"),
        (lambda root: write_model_config(root, fps="2"), "fps\n.*valid number.*input_value='2'"),
        (lambda root: write_model_config(root, num_frames=1), "greater than or equal to 2"),
        (lambda root: write_model_config(root, max_frame_pixels=10**10), "less than 67108864"),
        (lambda root: write_model_config(root, TA_std=0), r"statistics.TA.1\n.*greater than 0"),
        (lambda root: write_model_config(root, VQ_mean=float("nan")), r"statistics.VQ.0\n.*finite"),
        (lambda root: [path.rmdir() for path in root.glob("checkpoint-*")], "Cannot load VideoReward .*empty"),
        (lambda root: only_module(root, "A = 1"), "'DETAILED_PROMPT_WITH_SPECIAL_TOKEN'"),
        (lambda root: only_module(root, "def ("), "Cannot load VideoReward .*SyntaxError"),
        (lambda root: only_module(root, "-" * 10**5 + "1"), "Cannot load VideoReward .*(Recursion|Memory)Error"),
    ],
)
def test_what_is_missing_or_of_another_kind_is_named(root, change, message):
    change(root)
    with pytest.raises(ValueError, match=message):
        read_settings(root)


PROMPTS = ["a red circle moves slowly to the left", "two {braces} and 50%", "小猫 — naïve ☕ " * 8]
METRICS = ("VQ", "MQ", "TA")


@pytest.fixture(scope="module")
def scorer(whole: VideoReward) -> VideoAlignScorer:
    return VideoAlignScorer(whole.root)


@pytest.mark.parametrize("form", ["whole", "split"])
def test_both_forms_score_as_the_librarys_network_with_merged_adapters(form, clips, whole, tmp_path):
    """The other form is adapters and the rest over the base's weights, with three outputs."""
    reward = whole if form == "whole" else write_videoreward(tmp_path, split=True)
    scores = VideoAlignScorer(reward.root).score(clips, PROMPTS, normalize=False)
    for path, prompt, *received in zip(clips, PROMPTS, *(scores[metric] for metric in METRICS), strict=True):
        pixels, grid = patches(read_chosen(path, partial(frame_indices, fps=2.0)), 200704)
        video = f"<|vision_start|>{'<|video_pad|>' * (math.prod(grid) // 4)}<|vision_end|>"
        request = (  # as the original writes it
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            f"<|im_start|>user\n{video}{TEXT.format(text_prompt=prompt)}<|im_end|>\n<|im_start|>assistant\n"
        )
        assert received == pytest.approx(reward.expected(request, pixels, grid), abs=2e-5)
    assert len({round(score, 3) for metric in METRICS for score in scores[metric]}) == 9, "scores that tell nothing"


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_score_does_not_depend_on_its_batch_or_on_a_file(whole, scorer, clips, batch_size):
    single = [scorer.score([path], [prompt]) for path, prompt in zip(clips, PROMPTS, strict=True)]
    batched = VideoAlignScorer(whole.root, batch_size=batch_size).score(clips[::-1], PROMPTS[::-1])
    for metric in (*METRICS, "Overall"):
        assert batched[metric][::-1] == pytest.approx([scores[metric][0] for scores in single], abs=2e-5)
    assert scorer.score_frames([read_video(clips[1])], 8, PROMPTS[1:2]) == single[1]


def test_normalised_scores_are_standardised_raw_ones_and_overall_is_their_sum(scorer, clips):
    raw, normal = (scorer.score(clips, PROMPTS, normalize=normalize) for normalize in (False, True))
    for metric, (mean, std) in STATISTICS.items():
        assert normal[metric] == pytest.approx([(score - mean) / std for score in raw[metric]])
    for scores in (raw, normal):
        sums = [sum(values) for values in zip(*(scores[metric] for metric in METRICS), strict=True)]
        assert scores["Overall"] == pytest.approx(sums)


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
    cases = {clips[1]: [{}, {"fps": 4.0}, {"num_frames": 8}], tmp_path / "large.mp4": [{}, {"max_pixels": MIN_PIXELS}]}
    for path, choices in cases.items():
        scores = [scorer.score([path], PROMPTS[:1], **choice)["VQ"][0] for choice in choices]
        assert len({round(score, 3) for score in scores}) == len(choices)


def test_what_makes_no_sense_is_refused_and_no_videos_have_no_scores(whole, scorer, clips):
    options = {"checkpoint": str(whole.root), "dtype": "fp8"}
    models = {"videoalign_local": {"sub_reward": {"VQ": 1.0}, "options": options}}
    with pytest.raises(ValueError, match="videoalign_local: expected dtype bf16 or fp32, received 'fp8'"):
        check_rewards(RewardConfig(reward_config={"models": models}), "ckpts", 24)  # no network is loaded
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
        (lambda w: w.update(evil=print), "model.pth. holds more than tensors, or is damaged; nothing of it was run"),
    ],
)
def test_weights_that_are_not_exactly_the_networks_are_refused(whole, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        VideoAlignScorer(damaged(whole, tmp_path, change))


def test_a_tokenizer_without_the_reward_tokens_is_refused(whole, tmp_path):
    root = damaged(whole, tmp_path, dict)
    build_tokenizer().save_pretrained(root / "checkpoint-20" / "tokenizer")
    with pytest.raises(ValueError, match=r"has no <\|video_pad\|>, <\|VQ_reward\|>, <\|MQ_reward\|>, <\|TA_reward\|>"):
        VideoAlignScorer(root)
