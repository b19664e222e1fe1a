"""Yes/no checks by tiny random models of the real classes, in this process and behind a real chat server."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hyvideo.config.schema import RewardConfig
from hyvideo.models.reward_models.registry import RewardContext
from hyvideo.models.reward_models.rewards import check_rewards, get_reward_fn
from hyvideo.models.reward_models.vlm_checks import TEMPLATE, VlmChecks, odds_of_yes
from tests.support.reward_server import requests_limited, serving
from tests.support.vision_language import chat_app, write_vision_language_model

FAMILIES = {"qwen2_5_vl": 56, "qwen3_vl": 64}
CHECKS = {"a red circle": [("Is there a circle?", "yes"), ("Is it blue?", "no")]}
CHECKS |= {"a green cross": [("Is it green?", "yes")]}


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_language_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def csv(tmp_path: Path) -> str:
    path = tmp_path / "prompts.csv"
    rows = [(text, [{"question": q, "answer": a} for q, a in checks]) for text, checks in CHECKS.items()]
    cells = [f'"{text}","{json.dumps(checks).replace(chr(34), chr(34) * 2)}"' for text, checks in rows]
    path.write_text("prompt,checks\n" + "\n".join(cells) + "\na door,\n")
    return str(path)


def videos(side: int) -> torch.Tensor:
    """Two noisy videos of different brightness, uint8 `[2, 5, side, side, 3]`."""
    noise = torch.rand(2, 5, side, side, 3, generator=torch.Generator().manual_seed(1))
    return (noise * torch.tensor([80.0, 255.0]).view(2, 1, 1, 1, 1)).to(torch.uint8)


def context(csv: str) -> RewardContext:
    return RewardContext(prompt_csvs=[csv], retries=0, timeout=60)


@torch.no_grad()
def by_the_library(folder: Path, frames: torch.Tensor, text: str) -> float:
    """P(yes) of frames `[N, H, W, 3]` by the library's own image processor, with every image in its place."""
    network = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    tokenizer, processor = AutoTokenizer.from_pretrained(folder), Qwen2VLImageProcessorPil.from_pretrained(folder)
    images = processor(list(frames.numpy()), return_tensors="pt")
    pads = [f"<|vision_start|>{'<|image_pad|>' * int(g.prod() // 4)}<|vision_end|>" for g in images.image_grid_thw]
    asked = f"<|im_start|>user\n{''.join(pads)}{text}<|im_end|>\n<|im_start|>assistant\n"
    tokens = tokenizer(asked, return_tensors="pt")
    kind = (tokens.input_ids == network.config.image_token_id).int()
    odds = network(**tokens, **images, mm_token_type_ids=kind).logits[0, -1].softmax(-1)
    yes, no = (odds[tokenizer.convert_tokens_to_ids(words)].sum() for words in (["Yes", "yes"], ["No"]))
    return float(yes / (yes + no))


def test_a_score_is_the_mean_probability_of_the_expected_answers_as_the_library_computes_it(checkpoint, csv):
    side = FAMILIES[checkpoint.name.rstrip("0123456789")]
    reward = VlmChecks(context(csv), checkpoint=str(checkpoint), num_frames=2)
    clips, prompts = videos(side), ["a red circle", "a green cross"]
    scores = reward(clips, prompts)["CHECKS"].tolist()
    for clip, prompt, score in zip(clips, prompts, scores, strict=True):
        asked = [(TEMPLATE.format(question=question), answer) for question, answer in CHECKS[prompt]]
        odds = [by_the_library(checkpoint, clip[[0, 4]], text) for text, _ in asked]
        right = [p if answer == "yes" else 1 - p for p, (_, answer) in zip(odds, asked, strict=True)]
        assert score == pytest.approx(sum(right) / len(right), abs=1e-5)
    assert 0.01 < min(scores) and max(scores) < 0.99 and abs(scores[0] - scores[1]) > 0.01, "scores that tell nothing"


def test_a_server_gives_the_scores_of_its_model_and_a_prompt_without_checks_is_left_out(checkpoint, csv, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    app, side = chat_app(checkpoint), FAMILIES[checkpoint.name.rstrip("0123456789")]
    clips = torch.cat([videos(side), videos(side)[:1]])
    prompts = ["a red circle", "a green cross", "a door"]
    here = VlmChecks(context(csv), checkpoint=str(checkpoint), num_frames=2)
    with serving(app) as url:
        there = VlmChecks(context(csv), server=f"{url}/v1", model="tiny", num_frames=2)
        received = there(clips, prompts)["CHECKS"]
    expected = here(clips, prompts)["CHECKS"]
    torch.testing.assert_close(received[:2], expected[:2], atol=1e-4, rtol=0)
    assert received[2].isnan() and [there.applies(prompt) for prompt in prompts] == [True, True, False]
    assert {asked["key"] for asked in app.state.asked} == {"Bearer secret"}
    assert f"CHECKS by tiny at {url}/v1, 2 frames of at most 200704 pixels" in there.describe()
    Path(csv).write_text(Path(csv).read_text().replace("yes", "no", 1))  # by another answer, older scores are not these
    assert VlmChecks(context(csv), checkpoint=str(checkpoint), num_frames=2).describe() != here.describe()


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_language_model(tmp_path_factory.mktemp("one"), "qwen2_5_vl")


def test_a_server_that_fails_costs_only_the_scores_of_its_videos(one, csv):
    with serving(chat_app(one)) as url, requests_limited(retries=0):
        options = {"server": f"{url}/v1", "model": "tiny", "num_frames": 1}
        models = {"vlm_checks": {"sub_reward": {"CHECKS": 1.0}, "options": options}}
        reward = get_reward_fn(RewardConfig(reward_config={"models": models}), prompt_csvs=[csv])
    scores = reward(videos(56), ["a red circle", "a green cross"])  # the server has gone
    assert scores.total.isnan().all() and scores.failed().all()


@pytest.mark.parametrize(
    ("served", "model", "message"),
    [
        ({"log_probs": False}, "tiny", "tiny answers without log-probabilities, which are needed"),
        ({}, "other", "refused with status 404: .*no model other"),
    ],
)
def test_a_server_that_cannot_judge_is_refused_before_a_rollout(one, csv, served, model, message):
    with serving(chat_app(one, **served)) as url:
        for build in (VlmChecks, VlmChecks.check):
            with pytest.raises(ValueError, match=message):
                build(context(csv), server=f"{url}/v1", model=model)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["prompt", "a"], "prompts.csv: there is no column `checks`"),
        (["prompt,checks", "a,"], "prompts.csv: no prompt has any checks"),
        (["prompt,checks", "a," + "[" * 10**5], "line 2: checks: expected .* Invalid JSON"),
        (["prompt,checks", 'a,"[{""question"": ""x?""}]"'], r"line 2: checks: .*: 0.answer: Field required"),
        (["prompt,checks", 'a,"[{""question"": ""<|im_end|>"", ""answer"": ""no""}]"'], "special tokens"),
    ],
)
def test_a_csv_without_usable_checks_is_refused_before_a_model_is_read(one, tmp_path, cells, message):
    path = tmp_path / "prompts.csv"
    path.write_text("\n".join(cells))
    with pytest.raises(ValueError, match=message):
        VlmChecks.check(context(str(path)), checkpoint=str(one))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give either the option checkpoint, or both server and model"),
        ({"checkpoint": "CHECKPOINT", "server": "http://127.0.0.1:1/v1"}, "give either the option checkpoint"),
        ({"server": "http://127.0.0.1:1/v1"}, "give either the option checkpoint"),
        ({"chekpoint": "CHECKPOINT"}, "vlm_checks cannot use its options .*unexpected keyword argument 'chekpoint'"),
        ({"server": "http://127.0.0.1:1/v1", "model": "m"}, r"no answer \(ConnectError"),
        ({"checkpoint": "nowhere"}, "there is no folder 'nowhere'"),
        ({"checkpoint": "assets/tiny/transformer"}, "assets/tiny/transformer"),
        ({"checkpoint": "CHECKPOINT", "num_frames": 0}, "expected num_frames >= 1.*num_frames=0"),
        ({"checkpoint": "CHECKPOINT", "template": "Is it good?"}, "a template of one line"),
        ({"checkpoint": "CHECKPOINT", "dtype": "fp8"}, "expected dtype bf16 or fp32"),
        ({"checkpoint": "CHECKPOINT", "csv": []}, "no prompt has any checks"),
    ],
)
def test_wrong_options_are_refused_before_a_model_is_read(one, csv, options, message):
    chosen = {name: str(one) if value == "CHECKPOINT" else value for name, value in options.items()}
    models = {"vlm_checks": {"sub_reward": {"CHECKS": 1.0}, "options": chosen}}
    config = RewardConfig(reward_config={"models": models})
    with pytest.raises(ValueError, match=message):
        check_rewards(config, "ckpts", 24, [csv])


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"vision_config": {"depth": 10**6}}, "depth is 1000000, expected less than 1000"),
        ("preprocessor_config.json", {"patch_size": 2**18}, "cuts patches of other sizes than the model's"),
        ("chat_template.jinja", "a", "Cannot load the model for vlm_checks from '{folder}': .*for every image"),
    ],
)
def test_a_checkpoint_that_would_fill_the_memory_or_cannot_ask_is_refused(one, csv, tmp_path, file, change, message):
    folder = shutil.copytree(one, tmp_path / "other")
    content = change if isinstance(change, str) else json.dumps(json.loads((folder / file).read_text()) | change)
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=message.format(folder=folder)):
        VlmChecks(context(csv), checkpoint=str(folder))


def test_every_way_to_write_an_answer_counts():
    log_probs = {"Yes": -1.0, " yes": -2.0, "No": -1.0, "Maybe": -0.1}
    e = torch.tensor([-1.0, -2.0, -1.0]).exp()
    assert odds_of_yes(log_probs) == pytest.approx(float((e[0] + e[1]) / e.sum()))
    assert odds_of_yes({"Maybe": -0.1}) != odds_of_yes({"Maybe": -0.1})  # NaN
