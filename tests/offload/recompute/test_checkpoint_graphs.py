"""Boundary mode: exceptions, dropped graphs, nesting and threads."""

import pytest
import torch

from rlx.offload import RecomputeError


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
