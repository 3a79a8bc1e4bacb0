"""`save="all"` and regions: every saved tensor leaves and comes back, bit for bit."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlx.offload import OffloadOptions, offload_activations


def test_parameters_and_buffers_never_leave(enable, toys):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))
            self.register_buffer("table", torch.randn(4, 8))

        def forward(self, x):
            return (x @ self.weight.t()) * self.table * self.weight[:4] * self.table.view(4, 8)

    model = toys.stack(Layer)
    handle = enable(model, False)
    toys.step(model).backward()
    # x, and what is multiplied with the second parameter; the buffers' products save the buffers alone
    assert handle.stats().offloaded_bytes == 3 * 2 * (4 * 8 * 4)
    assert handle.stats().kept_bytes == 0


def test_a_tensor_saved_twice_costs_one_copy(compare, toys):
    def forward(block, x):
        y = block.lin(x)
        return y * y.sin() + y.t().contiguous().t().cos() * y + (y.t() @ y).sum()

    stats = compare(toys.of(forward), toys.step, False)
    # x, y (for sin, two products and both sides of the matrix product), sin(y), y transposed, its cosine
    assert stats.offloaded_bytes == 3 * 5 * (4 * 8 * 4)


def test_a_tensor_and_its_transpose_are_not_mixed_up(compare, toys):
    def forward(block, x):
        y = torch.tanh(block.lin(x))
        square = y.t() @ y  # (8, 8)
        return (y @ square) * (y @ square.t().tril())

    compare(toys.of(forward), toys.step, False)


def test_what_all_layers_share_is_copied_once(compare, toys):
    scale = torch.linspace(0, 1, 8).repeat(4, 1).requires_grad_()
    stats = compare(toys.stack(), lambda m: m(toys.batch(), scale=scale), False)
    alone = compare(toys.stack(), toys.step, False)
    # each block also saves the product's other factor, and that again for the scale's gradient; the scale itself once
    assert stats.offloaded_bytes == alone.offloaded_bytes + 4 * 8 * 4 + 3 * 4 * 8 * 4


class WithTables(nn.Module):
    """Layers that rotate what they compute by tables, as decoders do by rotary tables."""

    def __init__(self, toys):
        super().__init__()

        def rotate(block, x, tables):
            cos, sin = (table.unsqueeze(0) for table in tables)
            y = block.lin(x)
            return x + (y * cos + y.flip(-1) * sin)[0]

        self.inner = toys.of(rotate)
        self.register_buffer("cos", torch.linspace(0, 9, 64).cos().view(8, 8))
        self.register_buffer("sin", torch.linspace(0, 9, 64).sin().view(8, 8))

    def forward(self, x, computed):
        tables = self.cos[: len(x)], self.sin[: len(x)]
        return self.inner(x, tables=tuple(table * 1 for table in tables) if computed else tables)


@pytest.mark.parametrize("computed", [False, True], ids=["buffers", "computed"])
def test_tables_that_are_passed_to_layers_stay(compare, toys, computed):
    stats = compare(WithTables(toys), lambda model: model(toys.batch(), computed), False)
    assert stats.offloaded_bytes == 3 * (4 * 8 * 4)  # the input of each linear map
    assert stats.kept_bytes == 0


def test_an_activation_leaves_though_a_layer_gets_it_without_its_graph_as_well(compare, toys):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = toys.of(lambda block, x: block.lin(x))
            self.layers = nn.ModuleList(Gated() for _ in range(3))

        def forward(self, x):
            x = self.inner.embed(x)
            for layer in self.layers:
                x = layer(x, x.detach())
            return x.sum()

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x, gate):
            return self.lin(x) * gate.sigmoid()

    stats = compare(Pair(), toys.step, False, layers=["layers.0", "layers.1", "layers.2"])
    assert stats.offloaded_bytes == 3 * 2 * (4 * 8 * 4)  # each layer's input, and the gate


@pytest.mark.parametrize(
    "look",
    [
        lambda y: y.expand(5, *y.shape),
        lambda y: y[:, 2:6],
        lambda y: y.flatten()[5:29].view(4, 6),
        lambda y: y.as_strided((4, 4), (3, 2), 1),
        lambda y: y.unfold(1, 3, 1),
        lambda y: torch.complex(y, -y).conj(),
        lambda y: torch.complex(y, -y).conj().imag,
        lambda y: y.to_sparse(),
        lambda y: torch.where(y > 0, y, y.detach()),
        lambda y: y[torch.tensor([3, 0, 0])],
        lambda y: y.masked_select(y > 0),
        lambda y: y[:, :0],
    ],
    ids=["expand", "slice", "offset", "overlap", "unfold", "conj", "neg", "sparse", "where", "index", "mask", "empty"],
)
def test_looks_and_dtypes_come_back_exactly(compare, toys, look):
    def step(model):
        y = look(model.layers[0](toys.batch()))
        y = y.to_dense() if y.is_sparse else y
        z = y * y + y.cos()
        return (z.abs() if z.is_complex() else z).sum()

    model = toys.of(lambda block, x: block.lin(x))
    compare(model, step, False)

    def inside(block, x):
        y = look(block.lin(x))
        y = y.to_dense() if y.is_sparse else y
        z = y * y + y.cos()
        return torch.tanh((z.abs() if z.is_complex() else z).sum()) + block.lin(x)

    compare(toys.of(inside), toys.step, False)


def test_strides_seen_by_backward_are_those_of_forward(enable, toys):
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            seen.append((x.shape, x.stride(), x.dtype, x.clone()))
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            shape, stride, dtype, value = seen.pop()
            assert (x.shape, x.stride(), x.dtype) == (shape, stride, dtype)
            assert torch.equal(x, value)
            return grad

    def forward(block, x):
        y = Look.apply(block.lin(x).t())
        y = Look.apply(y[:1].expand(8, 4))
        return Look.apply(torch.cat([y, y])[3:11].t())

    model = toys.of(forward)
    enable(model, False)
    toys.step(model).backward()
    assert not seen


# ------------------------------------------------------------------------------------------------ graphs and their ends


@pytest.mark.parametrize("min_bytes", [0, 1 << 20], ids=["moved", "kept"])
def test_an_output_that_is_saved_makes_no_cycle(enable, toys, min_bytes):
    model = toys.of(lambda block, x: block.lin(x).exp())
    handle = enable(model, False, min_bytes=min_bytes)
    outputs = []
    model.layers[1].register_forward_hook(lambda module, args, output: outputs.append(weakref.ref(output)))
    gc.disable()
    try:
        loss = toys.step(model)
        del loss
        assert outputs[0]() is None
    finally:
        gc.enable()
    assert handle.stats().held_bytes == 0


def test_a_write_before_the_second_save_is_another_tensor(compare, toys):
    def forward(block, x):
        y = block.lin(x)
        z = y.detach().clone()
        one = x * z
        z = z.add_(1)  # the first product saved x only: z wants no gradient, x does, so z is saved too
        return one.detach() + x * z

    compare(toys.of(forward), toys.step, False)


def test_addresses_that_are_used_again_are_told_apart(compare, toys):
    """Tensors of equal shape and version that die and leave their address to the next one."""

    def forward(block, x):
        for _ in range(6):
            x = torch.sin(block.lin(x))
        return x

    compare(toys.of(forward), toys.step, False)


# ------------------------------------------------------------------------------------------------ regions

DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")


@pytest.mark.gpu
def test_a_layer_whose_arguments_are_not_looked_into_leaves_its_device(enable):
    class Layer(nn.Linear):
        def forward(self, box):
            return super().forward(box.tensor).tanh()

    layers = nn.ModuleList([Layer(64, 64, device="cuda") for _ in range(3)])
    handle = enable(layers, False, layers=list(layers))
    y = torch.ones(8, 64, device="cuda")
    for layer in layers:
        y = layer(SimpleNamespace(tensor=y))
    assert handle.stats().offloaded_bytes > 0
    y.sum().backward()


def test_a_region_moves_what_is_saved_in_it(toys):
    model = toys.stack().to(DEVICE)
    x = toys.batch().to(DEVICE)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    with offload_activations(OffloadOptions(min_bytes=0)) as handle:
        loss = model(x)
    assert handle.stats().held_bytes > 0
    for grad, wanted in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        assert torch.equal(grad, wanted)
    assert handle.stats().held_bytes == 0
    assert handle.stats().offloaded_bytes > 0


def test_a_region_ends_with_an_exception(toys):
    with pytest.raises(KeyError), offload_activations(OffloadOptions(min_bytes=0)) as handle:
        loss = toys.stack().to(DEVICE)(toys.batch().to(DEVICE))
        raise KeyError("in the region")
    del loss
    assert handle.stats().held_bytes == 0


def test_a_region_recomputes_nothing():
    with pytest.raises(ValueError, match="enable_ckpt"), offload_activations(OffloadOptions(save="boundary")):
        pass


def test_a_region_fetches_stretch_by_stretch(toys, monkeypatch):
    monkeypatch.setattr("rlx.offload.save_all.BYTES_PER_CALL", 300)
    model = toys.stack(blocks=6).to(DEVICE)
    x = toys.batch().to(DEVICE)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    with offload_activations(OffloadOptions(min_bytes=0, prefetch_layers=2)):
        grads = torch.autograd.grad(model(x), list(model.parameters()))
    assert all(map(torch.equal, grads, expected))
