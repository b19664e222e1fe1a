"""Prompts, steps, rollouts and evaluation videos are the stock pipeline's; guidance by hand; whose noise it is."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from accelerate.hooks import CpuOffload
from diffusers import ClassifierFreeGuidance
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import format_text_input
from torch import Tensor, nn

from hyvideo.data.prompts import Prompt
from hyvideo.pipelines import hunyuan_video_grpo_pipeline as pipelines
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Conditioning, Guidance, HunyuanVideoGRPOPipeline, SampleNoise
from hyvideo.pipelines.sampling import sample_prompts, truncated_prompts_warning
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
from tests.support.pipelines import NUM_STEPS, PROMPTS, VIDEO, load_stock_pipeline, noise_of

ODD_PROMPTS = (
    *PROMPTS,
    "",  # encoded as a blank
    "“Straße” in curly quotes, naïve café 東京",
    "word " * 1200,  # more than the 1000 tokens that are kept
    f'a wall that says "{"long " * 100}"',  # more than the 256 bytes that are kept
)


def test_a_prompt_is_encoded_the_same_alone_and_among_others_and_a_negative_one_without_glyphs(pipeline):
    prompts = [*PROMPTS, 'no "watermark"']
    together = pipeline.encode(prompts)
    for row, prompt in enumerate(prompts):
        alone = pipeline.encode([prompt])
        assert torch.equal(together.text[row], alone.text[0]) and torch.equal(together.glyph[row], alone.glyph[0])
    negative = pipeline.encode(prompts[-1:], glyphs=False)
    assert len(negative.glyph[0]) == 0 and torch.equal(negative.text[0], together.text[-1])


def test_the_states_are_those_of_the_stock_pipeline_on_valid_tokens_from_the_users_text_on(pipeline, tiny_root):
    messages, tokenizer = format_text_input(list(PROMPTS[:1]), pipeline.system_message)[0], pipeline.tokenizer
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    crop = len(ids) - len(pipeline.encode(PROMPTS[:1]).text[0])
    assert tokenizer.decode(ids[:crop]).endswith("<|im_start|>user\n")
    assert tokenizer.decode(ids[crop:]) == f"{PROMPTS[0]}<|im_end|>\n<|im_start|>assistant\n"
    stock = load_stock_pipeline(tiny_root, crop)
    text, text_mask, glyph, glyph_mask = stock.encode_prompt(list(ODD_PROMPTS), batch_size=len(ODD_PROMPTS))
    ours = pipeline.encode(ODD_PROMPTS)
    assert [len(row) for row in ours.glyph[:4:2]] == [0, 0], "a prompt without quotes has no glyph rows"
    for row in range(len(ODD_PROMPTS)):
        torch.testing.assert_close(ours.text[row], text[row][text_mask[row].bool()], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.glyph[row], glyph[row][glyph_mask[row].bool()], rtol=1e-5, atol=1e-5)


TEXT = tuple(torch.full((length, 3), float(length)) for length in (4, 2, 5))
GLYPH = tuple(torch.full((length, 2), -1.0 - length) for length in (0, 3, 1))


def test_rows_are_picked_in_any_order_with_their_image_and_a_negative_row_follows_for_every_row():
    positive, negative = Conditioning(TEXT[:2], GLYPH[:2]), Conditioning(TEXT[2:], GLYPH[2:])
    cases = [(Conditioning(TEXT, GLYPH).rows([1, 0, 1]), [1, 0, 1]), (positive.with_negative(negative), [0, 1, 2, 2])]
    for received, rows in [*cases, (negative.with_negative(positive.rows([1])), [2, 1])]:
        assert len(received) == len(rows)
        assert all(torch.equal(text, TEXT[row]) for text, row in zip(received.text, rows, strict=True))
        assert all(torch.equal(glyph, GLYPH[row]) for glyph, row in zip(received.glyph, rows, strict=True))
    images = pipelines.FirstFrames(torch.arange(3.0)[:, None, None], -torch.arange(3.0)[:, None, None, None])
    conditioning = Conditioning(TEXT, GLYPH, images).rows([2, 0])
    guided = conditioning.with_negative(Conditioning(TEXT[:1], GLYPH[:1]))
    for received, expected in ((conditioning, [2, 0]), (guided, [2, 0, 2, 0])):
        assert received.images.states.flatten().tolist() == expected
        assert (-received.images.latents).flatten().tolist() == expected


@pytest.fixture
def told(pipeline: HunyuanVideoGRPOPipeline) -> Callable[..., str | None]:
    return lambda *texts: truncated_prompts_warning(pipeline, [Prompt(text, 0, None, None) for text in texts])


def words_of(pipeline: HunyuanVideoGRPOPipeline, num_tokens: int) -> str:
    """A text of exactly so many tokens."""
    ids = pipeline.tokenizer("a" + " red" * num_tokens, add_special_tokens=False).input_ids
    return pipeline.tokenizer.decode(ids[:num_tokens])


def test_the_limit_is_the_encoders_own_and_said_when_training_begins(pipeline, told, make_training, tmp_path, capsys):
    whole, cut = words_of(pipeline, 1000), words_of(pipeline, 1001)
    many = told(*(f"{number} " + "red " * 1200 for number in range(20)), "0 " + "red " * 1200)
    assert many.startswith("20 prompt(s)") and many.endswith("; ...") and many.count(" tokens of ") == 5
    assert told(whole) is None
    assert "1 prompt(s)" in told(whole, cut) and "1,001 tokens of 1,000 in 'a red red" in told(whole, cut)
    text = words_of(pipeline, 1100)
    full, longer = (pipeline.encode([text + end]).text[0] for end in ("", "!"))
    assert full.equal(longer)  # its end is not seen
    csv = tmp_path / "long.csv"
    csv.write_text("prompt\na red circle\nblue " + "square " * 1200 + "\n")
    make_training(train_video_csv=csv)
    assert "WARNING: 1 prompt(s) are longer than the model reads" in capsys.readouterr().err


def test_quoted_texts_have_a_limit_of_their_own(pipeline, told):
    around = len('Text "". ')
    whole, cut = (f'a wall that says "{"x" * (length - around)}"' for length in (255, 256))
    assert told(whole) is None and "256 quoted bytes of 255 in 'a wall" in told(cut)
    both = told(cut + " red" * 1000)  # is one prompt
    assert both.startswith("1 prompt(s)") and " tokens of 1,000 and 256 quoted bytes of 255 in 'a wall" in both
    assert pipeline.tokenizer_2(f'Text "{"x" * (255 - around)}". ').input_ids[-1] == pipeline.tokenizer_2.eos_token_id
    assert len(pipeline.encode([whole]).glyph[0]) == 256


STEPS = torch.tensor([3, 0, 2])


@pytest.fixture
def latents() -> Tensor:
    return torch.randn(3, 4, 2, 2, 2, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def conditioning(pipeline: HunyuanVideoGRPOPipeline) -> Conditioning:
    return pipeline.encode(PROMPTS)


@pytest.fixture
def guidance(pipeline: HunyuanVideoGRPOPipeline) -> Guidance:
    return Guidance(6.0, pipeline.encode([""], glyphs=False))


def largest_relative_error(received: Tensor, expected: Tensor) -> float:
    return float((received - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("index", [1, STEPS], ids=["one step for all", "a step per sample"])
@torch.no_grad()
def test_guidance_is_the_formula_in_one_call_unless_1(pipeline, latents, conditioning, guidance, index):
    expected, rows = [], []
    pipeline.transformer.register_forward_hook(lambda module, args, output: rows.append(len(output[0])))
    for row, step in enumerate(torch.as_tensor(index).expand(3).tolist()):
        alone = latents[row : row + 1]
        prompted = pipeline.velocity(alone, step, conditioning.rows([row]), Guidance())
        negative = pipeline.velocity(alone, step, guidance.negative, Guidance())
        expected.append(negative + 6.0 * (prompted - negative))
    received = pipeline.velocity(latents, index, conditioning, guidance)
    assert largest_relative_error(received, torch.cat(expected)) <= 1e-5 and rows[6:] == [6]
    pipeline.velocity(latents, 0, conditioning, Guidance(1.0, guidance.negative))
    assert rows[6:] == [6, 3]


@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_ode_latents_are_those_of_the_stock_pipeline_and_only_the_last_may_be_kept(pipeline, tiny_root, scale):
    conditioning = pipeline.encode(PROMPTS)
    guidance = Guidance(scale, pipeline.encode([""], glyphs=False))
    ours = pipeline.rollout(conditioning, noise_of(3), guidance, **VIDEO, sde_type="ode", eta=0.0)
    last = pipeline.rollout(conditioning, noise_of(3), guidance, **VIDEO, sde_type="ode", eta=0.0, only_last=True)
    assert torch.equal(last.latents, ours.latents[:, -1:]) and torch.equal(last.videos, ours.videos)
    assert last.means is None and last.log_probs is None
    stock = load_stock_pipeline(tiny_root, pipeline.system_turn_length())
    stock.guider = ClassifierFreeGuidance(guidance_scale=scale)
    asked = {"prompt": list(PROMPTS), "num_frames": 5, "height": 32, "width": 32, "num_inference_steps": NUM_STEPS}
    expected = stock(**asked, latents=ours.latents[:, 0], output_type="latent").frames
    assert largest_relative_error(ours.latents[:, -1], expected) <= 1e-5


@pytest.mark.parametrize("shift", [0.0, 0.25])
@torch.no_grad()
def test_videos_are_the_stock_vaes_to_one_grey_level(pipeline, tiny_root, latents, shift):
    stock = load_stock_pipeline(tiny_root, crop=0)
    pipeline.vae.register_to_config(shift_factor=shift)
    decoded = [stock.vae.decode(row / stock.vae.config.scaling_factor + shift).sample for row in latents.split(1)]
    expected = stock.video_processor.postprocess_video(torch.cat(decoded), output_type="pt") * 255
    videos = pipeline.decode(latents)
    assert videos.dtype == torch.uint8 and videos.shape == (3, 5, 32, 32, 3)
    assert (videos - expected.permute(0, 1, 3, 4, 2)).abs().max() <= 0.51


@pytest.mark.parametrize("sde_type", ["sage_grpo", "dance_grpo", "flow_grpo", "cps"])
def test_a_rollout_records_exactly_what_it_did(pipeline, conditioning, guidance, sde_type):
    noise, shape = noise_of(3), (4, 2, 2, 2)
    rollout = pipeline.rollout(conditioning, noise, guidance, **VIDEO, sde_type=sde_type, eta=0.5)
    assert rollout.latents.shape == (3, NUM_STEPS + 1, *shape)
    assert torch.equal(rollout.latents[:, 0], noise.initial(shape))
    assert torch.equal(rollout.videos, pipeline.decode(rollout.latents[:, -1]))
    for index in range(NUM_STEPS):
        here, following = rollout.latents[:, index], rollout.latents[:, index + 1]
        mean, std = pipeline.denoise_step(here, index, conditioning, guidance, sde_type=sde_type, eta=0.5)
        assert torch.equal(mean, rollout.means[:, index])
        assert torch.equal(following, mean + std * noise.step(index, shape))
        log_prob = pipeline.scheduler.log_prob(following, mean, std, sde_type=sde_type)
        assert torch.equal(log_prob, rollout.log_probs[:, index])
    assert not rollout.latents.requires_grad


def test_latents_are_16_times_smaller_in_space_and_4_times_in_time_or_there_are_none(pipeline):
    for num_frames, size, shape in ((1, (16, 16), (4, 1, 1, 1)), (121, (480, 848), (4, 31, 30, 53))):
        assert pipeline.latent_shape(num_frames, size) == shape
    for num_frames, size in ((6, (32, 32)), (0, (32, 32)), (5, (30, 32)), (5, (32, 0))):
        with pytest.raises(ValueError, match=rf"multiples of 16 pixels; received {num_frames} frames of {size[0]}x"):
            pipeline.latent_shape(num_frames, size)


@torch.no_grad()
def test_half_precision_keeps_the_velocity_in_float32_and_another_schedule_shares_it(pipeline, latents, conditioning):
    exact, scheduler = pipeline.velocity(latents, 1, conditioning, Guidance()), FlowMatchDiscreteScheduler(shift=7.0)
    pipeline.autocast_dtype = torch.bfloat16
    other = pipeline.with_scheduler(scheduler)
    assert other.scheduler is scheduler is not pipeline.scheduler
    assert other.transformer is pipeline.transformer and other.autocast_dtype == torch.bfloat16
    rounded = pipeline.velocity(latents, 1, conditioning, Guidance())
    assert rounded.dtype == torch.float32 and 0 < largest_relative_error(rounded, exact) < 0.1


def prompts(*seeds: int | None) -> list[Prompt]:
    return [Prompt(PROMPTS[i % 3], i, seed, None) for i, seed in enumerate(seeds)]


def videos_of(pipeline: HunyuanVideoGRPOPipeline, chosen: Sequence[Prompt], **how: object) -> Tensor:
    return sample_prompts(pipeline, chosen, Guidance(), **VIDEO, **{"seed": 1, "batch_size": 8} | how)


def differ(first: Tensor, second: Tensor) -> bool:
    return bool((first.int() - second.int()).abs().max() > 1)


def test_batch_size_and_order_change_at_most_rounding(pipeline):
    chosen = prompts(None, None, 5)
    expected = videos_of(pipeline, chosen)
    for batch_size in (1, 2, 3):
        steps = []
        assert not differ(videos_of(pipeline, chosen, batch_size=batch_size, on_step=steps.append), expected)
        assert steps == [*range(NUM_STEPS)] * math.ceil(3 / batch_size)
    assert not differ(videos_of(pipeline, [chosen[2], chosen[0]]), expected[[2, 0]])


def test_a_prompts_own_seed_counts_wherever_it_stands_and_others_do_not_share_noise(pipeline):
    chosen = prompts(None, 5)
    first, second = videos_of(pipeline, chosen, seed=1), videos_of(pipeline, chosen, seed=2)
    assert differ(first[0], second[0]) and torch.equal(first[1], second[1])
    seeded, unseeded = ([Prompt(PROMPTS[0], i, seed, None) for i in (0, 9)] for seed in (5, None))
    assert torch.equal(videos_of(pipeline, seeded[:1]), videos_of(pipeline, seeded[1:]))
    assert differ(*videos_of(pipeline, unseeded))


def test_offloaded_encoders_leave_the_gpu_before_the_transformer_comes(pipeline, monkeypatch):
    """On a CPU with a record of who would be on the GPU. A prompt without quotes leaves the second encoder out."""
    names = {module: name for name, module in pipeline.components.items() if isinstance(module, nn.Module)}
    there, seen = set(), {}

    class Recorded(CpuOffload):
        def init_hook(self, module: nn.Module) -> nn.Module:
            there.discard(names[module])
            return module

        def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple:
            if self.prev_module_hook is not None:
                self.prev_module_hook.offload()
            there.add(names[module])
            seen[names[module]] = set(there)
            return args, kwargs

    monkeypatch.setattr("accelerate.big_modeling.CpuOffload", Recorded)
    pipeline.enable_model_cpu_offload(device="cpu")
    videos_of(pipeline, [Prompt("a red circle moves left", index=0, seed=None, ref_image_path=None)])
    assert seen == {name: {name} for name in ("text_encoder", "transformer", "vae")}


SHAPE = (4, 2, 2, 2)
NOISE = SampleNoise(seeds=[7, 7, 7, 8], stream="rollout", round=2, prompts=[5, 5, 6, 5], generations=[0, 1, 0, 0])


@pytest.mark.parametrize("rows", [[0], [3, 1], [2, 2, 0]])
def test_a_sample_has_its_noise_in_any_batch_and_order(rows):
    names = ("seeds", "prompts", "generations")
    part = replace(NOISE, **{name: [getattr(NOISE, name)[row] for row in rows] for name in names})
    assert torch.equal(part.step(1, SHAPE), NOISE.step(1, SHAPE)[rows])
    assert torch.equal(part.initial(SHAPE), NOISE.initial(SHAPE)[rows])


def test_everything_a_sample_is_changes_its_noise():
    others = [NOISE, replace(NOISE, round=3), replace(NOISE, stream="validation")]
    draws = [*NOISE.initial(SHAPE), *NOISE.step(1, SHAPE), *(row for noise in others for row in noise.step(0, SHAPE))]
    assert not any(torch.equal(*two) for two in combinations(draws, 2))
    assert all(draw.dtype == torch.float32 and draw.device.type == "cpu" for draw in draws)
    assert NOISE.step(0, (16, 8, 16, 16)).std().item() == pytest.approx(1, abs=0.01)
