"""`save="auto"` where a device waits for the host: operations are looked at in some layers of each pass, until all have been."""

import copy
from types import SimpleNamespace

import pytest
import torch

from rlx.offload.autotune import measure as samples
from rlx.offload.autotune.decide import LAYER_STRIDE
from rlx.offload.autotune.measure import measured

LAYERS = 6


def read(model):
    return model(torch.linspace(-1, 1, 2 * 6 * 16).sin().view(2, 6, 16))


@pytest.fixture
def watched(toys, enable, monkeypatch):
    """`watched(waits)`: a model, its handle and, for each pass, its samples; `waits(pass, index)`: what the device does."""

    def make(waits):
        model = toys.decoder(LAYERS, dropout=0.2)
        expected = toys.grade(copy.deepcopy(model), read)
        handle = enable(model, True, save="auto", max_device_bytes=0)
        follow, passes = handle.runner.decide, []

        def note(layer, module, tensors):
            orders = follow(layer, module, tensors)
            if layer.index == 0:
                passes.append([])
            if isinstance(orders, samples.LayerProfile):
                passes[-1].append(orders)
            return orders

        def is_passed(mark):
            (index,) = (s.index for s in passes[-1] if mark in (s._marks["forward"], s._marks.get("recompute")))
            return waits(len(passes) - 1, index)

        handle.runner.decide = note
        monkeypatch.setattr(samples, "is_passed", is_passed)
        return SimpleNamespace(
            handle=handle, passes=passes, step=lambda: expected.assert_equal(toys.grade(model, read))
        )

    return make


def test_a_device_that_always_waits_is_measured_in_so_many_more_passes(watched):
    run = watched(lambda number, index: True)
    for number in range(LAYER_STRIDE + 5):
        run.step()
        assert (run.handle.plan() is None) == (number < LAYER_STRIDE + 2)
    seen = [[s.index for s in found if s.sees_calls] for found in run.passes]
    spread = [[index for index in range(LAYERS) if index % LAYER_STRIDE == place] for place in range(LAYER_STRIDE)]
    assert seen == [[], [*range(LAYERS)], *spread, [], [], []]
    assert [len(found) for found in run.passes] == [0, *[LAYERS] * (LAYER_STRIDE + 1), 0, 0, 0]
    (kind,) = run.handle.measurement().kinds
    assert kind.members == tuple(range(LAYERS))
    assert {operation.name for operation in kind.cost.operations} >= {"attention", "linear 16x32"}
    assert kind.cost.forward_s > 0


def test_a_device_that_waits_in_the_first_layers_only_is_measured_once(watched):
    run = watched(lambda number, index: index < LAYERS // 2)
    for number in range(4):
        run.step()
        assert (run.handle.plan() is None) == (number < 2)
    assert [s.is_host_bound for s in run.passes[1]] == [True] * 3 + [False] * 3


def test_layers_that_waited_do_not_count_for_times(watched):
    run = watched(lambda number, index: index < LAYERS // 2)
    for _ in range(3):
        run.step()
    (kind,) = run.handle.measurement().kinds
    rest = [s for s in run.passes[1] if not s.is_host_bound]
    assert kind.cost.forward_s == pytest.approx(sum(s.forward_s for s in rest) / len(rest))
    assert kind.cost.backward_s == pytest.approx(sum(s.backward_s for s in rest) / len(rest))
    assert kind.members == tuple(range(LAYERS))


def test_where_all_that_is_known_of_backward_waited_it_counts(watched):
    run = watched(lambda number, index: index > 0)
    for _ in range(LAYER_STRIDE + 3):
        run.step()
    found = [s for s in run.passes[1]]
    (kind,) = measured(found, 0).kinds  # of the first layer no backward is seen
    assert kind.cost.backward_s == pytest.approx(sum(s.backward_s for s in found[1:]) / (LAYERS - 1))


def test_marks_of_the_host_are_never_waited_for():
    assert not samples.is_passed(samples.mark(None))
