"""Each mode: graphs that are dropped, exceptions, other threads, and the end of offloading."""

import copy
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rlx.offload.recompute.saved_slots import SavedSlots


class Interrupt(Exception):
    """Raised by a test in the middle of a step."""


def raises(*_):
    raise Interrupt


def test_a_branch_without_backward(enable, toys, every_mode):
    """Two towers on one input, of which one has no part in the loss."""
    model = toys.decoder()
    expected = toys.grade(copy.deepcopy(model), lambda m: m.layers[0](m.embed(toys.tokens())).sum())
    handle = enable(model, **every_mode)

    def step(model):
        x = model.embed(toys.tokens())
        used, unused = model.layers[0](x), model.layers[1](x)
        loss = used.sum()
        loss.backward()
        assert handle.stats().held_bytes > 0
        del unused
        return loss.detach()

    expected.assert_equal(toys.grade(model, step))
    assert handle.stats().held_bytes == 0


def test_a_dropped_graph_frees_everything_at_once(enable, toys, every_mode):
    model = toys.decoder()
    handle = enable(model, **every_mode)
    outputs = []
    hook = model.layers[1].register_forward_hook(lambda module, args, output: outputs.append(weakref.ref(output)))
    gc.disable()
    try:
        loss = toys.read(model)
        assert handle.stats().held_bytes > 0
        del loss
        assert handle.stats().held_bytes == 0
        assert outputs[0]() is None
    finally:
        gc.enable()
        hook.remove()


def test_a_graph_dropped_in_the_middle_of_backward(enable, toys, every_mode):
    model = toys.decoder()
    expected = toys.grade(copy.deepcopy(model), toys.read)
    handle = enable(model, **every_mode)
    loss = toys.read(model)
    torch.autograd.grad(loss, model.layers[1].k.weight, retain_graph=True)
    del loss
    assert handle.stats().held_bytes == 0
    expected.assert_equal(toys.grade(model, toys.read))


@pytest.mark.parametrize("place", ["norm", "v", "mlp.down", "backward of norm", "backward of o"])
def test_an_exception_in_forward_or_backward(enable, toys, every_mode, place):
    model, in_backward = toys.decoder(dropout=0.1), place.startswith("backward of ")
    expected = toys.grade(copy.deepcopy(model), toys.read)
    handle = enable(model, **every_mode)
    layer = model.layers[1].get_submodule(place.removeprefix("backward of "))
    hook = (layer.register_full_backward_hook if in_backward else layer.register_forward_pre_hook)(raises)
    with pytest.raises(Interrupt):
        toys.read(model).backward()
    hook.remove()
    if in_backward:
        gc.collect()
    assert handle.stats().held_bytes == 0
    expected.assert_equal(toys.grade(model, toys.read))


@pytest.mark.parametrize("save", ["boundary", "attention"])
@pytest.mark.parametrize("place", ["norm", "q", "o", "mlp.up"])
def test_an_exception_while_a_layer_is_recomputed(enable, toys, save, place):
    """The graph outlives it: backward may be tried again, and is right."""
    model = toys.decoder(dropout=0.1, attention_dropout=0.1)
    expected = toys.grade(copy.deepcopy(model), toys.read)
    enable(model, True, save=save)
    torch.manual_seed(7)
    loss = toys.read(model)
    drawn = torch.rand(1)
    hook = model.layers[1].get_submodule(place).register_forward_pre_hook(raises)
    try:
        loss.backward(retain_graph=True)
    except Interrupt:
        pass
    else:
        assert save == "attention"  # which does not come to each of these places again
        assert place in ("q", "o")
    hook.remove()
    assert torch.equal(drawn, expected.drawn)
    model.zero_grad()
    loss.backward()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, expected.grads[name]), name


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_happens_without_grad_mode(enable, toys, every_mode, context):
    model = toys.decoder()
    handle = enable(model, **every_mode)
    expected = toys.read(model)
    before = handle.stats()
    with context():
        assert torch.equal(toys.read(model), expected)
    done = handle.stats().since(before)
    assert done.offloaded_bytes == done.kept_bytes == done.copied_bytes == 0


def test_a_forward_without_gradient_between_forward_and_backward(compare, toys, mode):
    def step(model):
        loss = toys.read(model)
        with torch.no_grad():
            toys.read(model)
        model.eval()
        with torch.inference_mode():
            toys.read(model)
        model.train()
        return loss

    compare(toys.decoder(dropout=0.1), step, **mode)


def test_disable_on_a_live_graph(enable, toys, every_mode):
    model = toys.decoder(dropout=0.1, attention_dropout=0.1)
    expected = toys.grade(copy.deepcopy(model), toys.read)
    handle = enable(model, **every_mode)
    torch.manual_seed(7)
    loss = toys.read(model)
    handle.disable()
    assert handle.stats().held_bytes > 0
    loss.backward()
    assert handle.stats().held_bytes == 0
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, expected.grads[name]), name
    expected.assert_equal(toys.grade(model, toys.read))


def test_a_deepcopy_runs_on_its_own_weights(enable, toys, every_mode):
    model = toys.decoder()
    handle = enable(model, **every_mode)
    loss = toys.read(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(0.5)
    moved = handle.stats().offloaded_bytes
    toys.read(twin).backward()
    assert handle.stats().offloaded_bytes == moved
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in twin.parameters())
    loss.backward()


def test_two_models_in_two_threads(enable, toys, every_mode):
    models = [toys.decoder(blocks=3), toys.decoder(blocks=4)]
    expected = [toys.grade(copy.deepcopy(model), toys.read) for model in models]
    for model in models:
        enable(model, **every_mode)
    jobs = zip(models, expected, strict=True)
    work_in_threads([(lambda model=model: toys.read(model), model, graded) for model, graded in jobs])


@pytest.mark.parametrize("graphs", ["own", "shared"])
def test_one_model_in_three_threads(enable, toys, mode, graphs):
    model = toys.decoder()
    expected = toys.grade(copy.deepcopy(model), toys.read)
    enable(model, **mode)
    loss = toys.read(model)
    make = (lambda: toys.read(model)) if graphs == "own" else lambda: loss
    work_in_threads([(make, model, expected)] * 3)


def work_in_threads(jobs):
    failures = []

    def work(make, model, expected):
        try:
            for _ in range(5):
                grads = torch.autograd.grad(make(), list(model.parameters()), retain_graph=True)
                for name, grad in zip(expected.grads, grads, strict=True):
                    assert torch.equal(grad, expected.grads[name]), name
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


class Masks(torch.nn.Module):
    """The gradient of its weight tells which elements the mask of backward kept."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4096))
        self.kept = []
        self.first = lambda: None

    def forward(self, x):
        self.first()
        dropped = torch.nn.functional.dropout(torch.ones_like(x) * self.weight, 0.5)
        self.kept.append(2.0 * (dropped != 0).sum(0))
        return x + dropped


@pytest.mark.parametrize("save", ["boundary", "attention"])
@pytest.mark.parametrize("when", ["forward", "recomputation"])
def test_dropout_in_a_layer_and_within_it_in_another_thread_is_refused(enable, save, when):
    layers = torch.nn.ModuleList([Masks(), Masks()])
    enable(layers, True, layers=["0", "1"], save=save)
    x, refused = torch.randn(8, 4096, requires_grad=True), []

    def run_within():
        with pytest.raises(RuntimeError, match="while another thread runs one"):
            layers[1](x)
        refused.append(True)

    def wait_for_other_thread():
        thread = threading.Thread(target=run_within)
        thread.start()
        thread.join()

    output = layers[0](x) if when == "recomputation" else None
    layers[0].first = wait_for_other_thread
    with pytest.raises(RuntimeError, match="while another thread runs one"):
        layers[0](x) if output is None else output.sum().backward()
    assert refused


def test_an_interruption_at_a_layers_end(enable, monkeypatch, toys):
    """Ctrl-C may come anywhere. Other threads, such as that of a device's backward, may draw random numbers after it."""
    model = toys.decoder(dropout=0.1)
    expected = toys.grade(copy.deepcopy(model), toys.read)
    enable(model, True, save="boundary")
    release = SavedSlots.release_forward
    with monkeypatch.context() as patch:
        patch.setattr(SavedSlots, "release_forward", lambda slots: (patch.undo(), release(slots), raises()))
        with pytest.raises(Interrupt):
            toys.read(model)
    with ThreadPoolExecutor(1) as pool:
        expected.assert_equal(pool.submit(toys.grade, model, toys.read).result())
