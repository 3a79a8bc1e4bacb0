"""When backward asks for what the layer before has sent off: at the call or the slot that the plan names."""

import pytest
import torch
import torch.nn.functional as F

from rlx.offload.replay.recorder import LayerInstructions


def arrived(toys, enable, behind):
    """Whether the first layer's input was back when backward came to the maps of the layer behind it, the last of them first."""
    calls, seen = [], []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            pieces = [piece() for piece in calls[0].offloaded]
            seen.append(pieces[0] is not None and pieces[0]._fetched is not None)
            return grad

    def forward(block, x):
        for _ in range(3):
            x = torch.tanh(Look.apply(block.lin(x)))
        return x

    model = toys.of(forward, blocks=2)
    handle = enable(model, True, save="auto", min_bytes=0)
    orders = [LayerInstructions(), behind]
    handle.runner.decide = lambda layer, module, tensors: orders[layer.index]
    loss = toys.step(model)
    calls.append(handle.session._thread.last().previous())
    loss.backward()
    return seen[:3]


@pytest.mark.parametrize("keep", [False, True])
def test_the_layer_before_is_fetched_when_a_call_s_backward_begins(toys, enable, keep):
    # Of each round autograd saves two tensors for the map and one for tanh.
    at = [LayerInstructions(keep=keep, prefetch_call=call, prefetch_below=3 * call + 2) for call in (2, 1, 0)]
    assert [arrived(toys, enable, orders) for orders in at] == [[False, True, True], [False, False, True], [False] * 3]
    assert arrived(toys, enable, LayerInstructions(keep=keep, prefetch_early=True)) == [True] * 3


def test_what_has_left_comes_back_in_the_order_in_which_recomputation_asks_for_it(toys, enable):
    """Also where the graph leads from what comes after two calls to the second of them first."""
    model = toys.of(lambda block, x: block.lin(F.silu(block.lin(x)) * block.lin(x)), blocks=3)
    handle = enable(model, True, save="auto", min_bytes=0)
    handle.runner.decide = lambda layer, module, tensors: LayerInstructions(off_device=frozenset({0, 1}))
    loss = toys.step(model)
    call = handle.session._thread.last()
    cached_ops = call._policy._cached_ops
    stashed = [*call._inputs._stashed, cached_ops[0]._result, cached_ops[1]._result]
    assert [piece() for piece in call.offloaded] == [one._offloaded for one in stashed]
    loss.backward()
