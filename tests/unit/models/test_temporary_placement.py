"""Networks that visit a device are there inside the block alone, and come back as they were."""

import pytest
from torch import nn


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
    seen, encoder = [], pipeline.text_encoder
    assert any(True for _ in encoder.buffers())
    encoder.register_forward_pre_hook(lambda *_: seen.extend(device for device, _ in places(encoder).values()))
    pipeline.vae.to("meta")  # where they are to go, and nothing can be computed
    with pytest.raises((RuntimeError, NotImplementedError)):
        pipeline.encode(prompts)
    assert set(seen) == {"meta"}
    assert [places(encoder) for encoder in pipeline.encoders] == before
