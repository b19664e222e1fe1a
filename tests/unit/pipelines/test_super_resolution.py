"""Super-resolution, against plain formulas: both upsamplers, the sizes, and every step of the second transformer."""

from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor
from torch.nn import functional

from hyvideo.models.attention import install_attention
from hyvideo.models.loading import load_transformer
from hyvideo.models.upsampler import enlarge, load_upsampler
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import FirstFrames, SampleNoise
from hyvideo.pipelines.super_resolution import STAGES, SuperResolutionPipeline
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
from tests.support.original_layout import save_super_resolution, save_upsampler
from tests.support.pipelines import PROMPTS, load_tiny_pipeline

SIZES = {
    "480p": "480x848>720x1280 848x480>1280x720 640x640>960x960 544x720>832x1104 416x976>624x1472 528x768>800x1152",
    "720p": "720x1280>1072x1904 960x960>1440x1440 832x1104>1248x1648 624x1456>944x2192 848x1072>1280x1616",
}
"""Height x width before and after, as the authors' code pairs them."""


@pytest.mark.parametrize("resolution", SIZES)
def test_sizes_are_those_of_the_authors_and_another_one_is_told_the_nearest(resolution):
    for pair in SIZES[resolution].split():
        before, after = (tuple(map(int, size.split("x"))) for size in pair.split(">"))
        assert STAGES[resolution].enlarged(before) == after
    with pytest.raises(ValueError, match=r"received 64x112, the nearest is --fixed_size \d+x\d+"):
        STAGES[resolution].enlarged((64, 112))


def conv(x: Tensor, tensors: dict[str, Tensor], name: str) -> Tensor:
    """A convolution that repeats the border in space, and the first frame before it in time."""
    x = functional.pad(x, (1, 1, 1, 1, 2, 0), mode="replicate")
    return functional.conv3d(x, tensors[f"{name}.conv.weight"], tensors[f"{name}.conv.bias"])


def plain_720p(x: Tensor, tensors: dict[str, Tensor], num_blocks: int) -> Tensor:
    y = conv(x, tensors, "in_conv")
    for block in range(num_blocks):
        inner = y
        for layer in (0, 2, 4):
            inner = conv(functional.silu(inner) if layer else inner, tensors, f"blocks.{block}.block.{layer}")
        y = y + inner
    return conv(y, tensors, "out_conv")


def plain_1080p(x: Tensor, tensors: dict[str, Tensor], widths: list[int], num_blocks: int) -> Tensor:
    def norm(h: Tensor, name: str) -> Tensor:
        return h / h.norm(dim=1, keepdim=True) * h.shape[1] ** 0.5 * tensors[f"{name}.gamma"]

    repeated = torch.stack([x[:, i // (widths[0] // x.shape[1])] for i in range(widths[0])], dim=1)
    h = conv(x, tensors, "conv_in") + repeated
    for level in range(len(widths)):
        for block in range(num_blocks + 1):
            where, inner = f"up.{level}.block.{block}", h
            for number in (1, 2):
                inner = functional.silu(norm(inner, f"{where}.norm{number}"))
                inner = conv(inner, tensors, f"{where}.conv{number}")
            if (weight := tensors.get(f"{where}.nin_shortcut.weight")) is not None:
                h = functional.conv3d(h, weight, tensors[f"{where}.nin_shortcut.bias"])
            h = h + inner
    return conv(functional.silu(norm(h, "norm_out")), tensors, "conv_out")


@pytest.mark.parametrize("shape", [(2, 4, 3, 5, 7), (1, 4, 1, 1, 4)])
@torch.no_grad()
def test_the_upsamplers_are_their_formulas(tmp_path: Path, shape: tuple[int, ...]):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    tensors = save_upsampler(tmp_path / "a", "SRTo720pUpsampler", hidden_channels=6, num_blocks=2)
    close = {"atol": 1e-5, "rtol": 1e-5}
    expected = plain_720p(x, tensors, 2)
    torch.testing.assert_close(load_upsampler(tmp_path / "a")(x), expected, **close)
    save_upsampler(tmp_path / "b", "SRTo720pUpsampler", hidden_channels=6, num_blocks=2, global_residual=True)
    torch.testing.assert_close(load_upsampler(tmp_path / "b")(x), expected + x, **close)
    sizes = {"block_out_channels": [8, 4], "num_res_blocks": 1}
    tensors = save_upsampler(tmp_path / "c", "SRTo1080pUpsampler", **sizes)
    upsampler, expected = load_upsampler(tmp_path / "c"), plain_1080p(x, tensors, [8, 4], 1)
    torch.testing.assert_close(upsampler(x), expected, **close)
    frames = [functional.interpolate(frame, (6, 9), mode="bilinear") for frame in x.unbind(2)]
    torch.testing.assert_close(enlarge(x, (6, 9)), torch.stack(frames, 2), **close)


def test_a_folder_of_another_network_or_of_other_weights_is_refused(tmp_path: Path):
    save_upsampler(tmp_path / "a", "SRTo720pUpsampler", hidden_channels=6, num_blocks=2)
    config = tmp_path / "a" / "config.json"
    text = config.read_text()
    for old, new, said in (
        ("SRTo720p", "SRTo9p", "_class_name must be one of SRTo720pUpsampler, SRTo1080pUpsampler; received 'SRTo9p"),
        ('"num_blocks": 2', '"num_blocks": 3', "blocks.2.block.0.conv"),
        ('"num_blocks"', '"number"', "unexpected keyword argument"),
    ):
        config.write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=said):
            load_upsampler(tmp_path / "a")


@pytest.mark.parametrize("task", ["t2v", "i2v"])
@torch.no_grad()
def test_every_step_is_that_of_the_stock_network_with_enlarged_latents_until_timestep_700(tiny_root, tmp_path, task):
    root = save_super_resolution(tmp_path / "ckpts")
    transformer = load_transformer(root, "720p_sr_distilled")
    stock = HunyuanVideo15Transformer3DModel.from_config(transformer.config).eval()
    stock.load_state_dict(transformer.state_dict())
    install_attention(transformer, None, None)
    base = load_tiny_pipeline(tiny_root)
    scheduler = FlowMatchDiscreteScheduler(shift=2.0)
    scheduler.set_timesteps(6)
    pipeline = SuperResolutionPipeline(**{**base.components, "transformer": transformer, "scheduler": scheduler})
    pipeline.upsampler = load_upsampler(root / "upsampler" / "720p_sr_distilled")
    conditioning = base.encode(PROMPTS[:2])
    noise = SampleNoise([5, 6], "super_resolution", 0, [0, 1], [0, 0])
    generator = torch.Generator().manual_seed(0)
    low, shape = torch.randn(2, 4, 2, 2, 2, generator=generator), (4, 2, 3, 4)
    seen, first = torch.zeros(2, 4, 20), torch.zeros(2, 5, 2, 3, 4)
    if task == "i2v":
        seen, image = (torch.randn(2, *size, generator=generator) for size in ((4, 20), (4, 3, 4)))
        first[:, :4, 0], first[:, 4, 0] = image, 1
        conditioning = type(conditioning)(conditioning.text, conditioning.glyph, FirstFrames(seen, image))
    sharp = pipeline.sharpen(low, (48, 64), conditioning, noise)

    frames = [functional.interpolate(frame, (3, 4), mode="bilinear") for frame in low.unbind(2)]
    covered = 0.3 * pipeline.upsampler(torch.stack(frames, 2)) + 0.7 * noise.step(0, shape)
    x, sigmas = noise.initial(shape), [2 * s / (1 + s) for s in (1 - i / 6 for i in range(7))]
    both = (conditioning.text, conditioning.glyph)
    texts = [torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True) for rows in both]
    masks = [
        torch.stack([torch.arange(padded.shape[1]) < len(row) for row in rows])
        for padded, rows in zip(texts, both, strict=True)
    ]
    for index in range(6):
        given = torch.cat([covered, torch.ones(2, 1, 2, 3, 4)], 1) * (1000 * sigmas[index] >= 700)
        velocity = stock(
            torch.cat([x, first, given], 1),
            torch.full((2,), 1000 * sigmas[index]),
            timestep_r=torch.full((2,), 1000 * sigmas[index + 1]),
            encoder_hidden_states=texts[0],
            encoder_attention_mask=masks[0],
            encoder_hidden_states_2=texts[1],
            encoder_attention_mask_2=masks[1],
            image_embeds=seen,
            return_dict=False,
        )[0]
        x = x + (sigmas[index + 1] - sigmas[index]) * velocity
    assert (sharp - x).abs().max() <= 1e-4 * x.std()
