"""Where a recomputation ends, on an accelerator with streams that are told (real ones: test_gpu_streams)."""

import pytest
import torch

from rlx.offload.recompute.ambient_state import AmbientState
from rlx.offload.recompute.saved_slots import Collector, RecomputedLayer, SavedSlots

DEVICE = torch.device("cuda", 0)


class Stream:
    """One that is told apart, and knows its device."""

    device = DEVICE


class Streams:
    """Which stream is current, and how often that was asked."""

    def __init__(self):
        self.main, self.side = Stream(), Stream()
        self.current, self.asked = self.main, 0

    def __call__(self, device):
        assert device == DEVICE
        self.asked += 1
        return self.current


@pytest.fixture
def streams(monkeypatch):
    told = Streams()
    monkeypatch.setattr(torch.accelerator, "current_stream", told)
    return told


def ambient():
    found = AmbientState(())
    found.begin_forward()
    found.end_forward()
    return found


def recomputed(layer, slots, streams, sides):
    """How much of a layer of as many exponentials runs again, of which those in `sides` are on the side stream."""
    ran = []

    def forward(x):
        for number in range(4):
            streams.current = streams.side if number in sides else streams.main
            x = x.exp()  # saves its result, so that the next one begins when that is taken
            ran.append(number)
        streams.current = streams.main
        return x

    streams.asked = 0
    collector = Collector(layer, slots, streams.main, True, ambient())
    collector.run(forward, (torch.ones(2, requires_grad=True),), {})
    assert len(collector.saved) == 4
    return ran


@pytest.fixture
def layer():
    return RecomputedLayer(0, "layers.0")


def slots_of(shape, expected):
    """Four slots of tensors of a shape."""
    found = SavedSlots()
    pack = found.packer()
    for _ in range(4):
        pack(torch.ones(shape))
    found.end_forward(expected)
    return found


@pytest.fixture
def slots():
    return slots_of(2, None)


def test_a_layer_on_one_stream_ends_after_its_last_tensor_and_is_asked_once_from_then_on(layer, streams, slots):
    for asked in (1 + 4, 1 + 1):
        assert recomputed(layer, slots, streams, ()) == [0, 1, 2]
        assert streams.asked == asked and not layer.uses_streams


@pytest.mark.parametrize("sides", [(0,), (1, 2), (3,), (0, 3)])
def test_a_layer_on_several_streams_runs_to_its_end_and_is_not_asked_again(layer, streams, slots, sides):
    for _ in range(2):
        assert recomputed(layer, slots, streams, sides) == [0, 1, 2, 3]
        assert layer.uses_streams


def test_a_layer_that_saves_something_else_is_looked_at_again(layer, streams, slots):
    assert recomputed(layer, slots, streams, ()) == [0, 1, 2]
    assert recomputed(layer, slots_of((2, 1), slots.specs), streams, (1,)) == [0, 1, 2, 3]


def test_a_last_tensor_on_another_stream_is_seen_at_any_time(layer, streams, slots):
    assert recomputed(layer, slots, streams, ()) == [0, 1, 2]
    assert recomputed(layer, slots, streams, (3,)) == [0, 1, 2, 3]
    assert layer.uses_streams


def test_a_recomputation_that_begins_on_another_stream_than_forward_did_runs_to_its_end(layer, streams, slots):
    """Backward comes to the part on the side stream first. Recomputed from there, the rest is on the same stream."""
    ran = []

    def forward(x):
        ran.append(x.exp().exp().exp().exp())

    for current in (streams.side, streams.main):
        streams.current = current
        Collector(layer, slots, streams.main, True, ambient()).run(forward, (torch.ones(2, requires_grad=True),), {})
        assert layer.uses_streams
    assert len(ran) == 2
