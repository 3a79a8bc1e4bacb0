import copy
import gc
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from rlx.offload import OffloadOptions, enable_activation_offloading
from rlx.offload.storage.arena import host_arena
from rlx.offload.storage.disk import extent_files

sys.path.insert(0, str(Path(__file__).parent))  # for tiny_transformers

# What is kept for backward, and where. Tests that take `saving` or `mode` run in attention mode, which recomputes layers and
# replays results, and nightly in all modes; those that take `every_saving` or `every_mode` always run in all.
SAVES = ("boundary", "attention", "all")
MODES = [(save, "cpu") for save in SAVES] + [("attention", "disk")]
USUAL_SAVES, USUAL_MODES = ["attention"], [("attention", "cpu")]
if os.environ.get("RLX_NIGHTLY"):  # the cross product
    USUAL_SAVES, USUAL_MODES = SAVES, [*MODES, ("boundary", "disk"), ("all", "disk")]


@dataclass
class Graded:
    """What a step computed and left: loss, gradients of the parameters, buffers, and the next random number."""

    loss: torch.Tensor
    grads: dict
    buffers: dict
    drawn: torch.Tensor

    def assert_equal(self, other):
        assert torch.equal(self.loss, other.loss)
        assert torch.equal(self.drawn, other.drawn)
        assert self.grads.keys() == other.grads.keys()
        for name, buffer in self.buffers.items():
            assert torch.equal(buffer, other.buffers[name]), name
        for name, grad in self.grads.items():
            theirs = other.grads[name]
            assert (grad is None) == (theirs is None), name
            if grad is not None:
                assert torch.equal(grad, theirs), f"{name}: {(grad - theirs).abs().max()}"


def seed(number):
    """As `torch.manual_seed`, which for each kind of device that is not there takes milliseconds to write down the stack."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)


def graded(model, step):
    """Run `step(model) -> loss`, backward included or not, and collect the gradients."""
    model.zero_grad(set_to_none=True)
    seed(7)
    loss = step(model)
    if loss.requires_grad:
        loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return Graded(loss.detach().clone(), grads, buffers, torch.rand(1, device=loss.device))


def chosen(save):
    return {"enable_ckpt": save != "all", "save": save}


@pytest.fixture(params=USUAL_SAVES)
def saving(request):
    """What to keep for backward, for `compare(model, step, **saving)` and `enable(model, **saving)`."""
    return chosen(request.param)


@pytest.fixture(params=SAVES)
def every_saving(request):
    return chosen(request.param)


def chosen_tier(request):
    save, tier = request.param
    if tier != "disk":
        yield {**chosen(save), "tier": tier}
        return
    folder = request.getfixturevalue("tmp_path")
    yield {**chosen(save), "tier": tier, "directory": str(folder)}
    assert os.listdir(folder) == []


@pytest.fixture(params=USUAL_MODES, ids="-".join)
def mode(request):
    """What to keep and where; on the disk nothing is left in the folder."""
    yield from chosen_tier(request)


@pytest.fixture(params=MODES, ids="-".join)
def every_mode(request):
    yield from chosen_tier(request)


@pytest.fixture
def compare():
    """`compare(model, step, enable_ckpt, **options)`: gradients bit for bit as without the engine; returns the stats.

    `expected` is what the step gives without it, where that is known already.
    """

    def run(model, step, enable_ckpt, layers=None, expected=None, **options):
        expected = expected or graded(copy.deepcopy(model), step)
        options.setdefault("min_bytes", 0)
        handle = enable_activation_offloading(model, enable_ckpt, OffloadOptions(**options), layers)
        try:
            expected.assert_equal(graded(model, step))
            assert handle.stats().held_bytes == 0
            return handle.stats()
        finally:
            handle.disable()

    return run


@pytest.fixture
def enable(request):
    """`enable(model, ...)` as the public call, with `min_bytes=0`; disabled again after the test."""

    def run(model, enable_ckpt, layers=None, **options):
        options.setdefault("min_bytes", 0)
        handle = enable_activation_offloading(model, enable_ckpt, OffloadOptions(**options), layers)
        request.addfinalizer(handle.disable)
        return handle

    return run


@pytest.fixture
def emptied_folder(tmp_path):
    """After the test its folder is empty."""
    yield
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(autouse=True)
def nothing_left():
    """After each test no saved-tensor hook is active and the arena holds no more than before it."""
    arenas = [host_arena(False), host_arena(True)]
    before = [arena.held_bytes for arena in arenas]  # not 0 after a test that failed: its traceback holds a graph
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a block counts until its last copy has ended
    for file in extent_files():
        file.drain()  # so do buffers on the way to and from the disk
    if any(arena.held_bytes > held for arena, held in zip(arenas, before, strict=True)):
        torch.ones(1, requires_grad=True).exp().backward()  # autograd's queue keeps nodes of a failed pass until then
        gc.collect()  # a graph dropped in a cycle, an exception's traceback
    assert all(arena.held_bytes <= held for arena, held in zip(arenas, before, strict=True))
    seen = []
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(1) or t, lambda t: t):
        x.exp()
    assert seen == [1]


class Block(nn.Module):
    """A residual MLP with a norm: the shape of a decoder layer without its attention."""

    def __init__(self, width=8, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = dropout

    def forward(self, x, scale=None):
        y = self.down(nn.functional.silu(self.up(self.norm(x))))
        if scale is not None:
            y = y * scale
        return x + nn.functional.dropout(y, self.dropout, self.training)


class Attend(nn.Module):
    """A decoder layer: attention with fewer key/value heads, then an MLP."""

    def __init__(self, width=16, heads=4, kv_heads=2, dropout=0.0, attention_dropout=0.0):
        super().__init__()
        self.size, self.is_grouped = width // heads, heads != kv_heads
        self.dropout, self.attention_dropout = dropout, attention_dropout
        self.norm = nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, kv_heads * self.size)
        self.v = nn.Linear(width, kv_heads * self.size)
        self.o = nn.Linear(width, width, bias=False)
        self.mlp = Block(width, dropout)

    def split(self, x):
        """From (B, S, heads * size) to (B, heads, S, size)."""
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def forward(self, x, mask=None):
        h = self.norm(x)
        q, k, v = self.split(self.q(h)), self.split(self.k(h)), self.split(self.v(h))
        dropout = self.attention_dropout if self.training else 0.0
        a = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=self.is_grouped
        )
        x = x + nn.functional.dropout(self.o(a.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return self.mlp(x)


class Kit(nn.Module):
    """A layer with the parts of which attention is built; `run(kit, x)` says what it does with them."""

    def __init__(self, run):
        super().__init__()
        self.run = run
        self.norm = nn.LayerNorm(16)
        self.q, self.k, self.v, self.o, self.other = (nn.Linear(16, 16) for _ in range(5))
        self.narrow = nn.Linear(16, 8, bias=False)
        self.qkv = nn.Linear(16, 48)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.bias = nn.Parameter(torch.linspace(-1, 1, 6 * 6).view(6, 6))

    def forward(self, x):
        return self.run(self, x)

    def mlp(self, x):
        return self.down(nn.functional.silu(self.up(x)))

    def split(self, x):
        """From (B, S, heads * 4) to (B, heads, S, 4)."""
        return x.unflatten(-1, (-1, 4)).transpose(1, 2)

    def merge(self, x):
        """Back again."""
        return x.transpose(1, 2).flatten(2)

    def attend(self, q, k, v, **options):
        q, k, v = self.split(q), self.split(k), self.split(v)
        return self.merge(nn.functional.scaled_dot_product_attention(q, k, v, **options))


class Stack(nn.Module):
    """An embedding, blocks in a ModuleList, a head."""

    def __init__(self, make_block=Block, blocks=3, width=8):
        super().__init__()
        seed(0)
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList(make_block() for _ in range(blocks))
        self.head = nn.Linear(width, 1)

    def forward(self, x, **kwargs):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, **kwargs)
        return self.head(x).sum()


class Adapted(nn.Module):
    """A frozen linear map with an adapter, as LoRA has it."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features) / 4)
        self.b = nn.Parameter(torch.randn(base.out_features, 2) / 4)

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


def adapt(model):
    """Freeze a model and put an adapter around each linear map in its layers."""
    seed(3)
    model.requires_grad_(False)
    for name, module in [*model.layers.named_modules()]:
        if isinstance(module, nn.Linear):
            parent, _, leaf = name.rpartition(".")
            setattr(model.layers.get_submodule(parent), leaf, Adapted(module))
    return model


@pytest.fixture(scope="session")
def toys():
    """The toy modules and helpers of this folder."""

    class Toys:
        block = Block
        attend = Attend
        kit = Kit
        stack = Stack
        grade = staticmethod(graded)
        adapt = staticmethod(adapt)

        @staticmethod
        def batch(rows=4, width=8, seed=1):
            return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))

        @staticmethod
        def step(model):
            return model(Toys.batch())

        @staticmethod
        def decoder(blocks=3, **options):
            """A stack of layers with attention."""
            return Stack(lambda: Attend(**options), blocks, width=16)

        @staticmethod
        def tokens(rows=2, length=6, width=16, seed=1):
            return torch.randn(rows, length, width, generator=torch.Generator().manual_seed(seed))

        @staticmethod
        def read(model):
            return model(Toys.tokens())

        @staticmethod
        def wide(blocks=5):
            """A stack of blocks whose saved tensors take several chunks of a disk and end in the middle of a page."""
            return Stack(lambda: Block(72, dropout=0.1), blocks, 72)

        @staticmethod
        def read_wide(model):
            return model(Toys.batch(1500, 72))

        @staticmethod
        def of(forward, blocks=3, width=8):
            """A stack whose blocks hold one linear layer `lin` and run `forward(block, x)`."""

            class Custom(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(width, width)

                def forward(self, x, **kwargs):
                    return forward(self, x, **kwargs)

            return Stack(Custom, blocks, width)

    return Toys


def once(model):
    return model(torch.linspace(-1, 1, 2 * 6 * 16).sin().view(2, 6, 16))


def under_autocast(model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = once(model)
    return loss.float()


def partly_frozen(model):
    model.embed.requires_grad_(False)
    for index, block in enumerate(model.layers):
        block.requires_grad_(False)
        for part in ((block.v, block.norm), (block.q, block.up), (block.o, block.qkv))[index]:
            part.requires_grad_(True)
    return once(model)


def again_and_again(model):
    loss, some = once(model), [model.layers[1].v.weight, model.layers[2].qkv.bias]
    torch.autograd.grad(loss, some, retain_graph=True, allow_unused=True)
    other = once(model)
    loss.backward(retain_graph=True)
    other.backward()
    loss.backward()
    return loss.detach()


@cache
def plain(forward, step):
    """What a step of three layers gives without the engine: once for all kinds of saving."""
    return graded(Stack(lambda: Kit(forward), width=16), step)


@pytest.fixture(params=[once, under_autocast, partly_frozen, again_and_again], ids=lambda step: step.__name__)
def compare_layer(request, compare):
    """`compare_layer(run, **saving)`: `compare` for three layers that do `run(kit, x)`, with steps of several kinds."""

    def run(forward, **saving):
        model = Stack(lambda: Kit(forward), width=16)
        return compare(model, request.param, expected=plain(forward, request.param), **saving)

    return run
