"""Parts computed in tiles: gradients to rounding, no run of the MLP in a layer's recomputation, memory of one tile."""

import copy
import functools
import logging
import pickle
import weakref

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlx.offload import OffloadOptions, enable_activation_offloading, enable_tiling

SMALL = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CONFIGS = {
    "qwen2": transformers.Qwen2Config,
    "qwen3": functools.partial(transformers.Qwen3Config, head_dim=16),
    "llama": functools.partial(transformers.LlamaConfig, attention_bias=True, mlp_bias=True),
    "gemma3": functools.partial(transformers.Gemma3TextConfig, head_dim=16, sliding_window=8),
    "mistral": transformers.MistralConfig,
    "gpt2": functools.partial(transformers.GPT2Config, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    "qwen3_moe": functools.partial(transformers.Qwen3MoeConfig, **EXPERTS, head_dim=16),
}
SAVES = (None, "boundary", "attention", "auto", "all")
# GPT-2's norms are fused kernels; Gemma norms its queries behind a transpose, where they stay as they are.
NORMS = {"qwen2": 5, "qwen3": 9, "llama": 5, "gemma3": 13, "mistral": 5, "gpt2": 0, "qwen3_moe": 9}


def build(name, **changes):
    torch.manual_seed(0)
    config = CONFIGS[name](**{**SMALL, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    return model if name == "qwen3_moe" else model.double()  # torch has no fp64 for grouped experts


def step(model, rows=2, tokens=12):
    ids = torch.randint(1, 64, (rows, tokens), generator=torch.Generator().manual_seed(3))
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def graded(model, run=step):
    model.zero_grad(set_to_none=True)
    loss = run(model)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found, expected, tolerance):
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        error = (found[1][name] - gradient).abs().max()
        assert error <= tolerance * gradient.abs().max(), f"{name}: {error}"


def offloading(model, save):
    return enable_activation_offloading(model, save != "all", OffloadOptions(save=save, min_bytes=0))


class Gated(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner), nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, width))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Layer(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm, self.mlp = Norm(width), Gated(width, inner)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """Layers without attention."""

    def __init__(self, width, inner, layers):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, inner) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make(width=8, inner=32, layers=2):
    torch.manual_seed(0)
    return Model(width, inner, layers).double()


def rows(*shape, requires_grad=False):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x.requires_grad_(requires_grad)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_without_tiles_to_rounding(name):
    model = build(name)
    expected = graded(model)
    tiling = enable_tiling(model, 5)
    assert len(tiling.mlps) == (0 if name == "qwen3_moe" else 2)
    assert len(tiling.norms) == NORMS[name]
    # Gemma and the experts compute in fp32 in between.
    tolerance = {"gemma3": 1e-6, "qwen3_moe": 1e-6}.get(name, 1e-12)
    for save in SAVES if name == "qwen2" else (None, "attention"):
        handle = offloading(model, save) if save else None
        for _ in range(4 if save == "auto" else 1):  # the third pass is the first that follows a plan
            assert_close(graded(model), expected, tolerance)
        if handle is not None:
            assert handle.stats().held_bytes == 0
            handle.disable()
    tiling.disable()
    assert_close(graded(model), expected, 0.0)


def test_sums_over_tiles_lose_nothing_in_bf16():
    def errors(tiles):
        model, exact = make(32, 64, 1).bfloat16(), make(32, 64, 1)
        exact.load_state_dict(model.state_dict())
        tiling = enable_tiling(model, tiles)
        x = rows(1, 2048, 32)
        for each in (model, exact):
            each(x.to(each.layers[0].mlp.up.weight.dtype)).square().sum().backward()
        tiling.disable()
        pairs = zip(model.parameters(), exact.parameters(), strict=True)
        return torch.stack([(p.grad - q.grad).norm() / q.grad.norm() for p, q in pairs])

    assert (errors(16) <= 1.5 * errors(None)).all()


class Live(TorchDispatchMode):
    """Counts the bytes of storages that operations make, as long as they live, and calls by name."""

    def __init__(self, model):
        super().__init__()
        self.now = self.peak = self.activations = 0
        self.seen = weakref.WeakSet(tensor.untyped_storage() for p in model.parameters() for tensor in (p, p.grad))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.activations += function is torch.ops.aten.silu.default
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage not in self.seen:
                self.seen.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.free, storage.nbytes())
        return made

    def free(self, nbytes):
        self.now -= nbytes


@pytest.mark.parametrize("save", [None, "boundary", "attention", "checkpointing"])
def test_the_working_set_is_that_of_one_tile_and_recomputed_layers_run_no_mlp(save):
    tokens, tile = 384, 32

    def measure(inner, tiles):
        model = build("qwen2", intermediate_size=inner, num_hidden_layers=2).float()
        if tiles is not None:
            enable_tiling(model, tiles)
        if save == "checkpointing":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        handle = offloading(model, save) if save in ("boundary", "attention") else None
        step(model, 1, tokens).backward()  # gradients and the arena are there
        with Live(model) as live:
            step(model, 1, tokens).backward()
        return live, handle.stats().offloaded_bytes if handle is not None else 0

    (narrow, _), (wide, left) = measure(64, tile), measure(512, tile)
    whole, left_whole = measure(512, None)
    in_backward = 1  # for each tile, with or without recomputation of the layer
    assert wide.activations == 2 * tokens // tile * (1 + in_backward)
    assert left == left_whole
    growth = (512 - 64) * 4
    weights = 3 * 32 * growth
    # A tile's intermediate results, sums of the weights' gradients and one tile's; before, those of all tokens.
    assert wide.peak - narrow.peak <= 8 * tile * growth + 3 * weights
    assert whole.peak - wide.peak > 2 * tokens * growth


def test_what_follows_the_mlp_takes_its_kept_result():
    model = build("gemma3", hidden_size=1024, intermediate_size=2048, num_hidden_layers=1).bfloat16()
    enable_tiling(model, 8)
    expected = graded(model)
    calls = []
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: calls.append(1))
    for save, forwards in (("boundary", 3), ("attention", 2)):
        handle = offloading(model, save)
        assert_close(graded(model), expected, 0.0)
        assert len(calls) == forwards * 3  # three tiles; a norm behind the MLP makes boundary run it again
        calls.clear()
        handle.disable()


def test_autocast_and_half_precision():
    def under_autocast(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return step(model)

    for name in ("qwen2", "gemma3", "gpt2"):
        for model, run in ((build(name).float(), under_autocast), (build(name).bfloat16(), step)):
            expected = graded(model, run)
            tiling = enable_tiling(model, 7)
            for save in (None, "attention"):
                handle = offloading(model, save) if save else None
                assert_close(graded(model, run), expected, 0.03)
                if handle is not None:
                    handle.disable()
            tiling.disable()


def test_what_wants_no_gradient_gets_none():
    model = make()
    model.layers[0].requires_grad_(False)
    model.layers[1].mlp.up.requires_grad_(False)
    run = lambda m: m(rows(4, 9, 8)).square().sum()  # noqa: E731
    expected = graded(model, run)
    enable_tiling(model, 4)
    assert_close(graded(model, run), expected, 1e-12)
    with torch.no_grad():
        assert torch.equal(run(model), expected[0])


def test_hooks_see_whole_calls_and_whole_gradients():
    model, seen = make(layers=1), []
    inner = model.layers[0].mlp
    inner.register_forward_hook(lambda *_: seen.append("forward"))
    inner.register_full_backward_hook(lambda *_: seen.append("backward"))
    inner.up.weight.register_hook(lambda gradient: (seen.append("weight"), 2 * gradient)[1])
    run = lambda m: m(rows(4, 9, 8, requires_grad=True)).square().sum()  # noqa: E731
    expected = graded(model, run)
    seen.clear()
    enable_tiling(model, 4)
    assert_close(graded(model, run), expected, 1e-12)
    assert sorted(seen) == ["backward", "forward", "weight"]


def test_a_retained_graph_and_a_write_to_the_input():
    model = make()
    enable_tiling(model, 4)
    x = rows(3, 9, 8, requires_grad=True)
    loss = model(x).square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)
    hidden = rows(3, 9, 8, requires_grad=True) * 1
    out = model.layers[0].mlp(hidden)
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


class Shift(nn.Module):
    """Two linear maps with a shift over positions in between."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.down(self.up(x).roll(1, -2))


class Draws(Shift):
    def forward(self, x):
        return self.down(nn.functional.dropout(self.up(x), 0.5))


class Tuple(Shift):
    def forward(self, x):
        return self.down(self.up(x)), x


@pytest.mark.parametrize("kind", [Shift, Draws, Tuple])
def test_what_is_not_position_wise_is_left_alone(kind, caplog):
    caplog.set_level(logging.INFO, "rlx.offload")
    model = make()
    for layer in model.layers:
        layer.mlp = kind().double()
        layer.forward = lambda x, layer=layer: x + (y[0] if isinstance(y := layer.mlp(layer.norm(x)), tuple) else y)

    def run(model):
        torch.manual_seed(4)
        return model(rows(2, 9, 8)).square().sum()

    expected = graded(model, run)
    enable_tiling(model, 4)
    for save in (None, "boundary", "attention"):  # the try draws nothing and is seen by nobody
        handle = offloading(model, save) if save else None
        assert_close(graded(model, run), expected, 1e-14)
        if handle is not None:
            handle.disable()
    notes = [r.getMessage() for r in caplog.records if "is not computed in tiles" in r.getMessage()]
    assert len(notes) == 1
    assert "layers.0.mlp mixes positions, draws random numbers or returns something else" in notes[0]


def test_the_check_of_a_module_keeps_nothing_alive():
    """A norm saves its own results: a graph of the check that held one would never be freed, nor the layer's input."""
    model = build("qwen2")
    inputs = []
    enable_tiling(model, 4)
    for module in model.modules():
        module.register_forward_pre_hook(
            lambda module, args: inputs.extend(weakref.ref(x.untyped_storage()) for x in args if x.dim() == 3)
        )
    step(model).detach()
    assert inputs and not any(reference() for reference in inputs)


def test_on_and_off_again():
    model = make()
    tiling = enable_tiling(model, 4)
    with pytest.raises(ValueError, match="enabled already"):
        enable_tiling(model, 4)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(model)
    copied = copy.deepcopy(model)
    assert copied.layers[0].mlp.forward.__self__ is copied.layers[0].mlp
    tiling.disable()
    assert "forward" not in vars(model.layers[0].mlp)
    with pytest.raises(ValueError, match="got 0, expected at least 1"):
        enable_tiling(model, 0)
