"""Gradients with streamed weights equal those with resident ones bit for bit, however activations are saved."""

import copy
import gc
import os
import resource

import pytest
import torch
from torch import nn

from rlx.offload import OffloadOptions, enable_activation_offloading, enable_layer_offloading
from rlx.offload.storage.disk import DiskError

SAVES = (None, "boundary", "attention", "auto", "all")
KINDS = ("attention", "all")  # a layer is recomputed, or fetched again for what autograd saved


def poison(handle):
    """Let whoever computes with a weight that is not on the device get NaN."""
    for weights in handle._weights:
        weights._on_host = [torch.full_like(host, torch.nan) for host in weights._on_host]
        for parameter, host in zip(weights.parameters, weights._on_host, strict=True):
            parameter.data = host


@pytest.fixture
def stream(request):
    """`stream(model, save, poisoned, **options)`: weights stream and activations are saved in a way; returns the first handle."""

    def run(model, save=None, poisoned=True, tier="cpu", directory=None, weights_in=None, **options):
        handle = enable_layer_offloading(model, directory=weights_in, **options)
        request.addfinalizer(handle.disable)
        if poisoned:
            poison(handle)
        if save is not None:
            saving = OffloadOptions(save=save, min_bytes=0, tier=tier, directory=directory)
            request.addfinalizer(enable_activation_offloading(model, save != "all", saving).disable)
        return handle

    return run


@pytest.fixture
def decoder(toys):
    """A decoder with adapters, and the same one for plain autograd."""
    model = toys.adapt(toys.decoder(blocks=5, dropout=0.1))
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("save", SAVES)
def test_gradients_are_equal(decoder, toys, stream, save):
    model, plain = decoder
    handle = stream(model, save)
    for _ in range(3):  # `auto` measures first
        toys.grade(plain, toys.read).assert_equal(toys.grade(model, toys.read))
    layer = sum(p.nbytes for p in plain.layers[0].parameters() if not p.requires_grad and p.dim() > 1)
    assert handle.streamed_bytes >= 5 * layer
    # One fetch of a layer in forward, one for its recomputation and backward. Both ends are still there when it turns round.
    assert handle.stats().copied_bytes <= 3 * 2 * handle.streamed_bytes


def test_weights_on_the_disk_are_read_and_written_where_they_wait(decoder, toys, stream, tmp_path):
    model, plain = decoder
    handle = stream(model, "boundary", poisoned=False, weights_in=tmp_path)
    toys.grade(plain, toys.read).assert_equal(toys.grade(model, toys.read))
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    other = {name: torch.rand_like(value) / 9 for name, value in plain.state_dict().items()}
    model.load_state_dict(other)  # the last layers are fetched
    plain.load_state_dict(other)
    toys.grade(plain, toys.read).assert_equal(toys.grade(model, toys.read))
    handle.disable()
    toys.grade(plain, toys.read).assert_equal(toys.grade(model, toys.read))


def test_a_disk_that_is_no_folder_is_full_or_fails(decoder, toys, stream, tmp_path):
    model, _ = decoder
    with pytest.raises(DiskError, match=r"cannot use the directory .*nowhere"):
        enable_layer_offloading(model, directory=tmp_path / "nowhere")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # of any file
    big = toys.adapt(toys.decoder(blocks=2, width=512))
    try:
        with pytest.raises(DiskError, match=r"needs \d+ more .*another directory"):
            enable_layer_offloading(big, directory=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    handle = stream(model, "boundary", poisoned=False, weights_in=tmp_path)
    file = handle._file._file
    whole = os.fstat(file.descriptor).st_size
    os.ftruncate(file.descriptor, 0)
    with pytest.raises(DiskError, match=r"failed to read .* bytes at byte 0"):
        toys.read(model)
    os.ftruncate(file.descriptor, whole)


@pytest.mark.parametrize("save", KINDS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_several_graphs_alive(decoder, toys, stream, save, order):
    def step(model):
        losses = [model(toys.tokens(length=length, seed=length)) for length in (3, 7)]
        with torch.no_grad():
            model(toys.tokens())
        for index in order:
            losses[index].backward(retain_graph=True)
        losses[0].backward()
        return losses[0].detach()

    model, plain = decoder
    stream(model, save)
    toys.grade(plain, step).assert_equal(toys.grade(model, step))


@pytest.mark.parametrize("save", KINDS)
def test_weights_that_autograd_saves_themselves(toys, stream, save):
    """`bmm` saves the parameter, not a view of it; the path of `scale` does not lead to the layer's input."""

    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.Parameter(torch.randn(2, 8, 8) / 3, requires_grad=False)
            self.scale = nn.Parameter(torch.ones(2, 1, 8))

        def forward(self, x):
            y = torch.bmm(x.expand(2, *x.shape), self.experts)
            return x + y.sum(0).tanh() * torch.bmm(self.scale, self.experts).mean()

    model = toys.stack(Expert, 4)
    model.embed.requires_grad_(False)
    plain = copy.deepcopy(model)
    stream(model, save)
    for _ in range(3):
        toys.grade(plain, toys.step).assert_equal(toys.grade(model, toys.step))


@pytest.mark.parametrize("save", KINDS)
def test_exception_then_a_right_step(decoder, toys, stream, save):
    model, plain = decoder
    stream(model, save)
    expected = toys.grade(plain, toys.read)

    def fail(module, args):
        raise KeyError("layer 3")

    hook = model.layers[3].mlp.register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="layer 3"):
        toys.read(model)
    hook.remove()
    expected.assert_equal(toys.grade(model, toys.read))
    loss = toys.read(model)
    hook = model.layers[1].mlp.up.a.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    hook.remove()
    del loss
    expected.assert_equal(toys.grade(model, toys.read))


def test_forward_without_a_graph(decoder, toys, stream):
    model, plain = decoder
    handle = stream(model)
    for module in (model, plain):
        module.eval()
    with torch.no_grad():
        expected = toys.read(plain)
        assert torch.equal(toys.read(model), expected)
    with torch.inference_mode():
        assert torch.equal(toys.read(model), expected)
    toys.grade(plain, toys.read).assert_equal(toys.grade(model, toys.read))
    model.train()
    plain.train()
    toys.grade(plain, toys.read).assert_equal(toys.grade(model, toys.read))
    # Without a graph every layer is fetched once. The first is fetched ahead for the next pass.
    handle.release()
    before = handle.stats().copied_bytes
    with torch.no_grad():
        toys.read(model)
        toys.read(model)
    assert handle.stats().copied_bytes - before == 2 * handle.streamed_bytes + handle.streamed_bytes // 5


def test_at_most_two_layers_are_on_the_device(decoder, toys, stream):
    model, _ = decoder
    handle = stream(model, "boundary")
    most = []

    def look(module, args):
        most.append(sum(weights.is_fetched for weights in handle._weights))

    for layer in model.layers:
        layer.mlp.register_forward_pre_hook(look)
    toys.read(model).backward()
    assert len(most) == 10
    assert max(most) == 2


def test_shared_weights_stay(toys, stream):
    model = toys.adapt(toys.decoder(blocks=4))
    model.layers[2].q.base.weight = model.layers[0].q.base.weight
    model.layers[1].o.base.weight = model.embed.weight
    plain = copy.deepcopy(model)
    handle = stream(model, "boundary")
    assert not handle.parameters & {model.embed.weight, model.layers[0].q.base.weight}
    assert model.layers[2].o.base.weight in handle.parameters
    toys.grade(plain, toys.read).assert_equal(toys.grade(model, toys.read))


@pytest.mark.parametrize("resident", [1, 4])
def test_resident_layers(decoder, toys, stream, resident):
    model, plain = decoder
    handle = stream(model, "boundary", resident_layers=resident)
    assert len(handle.streamed_layers) == 5 - resident
    assert "layers.0" not in handle.streamed_layers
    toys.grade(plain, toys.read).assert_equal(toys.grade(model, toys.read))


def test_state_dict_at_any_time(decoder, toys, stream):
    model, plain = decoder
    expected = plain.state_dict()
    handle = stream(model, "boundary", poisoned=False)

    def check(found):
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name

    check(model.state_dict())
    loss = toys.read(model)
    check(model.state_dict())
    loss.backward()
    kept = model.state_dict()
    handle.release()
    handle.disable()
    check(model.state_dict())
    del model, handle, loss
    gc.collect()
    check(kept)  # nobody else gets memory that a tensor still uses


@pytest.mark.parametrize("save", KINDS)
def test_a_write_between_forward_and_backward_is_an_error(decoder, toys, stream, save):
    model, plain = decoder
    stream(model, save, poisoned=False)
    for index in (0, 2, 4):
        for each in (plain, model):
            loss = toys.read(each)
            with torch.no_grad():
                each.layers[index].o.base.weight.mul_(1.5)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            del loss
    toys.grade(plain, toys.read).assert_equal(toys.grade(model, toys.read))  # the writes count


@pytest.mark.parametrize("change", ["cast", "unfreeze", "replace"])
def test_a_moved_weight_is_refused(decoder, toys, change):
    model, _ = decoder
    handle = enable_layer_offloading(model)
    base = model.layers[2].q.base
    if change == "cast":
        model.double()
    elif change == "unfreeze":
        base.requires_grad_(True)
    else:
        base.weight.data = base.weight.clone()
    tokens = toys.tokens().to(model.embed.weight.dtype)
    with pytest.raises(RuntimeError, match=r"layer offloading: the frozen weight .* was moved, cast or unfrozen"):
        model(tokens)
    assert handle.is_enabled


def test_disable_restores_the_model(decoder, toys, stream):
    model, plain = decoder
    handle = stream(model, poisoned=False)
    loss = toys.read(model)
    handle.disable()
    handle.disable()
    loss.backward()  # the graph stays valid
    assert all("forward" not in vars(layer) for layer in model.layers)
    copy.deepcopy(model)
    toys.grade(plain, toys.read).assert_equal(toys.grade(model, toys.read))
    assert handle.stats().held_bytes == 0


def test_refused(decoder, toys, stream):
    model, plain = decoder
    with pytest.raises(ValueError, match="resident_layers: got 5, expected 0 to 4"):
        enable_layer_offloading(model, resident_layers=5)
    with pytest.raises(ValueError, match=r"got 3 layers of Stack without a frozen weight"):
        enable_layer_offloading(toys.decoder())
    stream(model)
    with pytest.raises(ValueError, match="has layer or activation offloading enabled already"):
        enable_layer_offloading(model)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(model)
    enable_activation_offloading(plain, True)
    with pytest.raises(ValueError, match="enable layer offloading first"):
        enable_layer_offloading(plain)
