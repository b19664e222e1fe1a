"""Networks that visit a device are there inside the block alone, and come back as they were."""

import pytest
import torch
from torch import nn

from hyvideo.models.temporary_placement import temporarily_on


def places(network: nn.Module) -> dict[str, tuple[str, int]]:
    return {name: (t.device.type, t.data_ptr()) for name, t in (*network.named_parameters(), *network.named_buffers())}


def test_a_network_is_away_inside_the_block_alone_and_nothing_is_copied_back():
    network = nn.BatchNorm1d(3).requires_grad_(False)  # has buffers
    before = places(network)
    with pytest.raises(ZeroDivisionError), temporarily_on([network], torch.device("meta")):
        assert {device for device, _ in places(network).values()} == {"meta"}
        raise ZeroDivisionError
    assert places(network) == before


def test_encoders_that_visit_encode_as_those_that_stay(pipeline):
    prompts = ["a red circle", 'a sign that says "open"']
    expected = pipeline.encode(prompts)
    before = [places(encoder) for encoder in pipeline.encoders]
    pipeline.encoder_offload = True
    received = pipeline.with_scheduler(pipeline.scheduler).encode(prompts)
    assert all(map(torch.equal, received.text + received.glyph, expected.text + expected.glyph))
    assert [places(encoder) for encoder in pipeline.encoders] == before
    seen = []
    pipeline.text_encoder.register_forward_pre_hook(lambda *_: seen.append(pipeline.text_encoder.device.type))
    pipeline.vae.to("meta")  # where they are to go, and nothing can be computed
    with pytest.raises((RuntimeError, NotImplementedError)):
        pipeline.encode(prompts)
    assert seen == ["meta"]
    assert [places(encoder) for encoder in pipeline.encoders] == before
