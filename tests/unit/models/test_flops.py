"""Counted operations equal those that PyTorch counts in the real networks."""

from unittest import mock

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hyvideo.models import attention
from hyvideo.models.attention import install_attention
from hyvideo.models.flops import transformer_flops, video_tokens
from tests.support.tiny_model import build_transformer, transformer_call

LATENTS = (3, 4, 6)
with torch.device("meta"):  # the defaults are those of the published model
    REAL = dict(HunyuanVideo15Transformer3DModel(num_layers=1).config) | {"num_layers": 54}


def forward(transformer, num_text, num_glyph, num_vision):
    tokens = (num_text, num_glyph, num_vision)
    call = transformer_call(LATENTS, [num_text], [num_glyph], image=True, padded_to=tokens)
    call["timestep_r"] = torch.tensor([400.0]) if transformer.config.use_meanflow else None
    return transformer(**call)[0]


def counted(run):
    """The operations PyTorch counts in `run`, attention by plain matrix products."""
    with (
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),  # of the VAE; the transformer chooses its own
        mock.patch.object(attention, "KERNELS", [SDPBackend.MATH]),
    ):
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("tokens", "changes"),
    [
        ((7, 0, 0), {}),
        ((7, 5, 0), {"patch_size": 2}),
        ((9, 0, 11), {"task_type": "i2v", "num_layers": 1, "mlp_ratio": 3.0}),
        ((2, 3, 4), {"use_meanflow": True, "num_refiner_layers": 2}),
    ],
)
def test_a_forward_pass_has_the_operations_that_are_counted_in_it(tokens, changes):
    transformer = install_attention(build_transformer(**changes))
    text, glyph, vision = tokens
    video = video_tokens(transformer.config, LATENTS)
    flops = transformer_flops(transformer.config, num_video=video, num_text=text, num_glyph=glyph, num_vision=vision)
    with torch.no_grad():
        assert flops.total == counted(lambda: forward(transformer, *tokens))


def test_forward_and_backward_pass_are_three_forward_passes_up_to_what_needs_no_gradient():
    """Attention by plain products has a backward pass of twice its forward pass: what the model needs."""
    transformer = install_attention(build_transformer(num_layers=4))
    flops = transformer_flops(transformer.config, num_video=72, num_text=7)
    assert counted(lambda: forward(transformer, 7, 0, 0).sum().backward()) == pytest.approx(flops.model, rel=0.06)


def test_ranks_of_a_video_share_its_tokens_and_heads_but_each_has_the_whole_condition():
    one = transformer_flops(REAL, num_video=34020, num_text=300)
    two = transformer_flops(REAL, num_video=34020, num_text=300, sp_size=2)
    condition = transformer_flops(REAL, num_video=0, num_text=300).linear
    embedding = 2 * 34020 * 65 * 2048
    assert two.linear == pytest.approx((one.linear + condition + embedding) / 2, rel=1e-9)
    refined = 2 * 4 * 300**2 * 2048
    assert two.attention - refined == (one.attention - refined) // 2
