"""CLIPScore, PickScore and CLIP-IQA of a tiny CLIP of the real classes, against the library's own forward pass."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPConfig, CLIPModel, CLIPTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from hyvideo.config.schema import RewardConfig
from hyvideo.data.videos import write_video
from hyvideo.models.reward_models.clip import ClipIqa, ClipScore, PickScore
from hyvideo.models.reward_models.registry import RewardContext
from hyvideo.models.reward_models.rewards import check_rewards, get_reward_fn
from scripts.evaluate import main

PROMPTS = ["a red circle", "two green squares beside " * 20]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random CLIP with a context of 20 tokens, its tokenizer and its image processor."""
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    letters = [chr(code) for code in range(97, 123)]
    words = {word: index for index, word in enumerate([*letters, *(f"{letter}</w>" for letter in letters)])}
    words |= {"<|startoftext|>": len(words), "<|endoftext|>": len(words) + 1}
    tokenizer = CLIPTokenizerFast(vocab=words, merges=[], model_max_length=20)
    layers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**layers, "vocab_size": len(words), "max_position_embeddings": 20, "eos_token_id": words["<|endoftext|>"]}
    vision = {**layers, "image_size": 32, "patch_size": 8}
    network = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=12))
    for parameter in network.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.5)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def videos() -> torch.Tensor:
    return torch.randint(0, 256, (2, 9, 40, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def library_logits(checkpoint: Path, video: torch.Tensor, prompt: str) -> torch.Tensor:
    """Temperature times cosine of every third frame, by the whole network at once."""
    network, tokenizer = CLIPModel.from_pretrained(checkpoint), CLIPTokenizerFast.from_pretrained(checkpoint)
    images = [Image.fromarray(frame.numpy()) for frame in video[[0, 4, 8]]]
    pixels = CLIPImageProcessorPil.from_pretrained(checkpoint)(images, return_tensors="pt").pixel_values
    tokens = tokenizer([prompt], truncation=True, return_tensors="pt")
    return network(**tokens, pixel_values=pixels).logits_per_image[:, 0] / network.logit_scale.exp()


@pytest.mark.parametrize("kind", [ClipScore, PickScore])
def test_a_score_is_the_mean_over_frames_of_the_librarys(kind, checkpoint, videos):
    reward = kind(RewardContext(), str(checkpoint), num_frames=3)
    scores = reward(videos, PROMPTS)[kind.__name__.replace("Clip", "CLIP")]
    cosines = [library_logits(checkpoint, video, prompt) for video, prompt in zip(videos, PROMPTS, strict=True)]
    temperature = CLIPModel.from_pretrained(checkpoint).logit_scale.exp().item()
    expected = [100 * c.clamp_min(0) if kind is ClipScore else temperature * c for c in cosines]
    assert scores.tolist() == pytest.approx([each.mean().item() for each in expected], abs=1e-4)
    assert min(map(float, torch.cat(cosines))) < 0 < max(map(float, torch.cat(cosines))), "scores that tell nothing"


@pytest.mark.parametrize(("kind", "name", "divisor"), [(ClipScore, "clip_score", 30), (PickScore, "pick_score", 26)])
def test_the_published_scale_is_the_logit_over_a_divisor(kind, name, divisor, checkpoint, videos, tmp_path, capsys):
    reward = kind(RewardContext(), str(checkpoint), num_frames=3, scale="published")
    network = CLIPModel.from_pretrained(checkpoint)
    cosines = [library_logits(checkpoint, video, prompt) for video, prompt in zip(videos, PROMPTS, strict=True)]
    logits = [network.logit_scale.exp() * cosine for cosine in cosines]
    (scores,) = reward(videos, PROMPTS).values()
    assert scores.tolist() == pytest.approx([each.mean().item() / divisor for each in logits], abs=1e-5)

    (tmp_path / "prompts.csv").write_text("prompt\na red circle\ntwo squares\n")
    for number, video in enumerate(videos):
        write_video(tmp_path / "videos" / f"{number:04d}.mp4", video, fps=24)
    said = {}
    for scale in ("usual", "published"):
        command = ["--prompts_csv", str(tmp_path / "prompts.csv"), "--videos", "ours", str(tmp_path / "videos")]
        command += ["--rewards", f"{name}={checkpoint}", "--scale", scale, "--output_dir", str(tmp_path / "out")]
        assert main(command) == 0, capsys.readouterr().err
        (metric,) = json.loads((tmp_path / "out" / "evaluation.json").read_text())["means"]["ours"].values()
        said[scale] = metric["mean"]
    assert said["published"] != said["usual"]
    if kind is PickScore:
        assert said["published"] == pytest.approx(said["usual"] / 26)


def test_long_texts_are_cut_whether_or_not_the_tokenizers_files_say_where(checkpoint, videos, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    assert settings.pop("model_max_length") == 20
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    unsaid, said = (ClipScore(RewardContext(), str(folder), num_frames=1) for folder in (copy, checkpoint))
    assert unsaid(videos, PROMPTS)["CLIPScore"].tolist() == said(videos, PROMPTS)["CLIPScore"].tolist()


def test_quality_is_the_share_of_a_good_photo_whatever_the_prompt(checkpoint, videos):
    scores = ClipIqa(RewardContext(), str(checkpoint), num_frames=3)(videos, PROMPTS)["CLIPIQA"]
    temperature = CLIPModel.from_pretrained(checkpoint).logit_scale.exp().item()
    for video, score in zip(videos, scores, strict=True):
        good, bad = (temperature * library_logits(checkpoint, video, f"{word} photo.") for word in ("Good", "Bad"))
        assert float(score) == pytest.approx(float((good - bad).sigmoid().mean()), abs=1e-5)
    assert 0 < float(scores.min()) < float(scores.max()) < 1


def test_a_clips_weights_are_read_from_its_own_safetensors_alone(checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    (copy / "model.safetensors").rename(tmp_path / "shard.safetensors")
    names = load_file(tmp_path / "shard.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../shard.safetensors")}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert CLIPModel.from_pretrained(copy).logit_scale == names["logit_scale"]  # the attack is a real one
    for refuse in (ClipScore, ClipScore.check):
        with pytest.raises(ValueError, match=r"index.json' is not a readable index .* beside it, received '../shard"):
            refuse(RewardContext(), str(copy))
    (copy / "model.safetensors.index.json").unlink()
    torch.save(names, copy / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors file"):
        ClipScore(RewardContext(), str(copy))
    names["text_projection.weight"] = names["text_projection.weight"].to(torch.float8_e5m2)
    save_file(names, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"text_projection.weight is of F8_E5M2, so its weights are quantized"):
        ClipScore(RewardContext(), str(copy))
    names["text_projection.weight"] = names["text_projection.weight"].float()
    save_file({**names, "text_model.embeddings.position_ids": torch.arange(20)}, copy / "model.safetensors")
    ClipScore(RewardContext(), str(copy))  # as published ones have it


def test_wrong_options_are_named_with_and_without_loading_a_network(checkpoint):
    for given, message in (
        ("nowhere", "CLIPScore: there is no folder 'nowhere'"),
        (5, "reward_config: clip_score cannot use its options {'checkpoint': 5}"),
    ):
        entry = {"options": {"checkpoint": given}, "sub_reward": {"CLIPScore": 1.0}}
        config = RewardConfig(reward_config={"models": {"clip_score": entry}})
        for refuse in (get_reward_fn, lambda config: check_rewards(config, "ckpts", 24)):
            with pytest.raises(ValueError, match=message):
                refuse(config)
    with pytest.raises(ValueError, match="CLIPIQA: scale must be one of usual; received 'published'"):
        ClipIqa(RewardContext(), str(checkpoint), scale="published")


def test_a_clip_with_missing_files_or_weights_or_for_other_images_is_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors file"):
        PickScore(RewardContext(), str(tmp_path))
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    sides = {"height": 2**11, "width": 2**11}
    for large in ({"size": {"shortest_edge": 2**18}}, {"size": sides}, {"crop_size": 65}, {"pad_size": sides}):
        CLIPImageProcessorPil(**{"size": {"shortest_edge": 32}, "crop_size": 32} | large).save_pretrained(copy)
        with pytest.raises(ValueError, match="for a CLIP of 32 pixels"):
            PickScore(RewardContext(), str(copy))
    weights = load_file(copy / "model.safetensors")
    weights.pop("visual_projection.weight")
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="lacks weights: visual_projection.weight"):
        ClipScore(RewardContext(), str(copy))
