"""Boundary mode: exceptions, dropped graphs, nesting and threads."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlx.offload import OffloadOptions, RecomputeError, enable_activation_offloading


def test_after_an_exception_in_forward_the_next_step_is_right(enable, toys):
    model = toys.stack()
    expected = toys.grade(copy.deepcopy(model), toys.step)
    handle = enable(model, True)
    hook = model.layers[1].down.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("in forward")))
    with pytest.raises(KeyError):
        toys.step(model)
    hook.remove()
    assert handle.stats().held_bytes == 0
    expected.assert_equal(toys.grade(model, toys.step))


def test_after_an_exception_in_backward_the_next_step_is_right(enable, toys):
    model = toys.stack()
    expected = toys.grade(copy.deepcopy(model), toys.step)
    handle = enable(model, True)
    loss = toys.step(model)
    hook = model.layers[1].down.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("recomputing")))
    with pytest.raises(KeyError):
        loss.backward()
    hook.remove()
    del loss
    assert handle.stats().held_bytes == 0
    expected.assert_equal(toys.grade(model, toys.step))


def test_a_dropped_graph_frees_everything(enable, toys):
    model = toys.stack()
    handle = enable(model, True)
    loss = toys.step(model)
    assert handle.stats().held_bytes == 3 * 4 * 8 * 4
    del loss
    assert handle.stats().held_bytes == 0


def test_an_untouched_branch_frees_everything(enable, toys):
    model = toys.stack()
    handle = enable(model, True)
    hidden = model.embed(toys.batch())
    used, unused = model.layers[0](hidden), model.layers[1](hidden)
    used.sum().backward()
    assert handle.stats().held_bytes == 4 * 8 * 4
    del unused
    assert handle.stats().held_bytes == 0


def test_a_layer_whose_forward_differs_is_told(enable, toys):
    calls = []

    def fewer(block, x):
        calls.append(1)
        return torch.tanh(block.lin(x)) if len(calls) > 3 else torch.tanh(torch.exp(block.lin(x)))

    model = toys.of(fewer)
    enable(model, True)
    with pytest.raises(RecomputeError, match=r"layers\.2"):
        toys.step(model).backward()

    calls.clear()

    def wider(block, x):
        calls.append(1)
        return torch.tanh(block.lin(x.repeat(2, 1) if len(calls) > 3 else x)).mean()[None, None].expand(4, 8)

    model = toys.of(wider)
    enable(model, True)
    with pytest.raises(RecomputeError, match=r"was torch\.float32"):
        toys.step(model).backward()


def test_state_before_a_parameter_is_not_taken_for_a_change_of_the_parameter(enable, toys):
    """A layer that saves one tensor more the second time, so that parameters stand where others stood."""

    state = {}  # outside of the modules, so that it is not restored

    def forward(block, x):
        y = block.lin(x if block not in state else x * state[block]).sigmoid()
        state[block] = torch.full((4, 8), 0.5)
        return x + block.lin(y)

    model = toys.of(forward)
    handle = enable(model, True)
    loss = toys.step(model)
    with pytest.raises(RecomputeError, match=r"did not save the tensors .* look for state .* enable_ckpt=False"):
        loss.backward()
    del loss
    assert handle.stats().offloaded_bytes > 0


def test_a_switch_of_mode_between_forward_and_backward_is_told(enable, toys):
    model = toys.stack()
    enable(model, True)
    loss = toys.step(model)
    model.eval()
    with pytest.raises(RecomputeError, match="training mode in forward"):
        loss.backward()


def test_backward_inside_forward_is_refused(enable, toys):
    def forward(block, x):
        y = torch.tanh(block.lin(x))
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + grad

    model = toys.of(forward)
    enable(model, True)
    with pytest.raises(RecomputeError, match="backward pass inside its own forward"):
        toys.step(model)


def test_backward_inside_forward_that_asks_for_nothing_saved(compare, toys):
    """Its gradient is that of the layer's input, of which recomputation must know the shape."""

    def forward(block, x):
        (grad,) = torch.autograd.grad((2 * x + x.flatten().view_as(x)).sum(), x)
        return torch.tanh(block.lin(x + grad))

    compare(toys.of(forward), toys.step, True)


def test_running_statistics_advance_once(compare, enable, toys):
    model = toys.stack(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()))
    plain = copy.deepcopy(model)
    expected = toys.grade(plain, toys.step)
    enable(model, True)
    expected.assert_equal(toys.grade(model, toys.step))
    for (name, mine), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs), name


def test_a_users_hooks_inside_a_layer_work(compare, toys):
    packed = []

    def forward(block, x):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: packed.append(1) or t.detach().double(), lambda t: t.float()
        ):
            y = torch.tanh(block.lin(x))
        return torch.exp(y) + x

    compare(toys.of(forward), toys.step, True)
    assert packed


def test_a_users_hooks_around_the_model_work(compare, toys):
    def step(model):
        with torch.autograd.graph.save_on_cpu():
            return model(toys.batch())

    compare(toys.stack(), step, True)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_users_checkpoint_inside_a_layer(compare, toys, use_reentrant):
    def forward(block, x):
        y = checkpoint(lambda x: torch.tanh(block.lin(x)), x, use_reentrant=use_reentrant)
        return torch.exp(y * 0.1) + x

    compare(toys.of(forward), toys.step, True)


def test_layers_that_run_several_times(compare, toys):
    class Shared(type(toys.stack())):
        def forward(self, x):
            x = self.embed(x)
            for _ in range(3):
                for layer in self.layers:
                    x = layer(x)
            return self.head(x).sum()

    stats = compare(Shared(), toys.step, True, prefetch_layers=2)
    assert stats.offloaded_bytes == 9 * 4 * 8 * 4


def test_two_models_in_two_threads(enable, toys):
    models = [toys.stack(), toys.stack(lambda: toys.block(dropout=0.0))]
    expected = [toys.grade(copy.deepcopy(model), toys.step) for model in models]
    for model in models:
        enable(model, True)
    failures = []

    def work(model, wanted):
        try:
            for _ in range(10):
                model.zero_grad()
                toys.step(model).backward()
                for name, p in model.named_parameters():
                    assert torch.equal(p.grad, wanted.grads[name])
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(models, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_forward_here_and_backward_in_another_thread(enable, toys):
    model = toys.stack(lambda: toys.block(dropout=0.3))
    torch.manual_seed(7)
    plain = copy.deepcopy(model)
    toys.step(plain).backward()
    enable(model, True)
    torch.manual_seed(7)
    with torch.autocast("cpu", enabled=False):
        loss = toys.step(model)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_host_memory_that_is_full_leaves_tensors_on_the_device(toys, caplog):
    def step(model):
        return model(toys.batch(rows=1 << 12))

    model, hidden = toys.stack(), (1 << 12) * 8 * 4
    expected = toys.grade(copy.deepcopy(model), step)
    handle = enable_activation_offloading(model, True, OffloadOptions(min_bytes=0, max_host_bytes=2 * hidden))
    expected.assert_equal(toys.grade(model, step))
    expected.assert_equal(toys.grade(model, step))
    handle.disable()
    assert handle.stats().offloaded_bytes == 2 * 2 * hidden
    assert len([r for r in caplog.records if "host memory is full" in r.getMessage()]) == 1


def test_lengths_may_vary_without_more_memory(enable, toys):
    model = toys.stack(blocks=4)
    handle = enable(model, True)
    model(toys.batch(rows=64_000)).backward()
    reserved = handle.stats().reserved_bytes
    for rows in (1000, 63_999, 7, 30_000, 64_000):
        model(toys.batch(rows=rows)).backward()
        assert handle.stats().held_bytes == 0
    assert handle.stats().reserved_bytes == reserved
