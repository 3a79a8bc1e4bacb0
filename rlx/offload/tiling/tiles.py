"""One call of a position-wise module, computed tile by tile over the positions, in forward and in backward.

The idea is that of Arctic long sequence training (arXiv:2506.13996). Here the gradients of the weights go to autograd, so that FSDP
needs no support for tiles.

Note [tensors that a tiled call keeps]
Input and weights are saved before anything is computed: the recomputation of a layer that needs no output of the call ends there.
Forward builds the graph of each tile, on aliases of the weights, so that hooks of the weights see one gradient each. The graph saves
numbers in place of tensors. When backward asks for the first of them, the tile's forward runs again up to the last saved tensor. So
the intermediate results of one tile exist at a time. The gradients of the weights are summed over tiles in fp32 or wider.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from rlx.offload.recompute.ambient_state import AmbientState
from rlx.offload.runtime.forward_override import run_with


class _TileRecomputedError(BaseException):
    """Ends the recomputation of a tile."""


class TiledModule(NamedTuple):
    """A module that is computed in tiles."""

    module: nn.Module  # position-wise: it maps (..., width) to the same shape, each position independently
    forward: Callable[[Tensor], Tensor]  # the module's forward, bound
    names: tuple[str, ...]  # of its parameters
    lock: threading.RLock  # held while the module runs with other weights than its own

    def weights(self) -> list[Tensor]:
        """Return its present parameters; under FSDP1 they are views of gathered ones."""
        return [attrgetter(name)(self.module) for name in self.names]

    def with_weights(self, weights: Sequence[Tensor], run: Callable[[], None]) -> None:
        registered: dict[str, Tensor] = {}
        with self.lock, contextlib.ExitStack() as stack:
            for name, weight in zip(self.names, weights, strict=True):
                path, _, leaf = name.rpartition(".")
                attributes = vars(self.module.get_submodule(path))
                if leaf in attributes:  # FSDP1 puts the gathered weight here, which hides the parameter
                    stack.callback(attributes.__setitem__, leaf, attributes[leaf])
                    attributes[leaf] = weight
                else:
                    registered[name] = weight
            run_with(self.module, registered, run, tied=True)


class _Tile:
    """The graph of one tile, and its saved tensors while backward is at the tile."""

    def __init__(self, start: int, length: int) -> None:
        self.start = start
        self.length = length
        self.recompute: Callable[[_Tile], list[Tensor]] | None = None  # set while backward is at the tile
        self.specs: list[tuple[torch.Size, torch.dtype]] = []
        self.values: list[Tensor | None] = []

    def of(self, rows: Tensor) -> Tensor:
        return rows.narrow(-2, self.start, self.length)

    def pack(self, tensor: Tensor) -> int:
        self.specs.append((tensor.shape, tensor.dtype))
        return len(self.specs) - 1

    def unpack(self, index: int) -> Tensor:
        value = self.values[index] if self.values else None
        if value is None:
            assert self.recompute is not None
            self.values = [*self.recompute(self)]
            value = self.values[index]
            assert value is not None
        self.values[index] = None
        return value


class _WeightGradient:
    """The gradient of a weight, summed over the tiles in fp32 or wider and rounded once; no pass only fills or rounds the sum."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._first: Tensor | None = None
        self._sum: Tensor | None = None
        self.rounded: Tensor | None = None  # when the last tile is in

    def add(self, part: Tensor | None, is_last: bool) -> None:
        """Add the gradient from one tile; None if the tile's result does not depend on the weight."""
        if is_last:
            self.rounded = self._total(part)
            self._first = self._sum = None
        elif part is None:
            return
        elif self._sum is not None:
            self._sum.add_(part)
        elif self._first is None:
            self._first = part
        else:
            wide = torch.promote_types(self._weight.dtype, torch.float32)
            self._sum = self._first.to(wide, copy=True).add_(part)  # a copy: others may hold the first part as well
            self._first = None

    def _total(self, part: Tensor | None) -> Tensor:
        held = self._sum if self._first is None else self._first
        if held is None:
            return torch.zeros_like(self._weight) if part is None else part.to(self._weight.dtype)
        if part is None:
            return held.to(self._weight.dtype)
        return torch.add(held, part, out=torch.empty_like(self._weight))


class TiledCall:
    """One call of a module on `hidden`, contiguous, (..., width), that backward repeats in tiles of `length` positions."""

    def __init__(self, tiled: TiledModule, hidden: Tensor, length: int) -> None:
        self._tiled = tiled
        self._tiles = _tiles(hidden, length)
        self._edges: list[tuple[GradientEdge, GradientEdge | None]] = []  # of each tile's output and input
        self._weight_edges: list[GradientEdge | None] = []
        self._ambient: AmbientState | None = None

    def forward(self, hidden: Tensor, weights: Sequence[Tensor], out: Tensor) -> None:
        leaves = [_leaf(weight, weight.requires_grad) for weight in weights]
        self._weight_edges = [_edge(leaf) for leaf in leaves]
        rows, out_rows = _rows(hidden.detach()), _rows(out.detach())
        self._ambient = ambient = AmbientState([] if hidden.is_cpu else [hidden.device])

        def run() -> None:
            for tile in self._tiles:
                entry = _leaf(tile.of(rows), hidden.requires_grad)
                with torch.enable_grad(), saved_tensors_hooks(tile.pack, tile.unpack):
                    result = self._tiled.forward(entry)
                with torch.no_grad():
                    tile.of(out_rows).copy_(result)
                self._edges.append((get_gradient_edge(result), _edge(entry)))
                entry.data = torch.empty(0, dtype=entry.dtype, device=entry.device)  # the graph keeps the leaf alive

        try:
            ambient.begin_forward()
            self._tiled.with_weights(leaves, run)
            ambient.end_forward()
        except BaseException:
            ambient.leave_forward()
            raise

    def backward(self, gradient: Tensor, hidden: Tensor, weights: Sequence[Tensor]) -> list[Tensor | None]:
        wanted = [index for index, edge in enumerate(self._weight_edges) if edge is not None]
        sums = {index: _WeightGradient(weights[index]) for index in wanted}
        leaves = [_leaf(w, edge is not None) for w, edge in zip(weights, self._weight_edges, strict=True)]
        rows, gradient_rows = _rows(hidden), _rows(gradient)
        wants_hidden = self._edges[0][1] is not None
        hidden_gradient = torch.empty_like(hidden, memory_format=torch.contiguous_format) if wants_hidden else None

        def recompute(tile: _Tile) -> list[Tensor]:
            return self._recompute(tile, _leaf(tile.of(rows), wants_hidden), leaves)

        for number, (tile, (output, entry)) in enumerate(zip(self._tiles, self._edges, strict=True), start=1):
            tile.recompute = recompute
            inputs = [edge for edge in (*self._weight_edges, entry) if edge is not None]
            above = [tile.of(gradient_rows)]
            found = list(torch.autograd.grad([output], inputs, above, retain_graph=True, allow_unused=True))
            tile.recompute, tile.values = None, []
            if hidden_gradient is not None:
                part = found.pop()
                into = tile.of(_rows(hidden_gradient))
                into.zero_() if part is None else into.copy_(part)
            for index in reversed(wanted):
                sums[index].add(found.pop(), is_last=number == len(self._tiles))
        return [hidden_gradient, *(sums[i].rounded if i in sums else None for i in range(len(weights)))]

    def _recompute(self, tile: _Tile, entry: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
        saved: list[Tensor] = []

        def collect(tensor: Tensor) -> None:
            saved.append(tensor.detach())
            if len(saved) >= len(tile.specs):
                raise _TileRecomputedError

        def run() -> None:
            with torch.enable_grad(), saved_tensors_hooks(collect, never_unpacked):
                self._tiled.forward(entry)

        assert self._ambient is not None
        with contextlib.suppress(_TileRecomputedError), self._ambient.restored() or contextlib.nullcontext():
            self._tiled.with_weights(leaves, run)
        if [(tensor.shape, tensor.dtype) for tensor in saved] != tile.specs:
            raise RuntimeError(
                f"recomputing a tile of {type(self._tiled.module).__name__} did not save the tensors that its forward saved; "
                "a module that is computed in tiles must do the same each time. Leave it out of the tiling"
            )
        return saved


class _TiledFunction(torch.autograd.Function):
    """Saves input and weights and returns the output, not yet filled: see Note [tensors that a tiled call keeps]."""

    @staticmethod
    def forward(ctx: Any, call: TiledCall, dtype: torch.dtype, hidden: Tensor, *weights: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(hidden, *weights)
        return torch.empty_like(hidden, dtype=dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, *weights = ctx.saved_tensors
        return None, None, *ctx.call.backward(gradient, hidden, weights)


def run_tiled(tiled: TiledModule, hidden: Tensor, weights: Sequence[Tensor], length: int, dtype: torch.dtype) -> Tensor:
    call = TiledCall(tiled, hidden, length)
    out: Tensor = _TiledFunction.apply(call, dtype, hidden, *weights)  # type: ignore[no-untyped-call]
    call.forward(hidden, weights, out)
    return out


def run_tiled_without_graph(tiled: TiledModule, hidden: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(hidden, dtype=dtype)
    with torch.no_grad():
        for tile in _tiles(hidden, length):
            tile.of(_rows(out)).copy_(tiled.forward(tile.of(_rows(hidden))))
    return out


def _tiles(hidden: Tensor, length: int) -> list[_Tile]:
    positions = hidden.numel() // hidden.shape[-1]
    return [_Tile(start, min(length, positions - start)) for start in range(0, positions, length)]


def _rows(tensor: Tensor) -> Tensor:
    """Reshape (..., width) to (1, ..., positions, width) with as many dimensions: some modules require three."""
    return tensor.reshape(*[1] * (tensor.dim() - 2), -1, tensor.shape[-1])


def _edge(leaf: Tensor) -> GradientEdge | None:
    return get_gradient_edge(leaf) if leaf.requires_grad else None


def _leaf(tensor: Tensor, requires_grad: bool) -> Tensor:
    return tensor.detach().requires_grad_(requires_grad)


def never_unpacked(packed: None) -> Tensor:
    raise AssertionError("nothing runs backward through this graph")
