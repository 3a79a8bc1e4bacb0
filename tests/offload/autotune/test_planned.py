"""Plans carried out: whatever is kept, sent off and recomputed, gradients are those of plain autograd bit for bit."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_transformers import build
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from rlx.offload import OffloadOptions, enable_activation_offloading
from rlx.offload.replay.recorder import LayerInstructions

places = st.frozensets(st.integers(0, 7))
layer_orders = st.builds(
    lambda keep, leaves, on, off, early, call, below: LayerInstructions(
        keep, leaves, on, off - on, prefetch_early=early, prefetch_call=call, prefetch_below=below
    ),
    st.booleans() | st.just(False),
    st.booleans(),
    places,
    places,
    st.booleans(),
    st.none() | st.integers(0, 8),
    st.none() | st.integers(0, 40),
)
ALL_STAY = LayerInstructions(offload_boundary=False, on_device=frozenset(range(64)))
ALL_LEAVE = LayerInstructions(off_device=frozenset(range(64)))
MIXED = (
    LayerInstructions(off_device=frozenset({0, 3, 5})),
    LayerInstructions(keep=True),
    LayerInstructions(on_device=frozenset({1, 4}), prefetch_early=True),
)
PLANS = {
    "stay": (ALL_STAY,) * 3,
    "leave": (ALL_LEAVE,) * 3,
    "mixed": MIXED,
    "kept": (LayerInstructions(keep=True),) * 3,
}


def under(orders, model):
    """A handle for a model whose layers follow orders."""
    handle = enable_activation_offloading(model, True, OffloadOptions(save="auto", min_bytes=0))
    handle.runner.decide = lambda layer, module, tensors: orders[layer.index]
    return handle


def check(toys, model, step, orders):
    expected = toys.grade(copy.deepcopy(model), step)
    handle = under(orders, model)
    try:
        expected.assert_equal(toys.grade(model, step))
        assert handle.stats().held_bytes == 0
        return handle.stats()
    finally:
        handle.disable()


def random_numbers(model):
    return model(torch.linspace(-1, 1, 2 * 6 * 16).sin().view(2, 6, 16)) * torch.rand(())


def accumulated(model):
    x = torch.linspace(-1, 1, 2 * 6 * 16).sin().view(2, 6, 16)
    model(x).backward()
    second, third = model(x[:1]), model(2 * x)
    second.backward()
    return third


def several_times(model):
    loss = model(torch.linspace(-1, 1, 2 * 6 * 16).cos().view(2, 6, 16))
    torch.autograd.grad(loss, [model.layers[1].v.weight], retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach()


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(layer_orders, min_size=4, max_size=4), st.sampled_from([random_numbers, accumulated, several_times]))
def test_any_plan_gives_the_gradients_of_plain_autograd(toys, orders, step):
    check(toys, toys.decoder(4, dropout=0.3, attention_dropout=0.2), step, orders)


def read(model):
    ids = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(3))
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["qwen2", "gemma3", "qwen3_moe", "gpt2"])
def test_models(toys, name, plan):
    stats = check(toys, build(name), read, PLANS[plan])
    if plan in ("stay", "kept"):
        assert stats.offloaded_bytes == 0
    if plan == "kept":
        assert stats.recomputed_ms == 0


def calls_in_backward(model, orders):
    """How many products of matrices and how many calls of attention backward runs."""
    seen = []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    handle = under(orders, model)
    try:
        loss = read(model)
        with See():
            loss.backward()
        products = sum(name.startswith(("aten.mm", "aten.addmm")) for name in seen)
        return products, sum("attention" in name and "backward" not in name for name in seen)
    finally:
        handle.disable()


def repeated(orders):
    """The same, but for those that backward runs where nothing is recomputed."""
    (products, attentions), (fewest, none) = (calls_in_backward(build("qwen3"), o) for o in (orders, PLANS["kept"]))
    assert none == 0
    return products - fewest, attentions


@pytest.mark.parametrize("where", ["on_device", "off_device"])
def test_named_calls_do_not_run_again(where):
    assert repeated((LayerInstructions(),) * 3) == (18, 3)  # of seven maps a layer recomputation ends before the last
    assert repeated((LayerInstructions(**{where: frozenset({0, 3, 6})}),) * 3) == (12, 0)  # without q, attention and up
    assert repeated((LayerInstructions(**{where: frozenset(range(8))}),) * 3) == (0, 0)


def test_a_layer_that_calls_something_else_runs_from_there_on(toys, caplog):
    caplog.set_level("INFO", "rlx.offload")
    names = ("linear 32x64", "linear 32x32", "linear 32x99", "attention", "linear 64x32")
    orders = (LayerInstructions(on_device=frozenset(range(5)), call_names=names),) * 3
    assert repeated(orders) == (12, 3)
    assert "calls other attention or linear maps" in caplog.text and caplog.text.count("Logged once") == 1
    check(toys, build("qwen3"), read, orders)


class Scribble(torch.autograd.Function):
    """Doubles in place, past the version counter, as some fused kernels do."""

    @staticmethod
    def forward(ctx, x):
        x.data.mul_(2)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.parametrize("where", ["on_device", "off_device"])
def test_results_that_a_function_writes_to_unseen_run_again(toys, where):
    def scribbles(m, x):
        x = x + m.o(m.attend(Scribble.apply(m.q(x)), m.k(x), Scribble.apply(m.v(x).view(2, 6, 16))))
        y = Scribble.apply(m.up(m.norm(x)).view(2, 6, 32)).sin()
        return x + Scribble.apply(m.down(y)) + m.other(x)

    model = toys.stack(lambda: toys.kit(scribbles), width=16)
    check(toys, model, random_numbers, (LayerInstructions(**{where: frozenset(range(8))}),) * 3)


def differentiated_twice(model):
    x = torch.linspace(-1, 1, 2 * 6 * 16).sin().view(2, 6, 16).requires_grad_()
    loss = model(x)
    gradients = torch.autograd.grad(loss, [x, model.layers[1].v.weight], create_graph=True)
    return loss + sum(gradient.square().sum() for gradient in gradients)


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_of_gradients(toys, plan):
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
        check(toys, toys.decoder(dropout=0.1), differentiated_twice, PLANS[plan])
