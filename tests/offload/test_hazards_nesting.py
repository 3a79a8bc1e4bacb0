"""Each mode beside what else hooks into autograd and dispatch: hooks, modes, checkpoints, autocast, torch.func, modules of torch."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


def attention(m, x):
    return m.o(m.attend(m.q(x), m.k(x), m.v(x), is_causal=True))


class OwnAttention(torch.autograd.Function):
    """Attention as a user writes it, not registered. It saves its weights, which no fused kernel does."""

    @staticmethod
    def forward(ctx, q, k, v):
        weights = torch.softmax(q @ k.mT, -1)
        ctx.save_for_backward(q, k, v, weights)
        return weights @ v

    @staticmethod
    def backward(ctx, grad):
        q, k, v, weights = ctx.saved_tensors
        back = weights * (grad @ v.mT)
        scores = back - weights * back.sum(-1, keepdim=True)
        return scores @ k, scores.mT @ q, weights.mT @ grad


class Doubles(TorchFunctionMode):
    """A mode of the user's that changes what linear maps compute."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is F.linear else result


class Counts(TorchDispatchMode):
    """A mode of the user's below autograd."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


def hooks_around(part):
    def forward(m, x):
        hooks = saved_tensors_hooks(lambda t: (t.dtype, t.detach().double()), lambda packed: packed[1].to(packed[0]))
        with hooks:
            y = attention(m, x)
        with hooks if part == "everything" else contextlib.nullcontext():
            return x + m.mlp(y)

    return forward


def function_mode(m, x):
    with Doubles():
        y = m.o(m.attend(m.q(x), m.k(x), m.v(x)))
    return x + m.mlp(y)


def dispatch_mode(m, x):
    with Counts() as counts:
        y = attention(m, x)
    assert counts.calls > 0
    return x + m.mlp(y)


def checkpoint_of(use_reentrant, part):
    def forward(m, x):
        run = {"attention": attention, "mlp": type(m).mlp}
        run[part] = lambda m, x, inner=run[part]: checkpoint(inner, m, x, use_reentrant=use_reentrant)
        return x + run["mlp"](m, x + run["attention"](m, x))

    return forward


def own_function(m, x):
    return x + m.mlp(m.o(m.merge(OwnAttention.apply(m.split(m.q(x)), m.split(m.k(x)), m.split(m.v(x))))))


def swapped_weights(m, x):
    weights = {"weight": m.q.weight * 2, "bias": m.q.bias + 1}
    q = torch.func.functional_call(m.q, weights, (x,))
    return x + m.mlp(m.o(m.attend(q, m.k(x), m.v(x))))


NESTED = {
    "hooks_around_attention": hooks_around("attention"),
    "hooks_around_everything": hooks_around("everything"),
    "checkpoint_of_attention": checkpoint_of(False, "attention"),
    "checkpoint_of_mlp": checkpoint_of(False, "mlp"),
    **{function.__name__: function for function in (function_mode, dispatch_mode, own_function, swapped_weights)},
}


@pytest.mark.parametrize("name", NESTED)
def test_inside_a_layer(compare_layer, every_saving, name):
    compare_layer(NESTED[name], **every_saving)


@pytest.mark.parametrize("part", ["attention", "mlp"])
def test_a_reentrant_checkpoint_inside_a_layer(compare, toys, saving, part):
    compare(toys.stack(lambda: toys.kit(checkpoint_of(True, part)), width=16), toys.read, **saving)


class Passes(TorchFunctionMode):
    """A mode of the user's that changes nothing."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Around:
    """What a user may put around a model's forward, around its backward, or around both."""

    hooks = staticmethod(lambda: saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t))
    function_mode = staticmethod(Passes)
    dispatch_mode = staticmethod(Counts)
    default_device = staticmethod(lambda: torch.device("cpu"))
    math_attention = staticmethod(lambda: sdpa_kernel(SDPBackend.MATH))
    autocast = staticmethod(lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    anomalies = staticmethod(torch.autograd.detect_anomaly)
    one_thread = staticmethod(lambda: torch.autograd.set_multithreading_enabled(False))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("where", ["forward", "both"])
@pytest.mark.parametrize("name", [name for name in vars(Around) if not name.startswith("_")])
def test_around_the_model(compare, toys, saving, name, where):
    def step(model):
        with getattr(Around, name)():
            loss = toys.read(model).float()
            if where == "both":
                loss.backward()
        if where == "forward":
            loss.backward()
        return loss.detach()

    compare(toys.decoder(dropout=0.1), step, **saving)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_users_checkpoint_around_the_model(compare, toys, saving, use_reentrant):
    def step(model):
        x = toys.tokens().requires_grad_()
        return checkpoint(model, x, use_reentrant=use_reentrant)

    compare(toys.decoder(dropout=0.1), step, **saving)


def halved(model):
    return {name: p * 0.5 for name, p in model.named_parameters()}


def scaled(m, x):
    return x + m.mlp(attention(m, x * m.scale))


def tied_model(toys):
    """A model with ties between layers and within one, whose layers read a buffer."""

    def layer():
        made = toys.kit(scaled)
        made.register_buffer("scale", torch.rand(16))
        return made

    model = toys.stack(layer, width=16)
    first, second = model.layers[0], model.layers[1]
    second.k.weight = first.k.weight
    second.q.weight = second.v.weight
    return model


def test_weights_that_are_swapped_for_one_call(enable, toys, saving):
    def step(model):
        return torch.func.functional_call(model, halved(model), (toys.tokens(),))

    model = tied_model(toys)
    expected = toys.grade(copy.deepcopy(model), step)
    enable(model, **saving)
    toys.read(model).backward()  # what is learned about a layer from a usual call does not hold for the next
    for _ in range(2):
        expected.assert_equal(toys.grade(model, step))


def test_weights_of_a_subclass_that_answers_for_itself(compare, toys, saving):
    """As quantised weights do: the class itself says what a linear map with it is."""

    class Quantised(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is F.linear:
                x, weight, *bias = args
                return F.linear(x, weight.as_subclass(torch.Tensor).round(decimals=1), *bias)
            return super().__torch_function__(function, types, args, kwargs or {})

    def forward(m, x):
        weight = m.q.weight.detach().as_subclass(Quantised)
        q = F.linear(x, weight, m.q.bias)
        return x + m.mlp(m.o(m.attend(q, m.k(x), m.v(x))))

    compare(toys.stack(lambda: toys.kit(forward), width=16), toys.read, **saving)


def test_computed_weights(compare, toys, saving):
    def layer():
        built = toys.attend()
        for part in (built.q, built.o):
            nn.utils.parametrizations.weight_norm(part)
        nn.utils.parametrizations.spectral_norm(built.v)
        return built

    compare(toys.stack(layer, width=16), toys.read, **saving)


def swallows_everything(m, x):
    y = attention(m, x)
    z = y
    with contextlib.suppress(BaseException):
        z = torch.exp(y * 0.1)
    return z + x


def test_a_layer_that_swallows_every_exception(compare, toys, saving):
    compare(toys.stack(lambda: toys.kit(swallows_everything), width=16), toys.read, **saving)
