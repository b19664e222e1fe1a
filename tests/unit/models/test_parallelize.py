"""From loaded networks to a policy: what is trained, where it lies, and adapters that start as the base model."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from hyvideo.models.adapter import save_lora, without_diffusers_logs
from hyvideo.models.loading import allow_batches
from hyvideo.models.parallelize import ATTENTION_OPS, PRODUCTS, compile_blocks, prepare_policy, trainable_parameters
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Guidance, HunyuanVideoGRPOPipeline
from tests.support.pipelines import PROMPTS
from tests.support.tiny_model import ADAPTER, build_transformer, randomize

LATENTS = torch.randn(3, 4, 2, 2, 2, generator=torch.Generator().manual_seed(0))
FEED_FORWARD = (128, 32)  # input by output of the second product of a block's feed-forward networks
NUM_LENGTHS = 3  # numbers of condition tokens that the prompts have: rows of unlike lengths attend one by one


@pytest.fixture
def velocity(pipeline: HunyuanVideoGRPOPipeline) -> Callable[[], Tensor]:
    """The policy's answer to fixed latents and prompts, with and without quoted text."""
    conditioning = pipeline.encode(PROMPTS)
    return lambda: pipeline.velocity(LATENTS, 1, conditioning, Guidance())


@pytest.fixture
def policy(pipeline: HunyuanVideoGRPOPipeline) -> HunyuanVideo15Transformer3DModel:
    return pipeline.transformer


def test_full_training_trains_exactly_what_a_text_to_video_loss_reaches_without_dropout(pipeline, policy, velocity):
    velocity().square().mean().backward()  # every parameter requires a gradient so far
    reached = {name for name, p in policy.named_parameters() if p.grad is not None and p.grad.norm() > 1e-7}
    prepare_policy(policy.train(), gradient_checkpointing=False)
    assert set(trainable_parameters(policy)) == reached
    assert not any(module.training for module in policy.modules())
    policy.zero_grad()
    pipeline.velocity(LATENTS[:1], 1, pipeline.encode(["plain"]), Guidance()).square().mean().backward()
    of_images = prepare_policy(build_transformer(task_type="i2v"), gradient_checkpointing=False)
    assert of_images.image_embedder.linear_1.weight.requires_grad
    assert [name for name in reached if policy.get_parameter(name).grad is None] == []  # without quoted text


def gradients(policy: HunyuanVideo15Transformer3DModel, velocity: Callable) -> list[Tensor]:
    policy.zero_grad()
    velocity().square().mean().backward()
    return [parameter.grad.clone() for parameter in trainable_parameters(policy).values()]


@pytest.mark.parametrize(
    ("recompute", "attention_calls", "narrowing_calls"),
    [
        pytest.param("full", 2, 2, id="all"),
        pytest.param("selective", 1, 2, id="but attention"),
        pytest.param("cheap", 1, 1, id="but attention and second feed-forward layers"),
        pytest.param("elementwise", 1, 1, id="but matrix products"),
    ],
)
def test_recomputing_blocks_changes_no_gradient(policy, velocity, recompute, attention_calls, narrowing_calls):
    prepare_policy(policy, gradient_checkpointing=False)
    with OperationCounter() as needed:
        expected = gradients(policy, velocity)
    prepare_policy(policy, gradient_checkpointing=True, recompute=recompute)
    with OperationCounter() as calls:
        torch.testing.assert_close(gradients(policy, velocity), expected, rtol=0, atol=0)
    num_blocks = len(policy.transformer_blocks)
    of_blocks = attention_calls * num_blocks * NUM_LENGTHS
    assert sum(calls.counts[name] for name in ATTENTION_OPS) == of_blocks + NUM_LENGTHS  # the refiner's block
    assert calls.narrowing == narrowing_calls * 2 * num_blocks + NUM_LENGTHS
    assert (calls.products == needed.products) == (recompute == "elementwise")


@pytest.mark.parametrize("recompute", ["full", "selective", "cheap", "elementwise"])
def test_compiled_blocks_are_whole_graphs_that_keep_what_is_to_be_kept(policy, velocity, recompute, monkeypatch):
    backward = Counter()

    def compiler(graph: GraphModule, inputs: Any, counts: Counter) -> Callable:
        counts.update(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=functools.partial(compiler, counts=Counter()),
        bw_compiler=functools.partial(compiler, counts=backward),
        partition_fn=min_cut_rematerialization_partition,  # as the default compiler has it
    )
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend, fullgraph=True))
    torch._dynamo.reset()  # what a mode of another test has run is not compiled any more
    expected = gradients(prepare_policy(policy, gradient_checkpointing=False), velocity)
    compile_blocks(prepare_policy(policy, gradient_checkpointing=True, recompute=recompute))
    torch.testing.assert_close(gradients(policy, velocity), expected, rtol=0, atol=1e-6)
    assert not any(backward[name] for name in ATTENTION_OPS)
    assert (backward[torch.ops.aten.addmm.default] > 0) == (recompute != "elementwise")
    assert backward[torch.ops.aten.mm.default] > 0


class OperationCounter(TorchDispatchMode):
    """Counts the operations that are computed, and the second products of the blocks' feed-forward networks."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.narrowing, self.products = Counter(), 0, 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[operation] += 1
        if operation in PRODUCTS:
            self.products += 1
        if operation is torch.ops.aten.addmm.default:
            self.narrowing += tuple(args[2].shape) == FEED_FORWARD
        return operation(*args, **(kwargs or {}))


def test_an_adapter_starts_exactly_as_the_base_model_and_comes_back_as_it_was_saved(policy, velocity, tmp_path):
    base = velocity()
    prepare_policy(policy, gradient_checkpointing=False, lora=ADAPTER)
    assert torch.equal(velocity(), base)
    randomize(policy)
    expected = velocity()
    assert not torch.allclose(expected, base)
    expected.square().mean().backward()  # at its start the first matrix has gradient 0
    trained = trainable_parameters(policy)
    assert all("lora_" in name and parameter.grad.any() for name, parameter in trained.items())

    save_lora(policy, tmp_path)
    policy.delete_adapters("default")
    prepare_policy(policy, gradient_checkpointing=False, lora=ADAPTER, pretrained_lora_path=str(tmp_path))
    assert torch.equal(velocity(), expected) and trainable_parameters(policy).keys() == trained.keys()


@pytest.mark.parametrize("loaded", [False, True], ids=["fresh", "loaded"])
def test_an_adapter_is_float32_in_a_bfloat16_network_and_moves_by_small_updates(loaded, tmp_path):
    policy = prepare_policy(build_transformer(), gradient_checkpointing=False, lora=ADAPTER)
    save_lora(policy, tmp_path)
    with without_diffusers_logs():
        policy = build_transformer().to(torch.bfloat16)
    start = str(tmp_path) if loaded else None
    prepare_policy(policy, gradient_checkpointing=False, lora=ADAPTER, pretrained_lora_path=start)
    dtypes = {("lora_" in name, p.dtype) for name, p in policy.named_parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    weight = trainable_parameters(policy)["transformer_blocks.0.attn.to_q.lora_A.default.weight"]
    before = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1e-5)
    assert (weight != before).all()


@torch.no_grad()
def test_a_batch_equals_its_videos_one_by_one_in_the_stock_vae():
    torch.manual_seed(0)
    config = {"block_out_channels": (8, 16, 16, 16), "layers_per_block": 0, "latent_channels": 4}
    ratios = {"spatial_compression_ratio": 8, "temporal_compression_ratio": 4}
    vae = AutoencoderKLHunyuanVideo15(**config, **ratios).eval()
    latents, videos = torch.randn(3, 4, 2, 4, 4), torch.randn(3, 3, 5, 16, 16)
    alone = torch.cat([vae.decode(one).sample for one in latents.split(1)])
    modes = torch.cat([vae.encode(one).latent_dist.mode() for one in videos.split(1)])
    batched = allow_batches(vae)
    torch.testing.assert_close(batched.decode(latents).sample, alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(batched.encode(videos).latent_dist.mode(), modes, atol=1e-5, rtol=1e-5)


def places(network: nn.Module) -> dict[str, tuple[str, int]]:
    return {name: (t.device.type, t.data_ptr()) for name, t in (*network.named_parameters(), *network.named_buffers())}


def test_encoders_that_visit_encode_as_those_that_stay_and_nothing_is_copied_back(pipeline):
    prompts = ["a red circle", 'a sign that says "open"']
    expected = pipeline.encode(prompts)
    before = [places(encoder) for encoder in pipeline.encoders]
    pipeline.encoder_offload = True
    received = pipeline.with_scheduler(pipeline.scheduler).encode(prompts)
    assert all(received.text[i].equal(expected.text[i]) and received.glyph[i].equal(expected.glyph[i]) for i in (0, 1))
    assert [places(encoder) for encoder in pipeline.encoders] == before
    assert any(True for _ in pipeline.text_encoder.buffers())
    pipeline.vae.to("meta")  # where they are to go
    with pipeline.encoders_at_work():
        assert {device for encoder in pipeline.encoders for device, _ in places(encoder).values()} == {"meta"}
    assert [places(encoder) for encoder in pipeline.encoders] == before
