"""Trimmed attention: the numbers of the stock transformer without padding and dense mask, and its operations."""

import copy
import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.models.transformers import transformer_hunyuan_video15
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hyvideo.models import attention
from hyvideo.models.attention import KERNELS, install_attention, kernel_in_use
from hyvideo.models.parallelize import compile_blocks, prepare_policy
from hyvideo.models.transformer import transformer_flops, video_tokens
from tests.support.tiny_model import ADAPTER, GlyphProjection, build_transformer, transformer_call

NUM_VIDEO = 3 * 2 * 4
BATCHES = {
    "one prompt": {"text": [7], "glyph": [0]},
    "one prompt with a glyph text": {"text": [7], "glyph": [5]},
    "prompts of one length": {"text": [9, 9], "glyph": [0, 0]},
    "prompts of three lengths": {"text": [7, 20, 3], "glyph": [0, 0, 0]},
    "glyph texts in some rows": {"text": [7, 20, 3], "glyph": [4, 0, 9]},
    "glyph texts that even the lengths out": {"text": [4, 9], "glyph": [5, 0]},
    "no padding at all": {"text": [1000], "glyph": [256]},
    "a start image": {"text": [7, 20], "glyph": [0, 6], "image": True},
}


inputs = functools.partial(transformer_call, (3, 2, 4), padded_to=(1000, 256, 729))
"""As the stock pipeline pads: 1000 text, 256 glyph and 729 vision tokens."""


def stock_and_trimmed() -> tuple[HunyuanVideo15Transformer3DModel, HunyuanVideo15Transformer3DModel]:
    stock = build_transformer()
    return stock, install_attention(copy.deepcopy(stock))


def assert_gradients_agree(stock: torch.nn.Module, trimmed: torch.nn.Module) -> None:
    """Compare every parameter's gradient, but the refiner's key bias.

    A bias on all keys shifts all logits of a softmax alike: its true gradient is 0, what is computed is rounding.
    """
    others = dict(trimmed.named_parameters())
    for name, parameter in stock.named_parameters():
        if "refiner_blocks" in name and name.endswith("to_k.bias"):
            continue
        other = others[name].grad
        if parameter.grad is None:
            assert other is None, name
            continue
        error, scale = (parameter.grad - other).norm(), parameter.grad.norm()
        assert error <= 1e-5 * scale, f"{name}: {error / scale}"


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_output_and_every_gradient_are_those_of_the_stock_attention(batch):
    stock, trimmed = stock_and_trimmed()
    call = inputs(**batch)
    expected, received = stock(**call)[0], trimmed(**call)[0]
    assert (expected - received).abs().max() <= 1e-6 * expected.abs().max()

    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (expected * weights).sum().backward()
    (received * weights).sum().backward()
    assert_gradients_agree(stock, trimmed)


def test_gradients_agree_when_blocks_are_recomputed_after_two_forward_passes():
    stock, trimmed = stock_and_trimmed()
    prepare_policy(trimmed, gradient_checkpointing=True)
    trimmed.requires_grad_(True)
    calls = [inputs([7, 20, 3], [4, 0, 9]), inputs([11, 2, 30], [0, 0, 3], seed=1)]
    for model in (stock, trimmed):
        outputs = [model(**call)[0] for call in calls]
        (outputs[0].square().sum() - outputs[1].sum()).backward()
    assert_gradients_agree(stock, trimmed)


def test_padding_whatever_lies_in_it_and_a_blank_image_may_be_left_out_and_arguments_may_be_positional():
    _, trimmed = stock_and_trimmed()
    call = inputs([7, 20, 3], [4, 0, 9])
    expected = trimmed(**call)[0]
    assert torch.equal(trimmed(**call | {"image_embeds": None})[0], expected)
    for suffix in ("", "_2"):
        padding = call[f"encoder_attention_mask{suffix}"] == 0
        call[f"encoder_hidden_states{suffix}"][padding] = 1e3
    names = ("hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask")
    others = {name: value for name, value in call.items() if name not in names}
    assert torch.equal(trimmed(*(call[name] for name in names), **others)[0], expected)
    for suffix in ("", "_2"):
        lengths = call.pop(f"encoder_attention_mask{suffix}").sum(1).int().tolist()
        padded = call[f"encoder_hidden_states{suffix}"]
        call[f"encoder_hidden_states{suffix}"] = [row[:n] for row, n in zip(padded, lengths, strict=True)]
    assert torch.equal(trimmed(**call | {"image_embeds": None})[0], expected)


@pytest.mark.parametrize(("lengths", "in_refiner", "in_block"), [([9, 9], [9], [9]), ([9, 4, 9, 9], [4, 9], [9, 4, 9])])
def test_neighbours_of_one_length_attend_together_without_mask_or_padding(monkeypatch, lengths, in_refiner, in_block):
    keys, attend = [], F.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        assert attn_mask is None
        keys.append(key.shape[-2])
        return attend(query, key, value, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    stock_and_trimmed()[1](**inputs(lengths, [0] * len(lengths)))
    assert keys == [*in_refiner, *[NUM_VIDEO + length for length in in_block] * 2]


@pytest.mark.parametrize("name", ["encoder_attention_mask", "encoder_attention_mask_2"])
def test_a_mask_with_a_gap_is_refused(name):
    _, trimmed = stock_and_trimmed()
    call = inputs([7, 20, 3], [4, 6, 9])
    call[name][1, 2] = 0
    with pytest.raises(ValueError, match=f"{name} must be right-padded.*gaps"):
        trimmed(**call)


@pytest.mark.parametrize(
    ("compiler", "lora"), [("eager", None), ("eager", ADAPTER), pytest.param("inductor", None, marks=pytest.mark.slow)]
)
def test_a_compiled_block_is_one_graph_for_any_length_in_rollout_and_replay(compiler, lora, monkeypatch):
    """Two graphs would round otherwise, so that ratios would not be 1; `inductor` fuses as it does on a GPU."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=compiler))
    stock, trimmed = stock_and_trimmed()
    torch._dynamo.reset()
    counters.clear()
    compile_blocks(prepare_policy(trimmed, gradient_checkpointing=False, lora=lora))
    graphs = set()
    for length in (7, 9, 20, 4):
        call = inputs([length, 3], [0, 0])
        with torch.autocast("cpu", torch.bfloat16, enabled=compiler == "inductor"):
            with torch.no_grad():
                sampled = trimmed(**call)[0]
            graphs.add(counters["stats"]["unique_graphs"])
            replayed = trimmed(**call)[0]
            graphs.add(counters["stats"]["unique_graphs"])
        assert replayed.requires_grad and not sampled.requires_grad and torch.equal(replayed, sampled)
        with torch.no_grad():
            assert torch.allclose(sampled.float(), stock(**call)[0], atol=0.1 if compiler == "inductor" else 1e-6)
    assert len(graphs) == 1  # the first rollout compiles all that there is


CUDNN_FIRST = [int(kernel) for kernel in KERNELS]


def test_forward_and_recomputed_attention_prefer_the_same_kernels_whatever_pytorch_prefers(monkeypatch):
    orders, attend = [], F.scaled_dot_product_attention
    assert KERNELS[0] == SDPBackend.CUDNN_ATTENTION

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        orders.append(torch._C._get_sdp_priority_order()[: len(KERNELS)])
        return attend(*args, **kwargs)

    _, trimmed = stock_and_trimmed()
    prepare_policy(trimmed, gradient_checkpointing=True)
    call, own = inputs([7], [0]), [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    expected = trimmed(**call)[0]
    with sdpa_kernel(own, set_priority=True):
        monkeypatch.setattr("hyvideo.models.attention.F.scaled_dot_product_attention", spy)
        out = trimmed(**call)[0]
        forward = len(orders)
        out.sum().backward()
        assert torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True) == own
    blocks = [order for order in orders if order == CUDNN_FIRST]
    assert len(blocks) == 2 * len(trimmed.transformer_blocks) and len(orders) > forward
    assert torch.allclose(out, expected, atol=1e-6)


def test_a_compiled_block_holds_the_preference_too(monkeypatch):
    pinned = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        called = [node.target for node in graph.graph.nodes]
        attend = called.index(torch._C._nn.scaled_dot_product_attention)
        pinned.append(torch.nn.attention._sdpa_kernel in called[:attend])
        return graph

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=compiler, fullgraph=True))
    _, trimmed = stock_and_trimmed()
    expected = trimmed(**inputs([7], [0]))[0]
    before = torch._C._get_sdp_priority_order()
    torch._dynamo.reset()
    compile_blocks(prepare_policy(trimmed, gradient_checkpointing=False))
    assert torch.allclose(trimmed(**inputs([7], [0]))[0], expected, atol=1e-6)
    assert pinned and all(pinned) and torch._C._get_sdp_priority_order() == before


def test_a_run_says_which_kernel_attends(monkeypatch):
    arguments = ((1, 40, 2, 16), torch.float32, torch.device("cpu"))
    assert kernel_in_use(*arguments).startswith("attention kernel: flash; cuDNN's cannot run here")
    seen = []

    def chosen(query: Tensor, key: Tensor, value: Tensor) -> int:
        seen.append((query.shape, query.requires_grad, torch._C._get_sdp_priority_order()[: len(KERNELS)]))
        return answer

    monkeypatch.setattr(torch, "_fused_sdp_choice", chosen)
    said = {}
    for answer in CUDNN_FIRST:
        said[SDPBackend(answer)] = kernel_in_use(*arguments)
    assert seen == [((1, 2, 40, 16), True, CUDNN_FIRST)] * len(KERNELS)
    assert said[SDPBackend.CUDNN_ATTENTION] == "attention kernel: cudnn"
    slower = "; cuDNN's cannot run here, which on an H200 is 1.7 times as fast as flash"
    assert said[SDPBackend.FLASH_ATTENTION] == f"attention kernel: flash{slower}"
    assert said[SDPBackend.MATH] == f"attention kernel: math{slower}"


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
def test_a_forward_pass_has_the_operations_that_are_counted_in_it(tokens, changes, monkeypatch):
    monkeypatch.setattr(transformer_hunyuan_video15, GlyphProjection.__base__.__name__, GlyphProjection.__base__)
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
