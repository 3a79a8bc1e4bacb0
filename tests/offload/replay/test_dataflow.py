"""What nobody reads is not computed again: found out, proved, and given up where a layer does anything else."""

import contextlib
import copy
import logging
from collections import Counter

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlx.offload.autotune.pass_profile import shortened
from rlx.offload.plan.costs import Operation
from rlx.offload.replay.dataflow import Dataflow, OpNode
from rlx.offload.replay.dead_ops import DeadOpCheck, fingerprints

WIDTH = 512  # of which a mean is small


def steps(*rows):
    return tuple(OpNode(*row) for row in rows)


# A norm of parts: squares, their mean with epsilon, the root of one over it (which autograd saves), the product.
NORM = Dataflow(
    steps((-1, (), True), (-2, (0,), True), (-3, (1,), True), (-4, (2,), False), (-5, (3,), True)), (3, 4), (), ()
)


def test_what_makes_an_answer_is_not_read():
    assert NORM.dead_ops({-3}) == {-1, -2}
    assert NORM.dead_ops({-2}) == {-1}
    assert NORM.dead_ops(()) == frozenset()
    assert NORM._replace(needed=(3,)).dead_ops({-3}) == {-1, -2}, "what comes last is not run again anyway"


def test_what_is_read_elsewhere_runs():
    assert NORM._replace(needed=(0, 3, 4)).dead_ops({-3}) == {-2}


def test_what_cannot_be_left_out_reads_its_arguments():
    flow = Dataflow(steps((0, (), True), (-1, (0,), False), (-2, (0,), True), (-3, (), False)), (3,), (), ())
    assert flow.dead_ops(()) == {-2}


def operation(name, seconds, nbytes):
    return Operation(name, 0.5, seconds, nbytes)


def test_a_call_gives_way_to_what_is_made_of_it():
    """Queries are turned, which takes two products, and their mean of squares costs next to nothing to keep."""
    flow = Dataflow(
        steps(
            (-1, (), True),
            (-2, (0,), True),
            (-3, (1,), False),
            (0, (), True),
            (-4, (3,), True),
            (-5, (3, 4), True),
            (1, (5,), True),
        ),
        (2, 5),
        (),
        (),
    )
    calls = {0: operation("queries", 3.0, 1000), 1: operation("output", 4.0, 1000)}
    others = {
        -1: operation("pow", 1.0, 2000),
        -2: operation("mean", 0.5, 2),
        -4: operation("neg", 0.25, 1000),
        -5: operation("add", 0.125, 1000),
    }
    found, small, saved_s = shortened(flow, calls, others)
    assert small == (-2,)
    assert saved_s == 1.5  # of the mean and the squares
    found = {place: (one.name, one.seconds) for place, one in found.items()}
    assert found == {-5: ("queries", 3.375), 1: ("output", 4.0)}
    larger = {**others, -5: operation("add", 0.125, 1001)}
    assert list(shortened(flow, calls, larger)[0]) == [0, 1]


def test_the_check_is_that_fingerprints_are_the_same():
    bits = fingerprints([torch.tensor([1.0, 2.0]), torch.tensor([True, False]), torch.tensor([1 + 2j])])
    changed = fingerprints([torch.tensor([1.0, 2.0]), torch.tensor([True, True]), torch.tensor([1 + 2j])])
    for other, is_right in ((bits, True), (changed, False), (bits[:2], False)):
        check = DeadOpCheck()
        assert check.begin() and not check.begin() and not check.has_passed
        check.compare(bits, other)
        assert check.has_passed is is_right
    assert fingerprints([torch.tensor([torch.nan])])[0] != fingerprints([torch.tensor([0.0])])[0]


class NormOfParts(nn.Module):
    """A linear map, a norm as transformers writes it, another map."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def squares(self, h):
        return h.pow(2)

    def forward(self, x):
        h = self.first(x).double()
        h = h * torch.rsqrt(self.squares(h).mean(-1, keepdim=True) + 1e-6)
        return x + self.second(h.to(x.dtype)).tanh()


class Ran(TorchDispatchMode):
    """Counts operators."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def read(model):
    return model(torch.linspace(-1, 1, 4 * WIDTH).sin().view(2, 2, WIDTH))


def counted(model):
    """What backward runs."""
    loss = read(model)
    with Ran() as ran:
        loss.backward()
    model.zero_grad()
    return ran.counts


@pytest.fixture
def auto(enable):
    return lambda model, budget=0: enable(model, True, save="auto", max_device_bytes=budget)


def bucket(handle):
    (found,) = handle.runner.decide.__self__._buckets.values()
    return found


def follow(toys, model, handle, steps=6, read=read):
    reference = copy.deepcopy(model)
    for _ in range(steps):
        toys.grade(reference, read).assert_equal(toys.grade(model, read))
        assert handle.stats().held_bytes == 0


def test_squares_are_computed_once_where_their_mean_is_kept(toys, auto):
    model = toys.stack(NormOfParts, blocks=4, width=WIDTH)
    plain = counted(copy.deepcopy(model))["pow"]
    handle = auto(model)
    assert counted(model)["pow"] == plain + 4
    follow(toys, model, handle)
    assert sum(not orders.keep for orders in bucket(handle).instructions.values()) >= 3
    assert counted(model)["pow"] == plain


def test_rotated_queries_are_kept_in_place_of_queries(toys, auto):
    """On transformers' own layers: neither the maps of queries and keys nor their rotation run again."""
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()

    def read(model):
        ids = torch.randint(1, 64, (2, 64), generator=torch.Generator().manual_seed(3))
        return model(input_ids=ids, labels=ids).loss

    handle = auto(model, 1 << 40)
    handle.limit_device_bytes(1_200_000)
    follow(toys, model, handle, read=read)
    orders = [one for one in bucket(handle).instructions.values() if not one.keep]
    assert orders and all(one.check.has_passed for one in orders)
    assert any(
        {0, 1} <= one.dead_ops and "cat" in {one.other_names[-1 - p] for p in one.dead_ops if p < 0} for one in orders
    )


class TwoWays(NormOfParts):
    """Reads now one product, now the other: the same functions in the same order."""

    is_first = True

    def squares(self, h):
        one, other = h.pow(2), h.pow(2)
        return one + (one if self.is_first else other)


def test_a_layer_that_reads_something_else_than_before_runs_whole(toys, auto):
    model = toys.stack(TwoWays, blocks=4, width=WIDTH)
    handle = auto(model)
    follow(toys, model, handle)
    assert all(one.check.has_passed for one in bucket(handle).instructions.values() if not one.keep)
    for layer in model.layers:
        layer.is_first = False
    follow(toys, model, handle)


class Hidden(NormOfParts):
    """Reads the squares by a way that no function mode sees."""

    def squares(self, h):
        squares = h.pow(2)
        with torch._C.DisableTorchFunction():
            self.largest = squares.detach().amax()
        return squares

    def forward(self, x):
        return super().forward(x) * self.largest.to(x.dtype)


def test_what_is_read_unseen_is_proved_to_be_read(toys, auto, caplog):
    caplog.set_level(logging.INFO, "rlx.offload")
    model = toys.stack(Hidden, blocks=4, width=WIDTH)
    handle = auto(model)
    follow(toys, model, handle)
    orders = [one for one in bucket(handle).instructions.values() if not one.keep]
    assert all(one.dead_ops and not one.check.has_passed for one in orders)
    assert "in a way that profiling did not see" in caplog.text


class Wary(NormOfParts):
    """Does not stand NaN."""

    def squares(self, h):
        squares = h.pow(2)
        with torch._C.DisableTorchFunction():
            if squares.isnan().any():
                raise ValueError("NaN")
        return squares


def test_a_layer_that_refuses_poison_runs_whole(toys, auto):
    model = toys.stack(Wary, blocks=4, width=WIDTH)
    handle = auto(model)
    follow(toys, model, handle)
    assert not any(one.check.has_passed for one in bucket(handle).instructions.values() if not one.keep)


class Unseen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        with torch._C.DisableTorchFunction():
            return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class WithFunction(NormOfParts):
    def squares(self, h):
        return Unseen.apply(h.pow(2))


def test_behind_an_autograd_function_nothing_is_known(toys, auto):
    model = toys.stack(WithFunction, blocks=4, width=WIDTH)
    handle = auto(model)
    follow(toys, model, handle)
    assert not any(one.dead_ops for one in bucket(handle).instructions.values())


class Written(NormOfParts):
    """Writes to the squares, to their mean, or to a view of either."""

    how = ""

    def forward(self, x):
        h = self.first(x).double()
        squares = self.squares(h)
        if self.how == "squares":
            squares.add_(1.0)
        mean = squares.mean(-1, keepdim=True)
        if self.how == "mean":
            mean[..., 0].mul_(0.5)
        h = h * torch.rsqrt(mean + 1e-6)
        if self.how == "late":
            mean.zero_()
        return x + self.second(h.to(x.dtype)).tanh()


@pytest.mark.parametrize("first", ["", "squares", "mean", "late"])
@pytest.mark.parametrize("then", ["", "squares", "mean", "late"])
def test_writes(toys, auto, first, then):
    model = toys.stack(Written, blocks=4, width=WIDTH)
    handle = auto(model)
    for how in (first, then):
        for layer in model.layers:
            layer.how = how
        follow(toys, model, handle)


@pytest.mark.parametrize("budget", [0, 60_000])
def test_graphs_that_are_kept_and_several_at_once(toys, auto, budget):
    def read_twice(model):
        loss = read(model)
        loss.backward(retain_graph=True)
        other = read(model)
        loss.backward()
        return other

    model = toys.stack(NormOfParts, blocks=4, width=WIDTH)
    follow(toys, model, auto(model, budget), read=read_twice)


def test_under_autocast(toys, auto):
    def read_in_bf16(model):
        with torch.autocast("cpu", torch.bfloat16):
            return read(model)

    model = toys.stack(NormOfParts, blocks=4, width=WIDTH)
    handle = auto(model)
    follow(toys, model, handle, read=lambda model: read_in_bf16(model).float())
    assert all(one.check.has_passed for one in bucket(handle).instructions.values() if not one.keep)


def test_a_parameter_that_is_replaced_is_refused_as_ever(toys, auto):
    model = toys.stack(NormOfParts, blocks=4, width=WIDTH)
    handle = auto(model)
    follow(toys, model, handle)
    loss = read(model)
    with torch.no_grad():
        model.layers[0].second.weight.mul_(2.0)
    with pytest.raises(RuntimeError), contextlib.nullcontext():
        loss.backward()
