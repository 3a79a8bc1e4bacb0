"""`save="auto"`: a pass is measured, a plan is made, and whatever it is, gradients are those of plain autograd."""

import copy
import gc
import logging
from types import SimpleNamespace

import pytest
import torch

from rlx.offload.autotune import decide

PLENTY = 1 << 40


def read(model, tokens=6):
    return model(torch.linspace(-1, 1, 2 * tokens * 16).sin().view(2, tokens, 16))


@pytest.fixture
def auto(enable):
    """`auto(model, budget)`: the handle."""
    return lambda model, budget=PLENTY, **options: enable(model, True, save="auto", max_device_bytes=budget, **options)


@pytest.mark.parametrize("budget", [0, 20_000, PLENTY])
def test_gradients_are_those_of_plain_autograd_before_and_after_the_plan(toys, auto, budget):
    model = toys.decoder(4, dropout=0.2)
    expected = toys.grade(copy.deepcopy(model), read)
    handle = auto(model, budget)
    for number in range(5):
        expected.assert_equal(toys.grade(model, read))
        assert (handle.plan() is None) == (number < 2)  # the first pass warms up, the second is measured
        assert handle.stats().held_bytes == 0


def test_where_everything_fits_nothing_leaves_and_nothing_is_recomputed(toys, auto):
    model = toys.decoder(3)
    handle = auto(model)
    for _ in range(3):
        read(model).backward()
    before = handle.stats()
    read(model).backward()
    step = handle.stats().since(before)
    assert all(layer.keep for layer in handle.plan().layers)
    assert (step.offloaded_bytes, step.recomputed_ms) == (0, 0)
    assert step.kept_bytes > 0


def test_without_an_accelerator_auto_means_that_little_stays(toys, auto, caplog):
    model = toys.decoder(4)
    caplog.set_level(logging.INFO, "rlx.offload")
    handle = auto(model, "auto")
    for _ in range(3):
        read(model).backward()
    assert sum("there is no accelerator" in record.getMessage() for record in caplog.records) == 1
    assert [layer.keep for layer in handle.plan().layers][:3] == [False] * 3
    assert not any(layer.on_device for layer in handle.plan().layers[:3])


@pytest.mark.parametrize(("tier", "host"), [("disk", None), ("cpu", 24 * 4096 * 4 + 1500)])
def test_what_the_host_has_no_room_for_goes_to_disk(toys, auto, tmp_path, monkeypatch, tier, host):
    monkeypatch.setattr(decide, "DISK_BYTES_PER_S", 1e12)
    model = toys.decoder(4, dropout=0.2)
    expected = toys.grade(copy.deepcopy(model), lambda model: read(model, 800))
    handle = auto(model, 0, tier=tier, directory=str(tmp_path), max_host_bytes=host)
    for _ in range(4):
        expected.assert_equal(toys.grade(model, lambda model: read(model, 800)))
        assert handle.stats().held_bytes == 0
    found = handle.plan().prediction
    assert found.disk_bytes > 0 and found.host_bytes <= (host or 0)
    assert handle.stats().disk_bytes > 0


def test_each_length_has_its_plan(toys, auto):
    model = toys.decoder(3)
    handle = auto(model)
    for _ in range(3):
        read(model).backward()
    plan = handle.plan()
    read(model, 40).backward()  # warm already: this pass is measured
    assert handle.plan() is plan
    read(model, 40).backward()
    assert handle.plan() is not plan
    read(model).backward()
    assert handle.plan() is plan


def test_graphs_alive_at_once_and_graphs_dropped(toys, auto):
    model = toys.decoder(3, dropout=0.1)
    handle = auto(model)

    def accumulated(model):
        first, second = read(model), read(model)
        first.backward()
        return second

    expected = toys.grade(copy.deepcopy(model), accumulated)
    for _ in range(2):
        read(model)  # measured in vain
        gc.collect()
    assert handle.plan() is None
    for _ in range(3):
        expected.assert_equal(toys.grade(model, accumulated))
    assert handle.plan() is not None


def test_a_plan_is_explained_once_and_nothing_warns(toys, auto, caplog):
    caplog.set_level(logging.INFO, "rlx.offload")
    model = toys.decoder(3)
    auto(model, 30_000)
    for _ in range(5):
        read(model).backward()
    plans = [record for record in caplog.records if "plan for layers" in record.getMessage()]
    assert len(plans) == 1 and "x plain" in plans[0].getMessage()
    assert all(record.levelno == logging.INFO for record in caplog.records)


@pytest.fixture
def filling(monkeypatch):
    """A device of 10 MB, of which others have allocated `filling.allocated`."""
    filling = SimpleNamespace(allocated=0)
    for module in ("measure", "decide"):
        monkeypatch.setattr(f"rlx.offload.autotune.{module}.allocated_bytes", lambda device: (filling.allocated,) * 2)
    monkeypatch.setattr("rlx.offload.autotune.decide.capacity_bytes", lambda device: (10_000_000,) * 2)
    return filling


def test_states_that_the_first_optimizer_step_makes_are_planned_with(toys, auto, filling):
    """Gradient accumulation: two lengths are planned before the step."""
    model = toys.decoder(4, dropout=0.2)
    expected = [toys.grade(copy.deepcopy(model), lambda model, n=n: read(model, n)) for n in (6, 40)]
    handle = auto(model, "auto")
    for tokens in (6, 6, 6, 40, 40):
        read(model, tokens).backward()
    assert all(layer.keep for layer in handle.plan().layers)
    filling.allocated = 9_500_000  # the states: nothing is left
    for tokens, graded in zip((6, 40), expected, strict=True):
        before = handle.stats()
        graded.assert_equal(toys.grade(model, lambda model, n=tokens: read(model, n)))
        assert not all(layer.keep for layer in handle.plan().layers), "the pass itself is planned anew"
        assert handle.stats().since(before).recomputed_ms > 0


@pytest.mark.parametrize(("budget", "grown"), [("auto", 90_000), (PLENTY, 9_500_000)])
def test_a_plan_stays_if_little_more_is_taken_or_a_number_was_given(toys, auto, filling, budget, grown):
    model = toys.decoder(3)
    handle = auto(model, budget)
    for _ in range(4):
        read(model).backward()
    plan = handle.plan()
    filling.allocated = grown
    read(model).backward()
    assert handle.plan() is plan is not None


def test_what_a_step_will_allocate_is_left_free(toys, auto, filling):
    model = toys.decoder(4)
    handle = auto(model, "auto")
    handle.agree(reserve_bytes=9_500_000)
    for _ in range(3):
        read(model).backward()
    assert not all(layer.keep for layer in handle.plan().layers)
