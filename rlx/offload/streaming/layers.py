"""`enable_layer_offloading`: the frozen weights of a model's layers wait on the host and are fetched one layer ahead."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from rlx.offload.runtime.forward_override import ForwardOverride
from rlx.offload.runtime.layers import LayerName, NamedLayer, find_layers, is_checkpointed
from rlx.offload.storage.offloader import CopyStreams, Counters, Timeline
from rlx.offload.storage.stats import OffloadStats
from rlx.offload.storage.tensor_bytes import is_plain, weights_are_refetched
from rlx.offload.streaming.shared_file import WeightFile
from rlx.offload.streaming.weights import FrozenWeights


class StreamedForward(ForwardOverride):
    """Replaces a layer's forward: its frozen weights are on the device while it runs, in forward and in recomputation."""

    def __init__(self, handle: LayerOffloading, weights: FrozenWeights, module: nn.Module) -> None:
        super().__init__(module)
        self.handle = handle
        self._weights = weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.handle.is_enabled:
            return self._run_uncompiled(args, kwargs)
        module: Any = self.module()
        return self.original(module)(*args, **kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module: Any = self.module()
        forward, weights = self.original(module), self._weights
        # Whoever replaced the layer's forward after this object has hooks that treat weights, or keeps nothing of forward.
        is_outermost = vars(module).get("forward") is self
        if is_outermost and module.training and is_checkpointed(module):
            raise ValueError(
                f"layer offloading: gradient checkpointing of transformers is on for layer {weights.name}, whose weights would "
                "stay on the device until its backward; call enable_activation_offloading(model, enable_ckpt=True), which "
                "recomputes the layers instead"
            )
        try:
            self.handle.begin(weights, entered=1)
            if is_outermost and torch.is_grad_enabled():
                with weights_are_refetched():
                    return forward(*args, **kwargs)
            return forward(*args, **kwargs)
        finally:
            self.handle.leave(weights)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(
            "a model with layer offloading enabled cannot be copied, because its frozen weights are in host memory; copy it before, "
            "or call disable() first"
        )


class LayerOffloading:
    """Frozen weights of a model's layers on the host: made by `enable_layer_offloading`."""

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        self.is_enabled = True
        self.streamed_bytes = 0  # weights that wait on the host
        self.buffer_bytes = 0  # device memory for those that are fetched, at most
        self.streamed_layers: tuple[str, ...] = ()  # names of the layers that they belong to
        self._counters, self._timeline = Counters(), Timeline()
        self._copy_streams = CopyStreams(device, True, self._counters, self._timeline)
        self._weights: list[FrozenWeights] = []
        self._fetched: list[FrozenWeights] = []
        self._forwards: list[weakref.ref[StreamedForward]] = []
        self._at_work, self._direction = -1, 1
        self._lock = threading.RLock()
        self._group = group
        self._file = None if directory is None else WeightFile(directory, self._copy_streams, group)

    @property
    def parameters(self) -> frozenset[Parameter]:
        return frozenset(parameter for weights in self._weights for parameter in weights.parameters)

    def begin(self, weights: FrozenWeights, entered: int = 0) -> None:
        """Make a layer the active one: its weights are on the device, those of the next one are on their way.

        The layers before it leave the device first, so that the next one gets their memory; not while another thread runs their
        forward: `entered` is 1 where the layer's forward begins, which holds its weights until `leave`. The next one's copy is queued before those of the activations that this one fetches.
        """
        builds_graph = torch.is_grad_enabled()
        with self._lock, torch.inference_mode(False):
            weights.calls += entered
            if self._at_work != weights.index:
                self._direction = self._direction_to(weights.index)
            elif weights.index in (0, len(self._weights) - 1):
                self._direction = 1 if weights.index == 0 else -1  # forward begins, or backward
            elif weights.is_fetched:
                return weights.attach()
            self._at_work = weights.index
            following = self._following(weights.index, builds_graph)
            for other in self._fetched:
                if other is not weights and other is not following and not other.calls:
                    other.drop()
            # Noted before the copies begin, so that `release` finds them if one fails.
            self._fetched = [o for o in self._fetched if o.is_fetched and o not in (weights, following)]
            self._fetched += [o for o in (weights, following) if o is not None]
            weights.fetch()
            if following is not None:
                following.fetch()
            weights.attach()

    def leave(self, weights: FrozenWeights) -> None:
        with self._lock:
            weights.calls -= 1

    def _direction_to(self, index: int) -> int:
        starts_again = index == 0 and self._at_work > 1
        return 1 if index > self._at_work or starts_again else -1

    def _following(self, index: int, builds_graph: bool) -> FrozenWeights | None:
        """Return the layer that is probably at work next; at the last one backward turns round, and a pass without graph ends."""
        count, following = len(self._weights), index + self._direction
        if following == count and not builds_graph:
            following = 0
        elif not 0 <= following < count:
            following = index - self._direction
        return self._weights[following] if 0 <= following < count and following != index else None

    def release(self) -> None:
        """Release the fetched copies; the next pass fetches them again. Call it when others need the device."""
        with self._lock:
            for weights in self._fetched:
                weights.drop()
            self._fetched, self._at_work = [], -1

    def stats(self) -> OffloadStats:
        self._timeline.harvest()
        on_host = 0 if self._file else self.streamed_bytes
        return OffloadStats(**vars(self._counters), held_bytes=on_host, reserved_bytes=on_host)

    def disable(self) -> None:
        """Move all weights to the device and restore the model. Graphs that are alive stay valid; a second call does nothing."""
        if not self.is_enabled:
            return
        self.release()
        self.is_enabled = False
        for weights in self._weights:
            weights.restore()
        self._weights.clear()
        self.streamed_bytes = self.buffer_bytes = 0
        for reference in self._forwards:
            if (forward := reference()) is not None:
                forward.remove()

    def _add(self, name: str, layer: nn.Module, parameters: dict[str, Parameter], dtype: torch.dtype | None) -> None:
        begin = weakref.WeakMethod(self.begin)
        weights = FrozenWeights(
            len(self._weights), name, parameters, dtype, self._copy_streams, begin, self._group, self._file
        )
        self._weights.append(weights)
        self._forwards.append(weakref.ref(StreamedForward(self, weights, layer)))
        self.streamed_layers += (name,)
        self.streamed_bytes += weights.nbytes
        self.buffer_bytes = sum(sorted(each.nbytes for each in self._weights)[-2:])


def enable_layer_offloading(
    model: nn.Module,
    layers: Sequence[LayerName] | None = None,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    resident_layers: int = 0,
    group: dist.ProcessGroup | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> LayerOffloading:
    """Keep the frozen weights of a model's layers in page-locked host memory, and fetch them one layer ahead.

    A weight streams if it needs no gradient, has at least two dimensions and belongs to one layer only. At most two layers'
    weights are on the device at once. Each layer is fetched once in forward and once for recomputation and backward together.

    Call it before `enable_activation_offloading`, and before FSDP2 shards the model, with the weights that stream as its
    `ignored_params`. A `load_state_dict` afterwards writes the weights to where they wait.

    Args:
        layers: modules, module names, classes or class names; None: see `find_layers`.
        device: on which the layers compute; None: that of the weights, or the accelerator.
        dtype: the weights' type from now on; None: as they are.
        resident_layers: number of layers, evenly spread, whose weights stay on the device.
        group: processes of one machine that call this together and share one copy on the host, with the values of the first.
        directory: folder on a disk whose unnamed file takes the weights, where host memory is too small for them. A fetch reads it
            through page-locked buffers of at most 134 MB together.

    Raises:
        ValueError: if no layer is found, no weight of a layer is frozen, or offloading is already enabled for a layer.
        OSError: the host has no memory left; or `directory` cannot be used, has no room, or a read of it fails (DiskError).
    """
    found = find_layers(model, layers)
    for name, layer in found:
        if isinstance(vars(layer).get("forward"), ForwardOverride):
            raise ValueError(
                f"layer offloading: layer {name} has layer or activation offloading enabled already; call disable() on that "
                "handle, then enable layer offloading first and activation offloading after it"
            )
    device = device or _device_of(found)
    frozen = [_frozen_matrices(model, layer) for _, layer in found]
    if not any(frozen):
        raise ValueError(
            f"layer offloading: got {len(found)} layers of {type(model).__name__} without a frozen weight, expected frozen "
            "ones; add adapters (LoRA) or call requires_grad_(False) first"
        )
    if not 0 <= resident_layers < len(found):
        raise ValueError(f"resident_layers: got {resident_layers}, expected 0 to {len(found) - 1}, fewer than all")
    handle = LayerOffloading(device, group, directory)
    for index, ((name, layer), parameters) in enumerate(zip(found, frozen, strict=True)):
        stays = (index * resident_layers) % len(found) < resident_layers
        if parameters and not stays:
            handle._add(name, layer, parameters, dtype)
    if group is not None:
        dist.barrier(group)  # the first one has written all values
    return handle


def _device_of(layers: Sequence[NamedLayer]) -> torch.device:
    devices = {parameter.device for _, layer in layers for parameter in layer.parameters()}
    accelerators = sorted((device for device in devices if device.type not in ("cpu", "meta")), key=str)
    if accelerators:
        return accelerators[0]
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.accelerator.current_stream().device


def _frozen_matrices(model: nn.Module, layer: nn.Module) -> dict[str, Parameter]:
    uses = Counter(id(p) for p in _all_parameters(model))
    inside = Counter(id(p) for p in _all_parameters(layer))
    return {
        name: parameter
        for name, parameter in layer.named_parameters()
        if not parameter.requires_grad
        and parameter.dim() > 1
        and parameter.numel()
        and is_plain(parameter)
        and parameter.is_contiguous()
        and uses[id(parameter)] == inside[id(parameter)]
    }


def _all_parameters(module: nn.Module) -> list[Parameter]:
    return [parameter for _, parameter in module.named_parameters(remove_duplicate=False)]
