"""What is simulated without memory is what the same code takes with memory, and what can be worked out by hand."""

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import nn

from benchmarks.network import build_inputs
from hyvideo.algorithms.optimizer import build_optimizers
from hyvideo.config.loading import load_config
from hyvideo.models.attention import install_attention
from hyvideo.models.parallelize import prepare_policy, trainable_parameters
from hyvideo.planning.memory import DEPTHS, FittedPeaks
from hyvideo.planning.networks import read_networks
from hyvideo.planning.peak_memory import PeakMemory
from hyvideo.planning.simulation import Peaks, SimulatedCase, simulate
from hyvideo.planning.traffic import count_parameters
from tests.support.tiny_model import LATENT_CHANNELS, build_transformer

LATENTS = (LATENT_CHANNELS, 6, 40, 40)
NUM_TEXT = 20
WHOLE_BLOCKS = ["--config", "configs/sage_64gpu.yaml", "--cfg_scale", "1", "--activation_checkpointing", "full"]
FLAGS = ["--dtype", "fp32", "--enable_fsdp", "false", "--use_muon", "false"]


def real_peaks(config, transformer, rows):
    """What an update of `rows` rows takes with real tensors, the model's own forward pass and padding of nothing."""
    install_attention(transformer)
    recomputed = config.parallel.activation_checkpointing
    prepare_policy(transformer, gradient_checkpointing=recomputed != "none", recompute=recomputed)
    parameters = trainable_parameters(transformer)
    optimizers = build_optimizers(parameters, config.optimizer)
    with PeakMemory() as memory:
        for parameter in transformer.parameters():
            parameter.detach()  # an operation, by which the weight is seen and counted
        for _ in range(2):  # micro-batches, whose gradients are added
            memory.restart()
            output = transformer(**build_inputs(transformer, LATENTS[1:], [NUM_TEXT] * rows))[0]
            output.float().square().mean().backward()
            del output
        backward = memory.peak
        memory.restart()
        before = memory.current
        nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        states = memory.current - before
    return backward, states, memory.peak


@pytest.mark.parametrize("recompute", ["none", "full", "elementwise"])
def test_a_simulated_update_takes_what_a_real_one_takes(recompute):
    config = load_config([*FLAGS, "--activation_checkpointing", recompute])
    transformer = build_transformer(num_layers=4)
    weights = sum(parameter.nbytes for parameter in transformer.parameters())
    simulated = simulate(config, SimulatedCase(dict(transformer.config), LATENTS, NUM_TEXT, 1, 1), world_size=1)
    backward, states, optimizer = real_peaks(config, transformer, rows=1)
    assert simulated.weights == weights
    assert simulated.states == pytest.approx(states, rel=0.01)
    assert simulated.backward - simulated.states == pytest.approx(backward, rel=0.02)
    assert simulated.optimizer == pytest.approx(optimizer, rel=0.02)


def test_a_simulated_adapter_takes_float32_whatever_the_other_weights_do():
    case = SimulatedCase(dict(build_transformer().config), LATENTS, NUM_TEXT, 1, 1)
    half, whole = (
        simulate(load_config(["--use_lora", "true", "--master_weight_type", precision]), case, world_size=2)
        for precision in ("bf16", "fp32")
    )
    assert half.weights < whole.weights
    assert (half.trained, half.states) == (whole.trained, whole.states)


@pytest.fixture(scope="module")
def real_size() -> Peaks:
    """Four blocks of the released size, recomputed whole, 81 frames of 480x864, rank 0 of 64."""
    config = load_config(WHOLE_BLOCKS)
    networks = read_networks(config.model, config.reward)
    case = SimulatedCase({**networks.transformer, "num_layers": 4}, (32, 21, 30, 54), 300, 1, 1)
    return simulate(config, case, world_size=64)


def test_four_blocks_of_the_real_size_over_64_ranks_take_what_their_parts_do(real_size):
    config = load_config([])
    network = {**read_networks(config.model, config.reward).transformer, "num_layers": 4}
    with torch.device("meta"):
        transformer = HunyuanVideo15Transformer3DModel.from_config(network)
    parameters = count_parameters(prepare_policy(transformer, gradient_checkpointing=False))
    shard = 4 / 64
    assert real_size.weights == pytest.approx(shard * parameters.total, rel=0.01)
    assert real_size.trained == pytest.approx(shard * parameters.trained, rel=0.01)
    momentum, moments = parameters.trained_matrices, 2 * (parameters.trained - parameters.trained_matrices)
    assert real_size.states == pytest.approx(shard * (momentum + moments), rel=0.01)
    tokens, width, gib = 34_020 // 2, 2048, 2**30
    inputs = 4 * 2 * tokens * width
    gathered, reduced = 3 * 2 * 151e6, 4 * 151e6  # this block's weights, the next one's twice; its gradients in float32
    assert real_size.backward > inputs + gathered + reduced
    assert 4.5 * gib < real_size.backward < 5.7 * gib
    assert real_size.rollout < real_size.backward - gib and real_size.optimizer < gib


def test_larger_videos_and_micro_batches_lie_on_the_line_through_two_sizes():
    config = load_config(FLAGS)
    transformer = dict(build_transformer(num_layers=4).config)
    case = SimulatedCase(transformer, (LATENT_CHANNELS, 9, 40, 54), NUM_TEXT, 2, 3, ((LATENT_CHANNELS, 13, 30, 54), 4))
    fitted, real = FittedPeaks()(config, case, 1), simulate(config, case, 1)
    for phase in ("rollout", "anchor", "backward", "optimizer", "validation", "weights", "states"):
        assert getattr(fitted, phase) == pytest.approx(getattr(real, phase), rel=0.05), phase


def test_adapters_are_simulated_beside_weights_that_are_not_trained():
    transformer = dict(build_transformer(num_layers=2).config)
    case, flags = SimulatedCase(transformer, LATENTS, NUM_TEXT, 1, 1), [*FLAGS, "--enable_fsdp", "true"]
    every, adapter = (simulate(load_config([*flags, *lora]), case, 2) for lora in ([], ["--use_lora"]))
    assert 0 < adapter.trained < every.trained / 2 and adapter.states < every.states / 2
    assert adapter.weights == pytest.approx(every.weights + adapter.trained, rel=0.01)
    assert adapter.backward < every.backward


def test_a_pass_without_gradients_leaves_the_weights_gathered_where_they_are_kept():
    transformer = build_transformer(num_layers=4)
    case, sharded = SimulatedCase(dict(transformer.config), LATENTS, NUM_TEXT, 1, 1), [*FLAGS, "--enable_fsdp", "true"]
    kept = ["--reshard_after_forward", "false"]
    freed, whole, alone = (
        simulate(load_config(flags), case, ranks).gathered
        for flags, ranks in ((sharded, 2), ([*sharded, *kept], 2), ([*sharded, *kept], 1))
    )
    assert whole == pytest.approx(sum(parameter.nbytes for parameter in transformer.parameters()), rel=0.02)
    assert freed == alone == 0


def test_ranks_that_do_not_divide_are_refused():
    config = load_config([*FLAGS, "--enable_fsdp", "true", "--sp_size", "3"])
    case = SimulatedCase(dict(build_transformer().config), LATENTS, NUM_TEXT, 1, 1)
    with pytest.raises(ValueError, match="world size 8 is not divisible by sp_size 3"):
        simulate(config, case, world_size=8)


@pytest.mark.slow
def test_all_54_blocks_take_what_is_extrapolated_from_a_few(real_size):
    """Minutes: the prediction of every phase from two depths, against the simulation of all blocks."""
    config = load_config(WHOLE_BLOCKS)
    networks = read_networks(config.model, config.reward)
    case = SimulatedCase(networks.transformer, (32, 21, 30, 54), 300, 1, 1)
    few = simulate(config, case.with_depth(DEPTHS[1]), 64)
    every = simulate(config, case, 64)
    for phase in ("rollout", "backward", "optimizer", "weights", "states"):
        low, high = getattr(real_size, phase), getattr(few, phase)
        assert getattr(every, phase) == pytest.approx(low + (high - low) * (54 - DEPTHS[0]), rel=0.01), phase
