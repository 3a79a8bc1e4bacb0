"""`enable_tiling`: which modules of a model are computed in tiles, and how long a tile is."""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from rlx.offload.plan.memory import tile_tokens
from rlx.offload.recompute.ambient_state import autocast_dtype
from rlx.offload.replay.replay_mode import run_as_one_call, unrecorded
from rlx.offload.runtime.forward_override import ForwardOverride
from rlx.offload.runtime.layers import LayerName, find_layers, is_fsdp1
from rlx.offload.storage.tensor_bytes import is_plain
from rlx.offload.tiling.tiles import TiledModule, never_unpacked, run_tiled, run_tiled_without_graph

logger = logging.getLogger("rlx.offload")

_CHECKED = 16  # positions on which a module is checked to be position-wise
_MAX_DIFFERENCE = 0.02  # of the largest value; kernels that are chosen by size differ by bf16 rounding only
_NOT_POSITION_WISE = "mixes positions, draws random numbers or returns something else"
_SEVERAL_STREAMS = "computes on several streams"  # a tile's recomputation would end before the last waits among them
_FUSED = (nn.LayerNorm, nn.RMSNorm)  # they save little but their input anyway


class TiledForward(ForwardOverride):
    """Replaces the forward of a position-wise module."""

    def __init__(self, tiling: Tiling, name: str, module: nn.Module, is_mlp: bool) -> None:
        super().__init__(module)
        self.tiling = tiling
        self._name, self._is_mlp = name, is_mlp
        self._widest = max(max(parameter.shape) for parameter in module.parameters())
        self._lock = threading.RLock()
        # The output's dtype by everything it may depend on; or why the module cannot be computed in tiles.
        self._dtypes: dict[tuple[Any, ...], torch.dtype | str] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, in tiles if it gets one argument that is longer than a tile."""
        module: Any = self.module()
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and self._is_long(args[0]):
            return self._run_uncompiled(module, args[0])
        return self.original(module)(*args, **kwargs)

    def _is_long(self, hidden: Tensor) -> bool:
        return hidden.dim() > 1 and hidden.numel() > self._length(hidden) * hidden.shape[-1]

    def _length(self, hidden: Tensor) -> int:
        width = max(hidden.shape[-1], 1)
        return self.tiling.positions_per_tile or tile_tokens(hidden.numel() // width, width, self._widest)

    def _run(self, module: nn.Module, hidden: Tensor) -> Tensor:
        tiled = self._tiled(module)
        weights = tiled.weights()
        dtype = self._dtype(tiled, hidden, weights)
        if isinstance(dtype, str):
            self.tiling.note_left_alone(self._name, dtype)
            return tiled.forward(hidden)
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in (hidden, *weights)):
            return run_tiled_without_graph(tiled, hidden, self._length(hidden), dtype)
        if self._is_mlp:
            return run_as_one_call(self._run_tiled, hidden, *weights)  # type: ignore[no-any-return]
        return self._run_tiled(hidden, *weights)

    def _run_tiled(self, hidden: Tensor, *weights: Tensor) -> Tensor:
        module = self.module()
        assert module is not None
        tiled = self._tiled(module)
        dtype = self._dtype(tiled, hidden, weights)
        assert not isinstance(dtype, str)
        return run_tiled(tiled, hidden, weights, self._length(hidden), dtype)

    def _tiled(self, module: nn.Module) -> TiledModule:
        return TiledModule(module, self.original(module), _weight_names(module), self._lock)

    def _dtype(self, tiled: TiledModule, hidden: Tensor, weights: Sequence[Tensor]) -> torch.dtype | str:
        if not all(map(is_plain, (hidden, *weights))) or any(map(is_fsdp1, tiled.module.modules())):
            return "gets or holds tensors that are not plain"
        if not hidden.is_contiguous():
            return "gets a tensor that is not contiguous"
        key = hidden.dtype, hidden.shape[-1], autocast_dtype(hidden.device.type), tiled.module.training
        if key not in self._dtypes:
            self._dtypes[key] = _dtype_if_position_wise(tiled, hidden)
        return self._dtypes[key]


class Tiling:
    """The modules of a model that are computed in tiles: made by `enable_tiling`."""

    def __init__(self, positions_per_tile: int | None) -> None:
        self.positions_per_tile = positions_per_tile
        self._forwards: list[weakref.ref[TiledForward]] = []
        self._has_noted: set[str] = set()
        self.mlps: tuple[str, ...] = ()
        self.norms: tuple[str, ...] = ()

    def add(self, name: str, module: nn.Module, is_mlp: bool) -> None:
        self._forwards.append(weakref.ref(TiledForward(self, name, module, is_mlp)))
        if is_mlp:
            self.mlps += (name,)
        else:
            self.norms += (name,)

    def note_left_alone(self, name: str, why: str) -> None:
        if why not in self._has_noted:
            self._has_noted.add(why)
            logger.info("tiling: %s %s, and is not computed in tiles. Logged once", name, why)

    def disable(self) -> None:
        """Restore the model. Graphs that are alive stay valid; a second call does nothing."""
        for reference in self._forwards:
            if (forward := reference()) is not None:
                forward.remove()
        self._forwards.clear()


def enable_tiling(
    model: nn.Module, positions_per_tile: int | None = None, layers: Sequence[LayerName] | None = None
) -> Tiling:
    """Compute the MLPs and norms of a model tile by tile over the positions, in forward and in backward.

    A call keeps its input only, and backward recomputes one tile at a time. If the layer is recomputed as well, its MLP is left
    out of that. Modules that are not position-wise (experts with routing, convolutions), or that compute on streams of their own,
    are not tiled. Call this before FSDP1 wraps the model; before or after FSDP2 shards it.

    Args:
        positions_per_tile: tokens per tile, of all sequences together. None: see `tile_tokens`.
        layers: modules, module names, classes or class names; None: see `find_layers`.

    Raises:
        ValueError: if the model has no layers, tiling is enabled already, or FSDP1 has flattened the weights.
    """
    if positions_per_tile is not None and positions_per_tile < 1:
        raise ValueError(f"positions_per_tile: got {positions_per_tile}, expected at least 1, or None")
    named = find_layers(model, layers)
    if any(isinstance(vars(module).get("forward"), TiledForward) for module in model.modules()):
        raise ValueError("tiling is enabled already for this model; call disable() on the first handle")
    if any(map(is_fsdp1, model.modules())):
        raise ValueError("FSDP1 has wrapped this model and flattened its weights; enable tiling before FSDP1 wraps it")
    tiling, alone = Tiling(positions_per_tile), dict[str, str]()
    for name, layer in named:
        mlp = _find_mlp(layer)
        if isinstance(mlp, str):
            alone.setdefault(mlp, name)
        else:
            tiling.add(f"{name}.{mlp[0]}", mlp[1], is_mlp=True)
    for name, norm in _norms(model, [layer for _, layer in named]):
        tiling.add(name, norm, is_mlp=False)
    logger.info(
        "tiling: %d MLPs and %d norms in tiles of %s positions%s",
        len(tiling.mlps),
        len(tiling.norms),
        positions_per_tile or "as many as length and width require",
        "".join(f"; not tiled: {name}, which {why}" for why, name in alone.items()),
    )
    return tiling


def _find_mlp(layer: nn.Module) -> tuple[str, nn.Module] | str:
    """Return the submodule with the widest linear maps among those with one argument; or why there is none."""
    wide = {
        name: max(max(matrix.shape) for matrix in matrices)
        for name, child in layer.named_children()
        if len(matrices := [p for p in child.parameters() if p.dim() > 1]) > 1 and _takes_one(child)
    }
    if not wide:
        return "has no MLP of its own"
    name = max(wide, key=wide.__getitem__)
    mlp = layer.get_submodule(name)
    if any(p.dim() > 2 for p in mlp.parameters()) or any(isinstance(m, nn.ModuleList) for m in mlp.modules()):
        return "has experts or convolutions"
    return name, mlp


def _takes_one(module: nn.Module) -> bool:
    kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    return len(kinds) == 1 and kinds[0] is inspect.Parameter.POSITIONAL_OR_KEYWORD


def _norms(model: nn.Module, layers: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield unfused norms, which have vectors for weights: those in the layers, and siblings of the list of layers."""
    inside = {module for layer in layers for module in layer.modules()}
    members = set(layers)
    lists = {module for module in model.modules() if not members.isdisjoint(module.children())}
    parents = [module for module in model.modules() if not lists.isdisjoint(module.children())]
    siblings = {child for module in parents for child in module.children()}
    for name, module in model.named_modules():
        parameters = list(module.parameters())
        is_norm = parameters and all(p.dim() == 1 for p in parameters) and not any(True for _ in module.children())
        if is_norm and module in inside | siblings and not isinstance(module, _FUSED) and _takes_one(module):
            yield name, module


def _weight_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters, which FSDP1 replaces or hides with plain tensors while they are gathered."""
    names: dict[str, None] = {}
    for path, inner in module.named_modules():
        own = (*inner.named_parameters(recurse=False), *vars(inner).items())
        names |= {f"{path}.{name}" if path else name: None for name, value in own if isinstance(value, Tensor)}
    return tuple(sorted(names))


def _dtype_if_position_wise(tiled: TiledModule, hidden: Tensor) -> torch.dtype | str:
    """Return the dtype of a module's output; or why it cannot be tiled: positions depend on each other, or it uses streams."""
    generator = torch.Generator().manual_seed(0)
    some = torch.randn(*[1] * (hidden.dim() - 2), _CHECKED, hidden.shape[-1], generator=generator).to(hidden)
    device, devices = hidden.device, [] if hidden.is_cpu else [hidden.device]
    home = _stream(device)
    strays: list[torch.Stream | None] = []

    # A graph that saved its own result would never be freed, nor what this function refers to. So it saves nothing.
    def look(tensor: Tensor) -> None:
        if (stream := _stream(device)) != home:
            strays.append(stream)

    with unrecorded(), torch.random.fork_rng(devices, device_type=hidden.device.type):
        with torch.enable_grad(), saved_tensors_hooks(look, never_unpacked):
            # * 1: the module may write to its argument, which is forbidden for a leaf.
            whole = tiled.forward(some.requires_grad_() * 1)
        with torch.no_grad():
            halves = [tiled.forward(half) for half in some.chunk(2, -2)]
    if strays:
        return _SEVERAL_STREAMS
    if not isinstance(whole, Tensor) or whole.shape != some.shape:
        return _NOT_POSITION_WISE
    difference = (whole.detach() - torch.cat(halves, -2)).abs().max()
    return whole.dtype if bool(difference <= _MAX_DIFFERENCE * whole.detach().abs().max()) else _NOT_POSITION_WISE


def _stream(device: torch.device) -> torch.Stream | None:
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)
