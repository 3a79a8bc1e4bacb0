"""What a layer reads besides its inputs and parameters: buffers, attributes, hooks, objects. All is as plain autograd leaves it."""

import collections
import copy
import random
import types

import numpy
import pytest
import torch
from torch import nn

from rlx.offload.recompute.saved_slots import RecomputeError


class Layer(nn.Module):
    """A block with what `prepare(layer)` gives it; runs `run(layer, x, ...)`."""

    def __init__(self, block, prepare, run):
        super().__init__()
        self.block = block
        self.run = run
        prepare(self)

    def forward(self, x, *more, **named):
        return self.run(self, x, *more, **named)


@pytest.fixture
def stack(toys):
    """`stack(run, prepare)`: three such layers."""
    return lambda run, prepare=lambda layer: None: toys.stack(lambda: Layer(toys.block(), prepare, run))


def one_graph(toys, model):
    return toys.step(model)


def two_graphs(toys, model):
    first, second = toys.step(model), model(toys.batch(seed=2))
    second.backward()
    first.backward()
    return second.detach()


def mean_of(x):
    with torch.no_grad():
        return x.mean(0)


def mean_is_none(m):
    m.register_buffer("mean", None)


def fills_its_buffer(m, x):
    m.mean = mean_of(x) if m.mean is None else 0.9 * m.mean + 0.1 * mean_of(x)
    return m.block(x * (1 + m.mean))


def registers_a_buffer(m, x):
    if not hasattr(m, "mean"):
        m.register_buffer("mean", torch.ones(8))
    with torch.no_grad():
        m.mean.mul_(0.9).add_(0.1 * mean_of(x))
    return m.block(x * (1 + m.mean.clone()))


def expanded(m):
    m.register_buffer("scale", torch.tensor(1.5).expand(8))


def scaled(m, x):
    return m.block(x * m.scale)


def remembers_nothing(m):
    m.register_buffer("seen", torch.zeros(0))


def remembers(m, x):
    m.seen = torch.cat([m.seen, x.detach().mean().view(1)])
    return m.block(x * (1 + m.seen.sum()))


def in_a_list(m):
    m.hidden = [nn.BatchNorm1d(8)]


def with_statistics_in_a_list(m, x):
    return m.block(m.hidden[0](x))


def scale_of_one(m):
    m.scale = 1.0


def sets_it_and_sets_it_back(m, x):
    x = x * m.scale
    m.scale = 2.0
    y = torch.tanh(m.block(x)) * m.scale
    m.scale = 1.0
    return y


def no_mean(m):
    m.mean = None


def counts(m):
    m.calls, m.seen = 0, []


def counted(m, x):
    m.calls += 1
    m.seen.append(m.calls)
    return m.block(x) * m.calls


def own_generator(m):
    m.generator = torch.Generator().manual_seed(3)


def draws_from_its_own(m, x):
    return m.block(x * torch.rand(x.shape, generator=m.generator))


def python_generator(m):
    m.generator = random.Random(3)


def draws_from_pythons(m, x):
    return m.block(x * m.generator.random())


def numpy_generator(m):
    m.generator = numpy.random.default_rng(3)


def draws_from_numpys(m, x):
    return m.block(x * float(m.generator.normal()))


def count(m):
    m.register_buffer("count", torch.zeros(1))


def multiplied_by_its_count(m, x):
    m.count += 1
    return x + m.block(x) * m.count


LAYERS = {
    "a generator of its own": (draws_from_its_own, own_generator),
    "a generator of Python's": (draws_from_pythons, python_generator),
    "a generator of NumPy's": (draws_from_numpys, numpy_generator),
    "a buffer that is None at first": (fills_its_buffer, mean_is_none),
    "an attribute that is None at first": (fills_its_buffer, no_mean),
    "an expanded buffer": (scaled, expanded),
    "a buffer that grows": (remembers, remembers_nothing),
    "a buffer that forward registers": (registers_a_buffer, lambda m: None),
    "statistics in a list": (with_statistics_in_a_list, in_a_list),
    "an attribute that is set and set back": (sets_it_and_sets_it_back, scale_of_one),
    "a counter and a list": (counted, counts),
}


def state_of(model):
    """Return all that the layers hold besides parameters and modules."""
    found = []
    for layer in model.layers:
        hidden = [bn.state_dict() for bn in getattr(layer, "hidden", ())]
        attributes = {name: layer.__dict__.get(name) for name in ("scale", "mean", "calls", "seen")}
        found.append((dict(layer.named_buffers()), hidden, attributes))
    return found


@pytest.mark.parametrize("step", [one_graph, two_graphs], ids=lambda step: step.__name__)
@pytest.mark.parametrize("name", LAYERS)
def test_state_of_modules(enable, toys, stack, mode, name, step):
    model = stack(*LAYERS[name])
    plain = copy.deepcopy(model)
    enable(model, **mode)
    for _ in range(2):
        expected = toys.grade(plain, lambda model: step(toys, model))
        expected.assert_equal(toys.grade(model, lambda model: step(toys, model)))
        torch.testing.assert_close(state_of(model), state_of(plain), rtol=0, atol=0)


def test_a_count_that_backward_reads(enable, toys, stack, mode):
    """Of two graphs plain autograd refuses the first one's backward."""
    model = stack(multiplied_by_its_count, count)
    plain = copy.deepcopy(model)
    enable(model, **mode)
    for _ in range(3):
        toys.grade(plain, toys.step).assert_equal(toys.grade(model, toys.step))
    toys.step(model).backward(retain_graph=True)
    first = toys.step(model)
    toys.step(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()


def last_result(m):
    m.register_buffer("result", torch.ones(8, 8))


def keeps_a_result_with_its_graph(m, x):
    y = m.block(x * m.result.detach().mean())
    m.result = m.block.up.weight[:8] * y.detach().sum()
    return x + y @ m.result


def test_a_buffer_that_gets_a_gradient_is_refused(enable, toys, stack):
    model = stack(keeps_a_result_with_its_graph, last_result)
    enable(model, True)
    toys.step(model).backward()
    with pytest.raises(RuntimeError, match="changes buffer 'result' of its module Layer"):
        toys.step(model)


class SetsMasks(nn.Module):
    """A model that gives its layers a mask as a plain attribute before each forward."""

    def __init__(self, inner, size):
        super().__init__()
        self.inner, self.layers, self.size = inner, inner.layers, size

    def forward(self, x):
        for layer in self.layers:
            layer.mask = (x.mean() * torch.ones(self.size)).requires_grad_(self.size == 9)
        return self.inner(x)


@pytest.mark.parametrize("size", [8, 9, 1 << 18])  # small, with a gradient, large
def test_an_attribute_that_the_model_sets(enable, toys, stack, mode, size):
    model = SetsMasks(stack(lambda m, x: m.block(x * m.mask[:8])), size)
    plain = copy.deepcopy(model)
    step = two_graphs if size == 8 else one_graph
    expected = toys.grade(plain, lambda model: step(toys, model))
    enable(model, **mode)
    expected.assert_equal(toys.grade(model, lambda model: step(toys, model)))


def test_a_large_attribute_that_is_written_to_is_refused(enable, toys, stack):
    model = stack(lambda m, x: m.block(x * m.mask[:8].clone()))
    for layer in model.layers:
        layer.mask = torch.ones(1 << 18)
    enable(model, True)
    loss = toys.step(model)
    model.layers[1].mask.zero_()
    with pytest.raises(RecomputeError, match="attribute 'mask' of its module Layer has been modified or replaced"):
        loss.backward()


def test_an_attribute_that_keeps_the_last_result_holds_no_graph(enable, toys, stack, saving):
    def forward(m, x):
        m.last = m.block(x)
        return m.last

    model = stack(forward)
    handle = enable(model, **saving)
    for _ in range(3):
        loss = toys.step(model)
        for layer in model.layers:
            layer.last = None
        assert handle.stats().held_bytes > 0
        del loss
        assert handle.stats().held_bytes == 0


@pytest.mark.parametrize("kind", ["attribute", "list"])
def test_a_loss_that_layers_keep(enable, toys, stack, mode, kind):
    """It is read after a backward pass, which has recomputed the layers."""

    def prepare(m):
        m.aux = [] if kind == "list" else None

    def forward(m, x):
        h = m.block.norm(x)
        if kind == "list":
            m.aux.append(h.exp().mean())
        else:
            m.aux = h.exp().mean()
        return m.block(h)

    def step(model):
        loss = toys.step(model)
        loss.backward(retain_graph=True)
        kept = [layer.aux if kind == "attribute" else sum(layer.aux) for layer in model.layers]
        sum(kept).backward()
        return loss.detach()

    model = stack(forward, prepare)
    expected = toys.grade(stack(forward, prepare), step)
    enable(model, **mode)
    expected.assert_equal(toys.grade(model, step))


def test_a_loss_of_a_recomputation_is_refused(enable, toys, stack):
    losses = []

    def forward(m, x):
        h = m.block.norm(x)
        losses.append(h.exp().mean())
        return m.block(h)

    model = stack(forward)
    enable(model, True)
    toys.step(model).backward(retain_graph=True)
    with pytest.raises(RecomputeError, match="made while it was recomputed"):
        sum(losses).backward()
    losses.clear()  # the graph holds the layer, whose forward holds the list


@pytest.mark.parametrize("kept", ["pre", "post"])
def test_hooks_that_are_removed_before_backward(enable, toys, stack, mode, kept):
    def step(model):
        loss = 0
        for factor in (1.5, 0.5):
            norms = [layer.block.norm for layer in model.layers]
            if kept == "pre":
                hooks = [norm.register_forward_pre_hook(lambda m, args, f=factor: (args[0] * f + f,)) for norm in norms]
            else:
                hooks = [
                    norm.register_forward_hook(lambda m, args, kwargs, out, f=factor: out * f, with_kwargs=True)
                    for norm in norms
                ]
            loss = loss + toys.step(model)
            for hook in hooks:
                hook.remove()
        return loss

    model = stack(lambda m, x: m.block(x))
    expected = toys.grade(copy.deepcopy(model), step)
    enable(model, **mode)
    expected.assert_equal(toys.grade(model, step))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_norm_as_an_argument(enable, toys, stack, mode):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = stack(lambda m, x, bn: m.block(bn(x)))
            self.layers = self.inner.layers
            self.bn = nn.Sequential(nn.BatchNorm1d(8))

        def forward(self, x):
            x = self.inner.embed(x)
            for layer in self.layers:
                x = layer(x, self.bn)
            return x.sum()

    model = Model()
    plain = copy.deepcopy(model)
    enable(model, **mode)
    for _ in range(2):
        toys.grade(plain, toys.step).assert_equal(toys.grade(model, toys.step))


def in_an_attribute(m, x, state):
    state.x = m.block(state.x)
    return x * 0.5


def in_a_list_of_an_object(m, x, state):
    state.kept.append(m.block(x))
    return x * 0.5


class Slotted:
    __slots__ = ("k",)


def in_a_slot(m, x, state):
    state.slotted.k = m.block(x)
    return x * 0.5


WRITES = {in_an_attribute: "x", in_a_list_of_an_object: "kept", in_a_slot: "k"}


def new_state(x):
    return types.SimpleNamespace(x=x, kept=[], slotted=Slotted())


@pytest.mark.parametrize("forward", WRITES, ids=lambda forward: forward.__name__)
def test_a_layer_that_changes_an_object_is_refused(enable, toys, stack, forward):
    model = stack(forward)
    enable(model, True)
    with pytest.raises(RuntimeError, match=f"changes attribute '{WRITES[forward]}' of an argument of class"):
        model(toys.batch(), state=new_state(toys.batch()))


def test_an_object_that_is_changed_before_backward_is_refused(enable, toys, stack):
    model = stack(lambda m, x, state: m.block(x * state.x))
    state = new_state(toys.batch())
    expected = toys.grade(copy.deepcopy(model), lambda model: model(toys.batch(), state=state))
    enable(model, True)
    expected.assert_equal(toys.grade(model, lambda model: model(toys.batch(), state=state)))
    loss = model(toys.batch(), state=state)
    state.x = toys.batch(seed=2)
    with pytest.raises(RecomputeError, match="attribute 'x' of an argument of class SimpleNamespace has been"):
        loss.backward()


def test_a_deque_that_layers_pass_on(enable, toys, stack, mode):
    def forward(m, x, state):
        if state:
            return m.block(x + state.pop())
        state.append(m.block(x))
        return state[0] * 0.5

    def step(model):
        x, state = model.embed(toys.batch()), collections.deque()
        for layer in model.layers:
            x = layer(x, state)
        return x.sum() + sum(tensor.square().sum() for tensor in state)

    model = stack(forward)
    expected = toys.grade(copy.deepcopy(model), step)
    handle = enable(model, **mode)
    expected.assert_equal(toys.grade(model, step))
    assert handle.stats().held_bytes == 0


def test_a_part_in_torchscript(enable, toys, stack, mode):
    def prepare(m):
        m.part = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))

    def forward(m, x):
        return m.part(m.block(x))

    model, plain = stack(forward, prepare), stack(forward, prepare)
    enable(model, **mode)
    toys.grade(plain, toys.step).assert_equal(toys.grade(model, toys.step))


@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, 8))])
def test_layers_in_torchscript(enable, toys, make):
    model = toys.stack(lambda: make(nn.Sequential(nn.Linear(8, 8), nn.Tanh())))
    with pytest.raises(ValueError, match=r"layer layers.0 is compiled by torch.jit"):
        enable(model, True)
    toys.grade(model, toys.step)


def test_a_noise_that_is_saved_before_it_is_drawn_is_refused(enable, toys, stack, saving):
    def prepare(m):
        m.noisy = nn.RReLU()

    with pytest.raises(ValueError, match=r"layers\.0 has an RReLU"):
        enable(stack(lambda m, x: m.noisy(m.block(x)), prepare), **saving)


def test_lazy_layers_are_refused_before_their_first_batch(enable, compare, toys, saving):
    model = toys.stack(lambda: nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Linear(8, 8)))
    with pytest.raises(ValueError, match="run one batch through the model"):
        enable(model, **saving)
    toys.step(model)
    compare(model, toys.step, **saving)
