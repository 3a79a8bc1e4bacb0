"""What a layer's own parameters and buffers were when its forward began: recomputation must see the same."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import Parameter

_SMALL_BYTES = 1 << 20


class Places:
    """Where a layer keeps parameters and buffers: (module, attribute) pairs, with the modules held weakly.

    Args:
        layer: the layer, complete.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.parameters: list[tuple[weakref.ref[nn.Module], str]] = []
        self.buffers: list[tuple[weakref.ref[nn.Module], str]] = []
        for module in layer.modules():
            reference = weakref.ref(module)
            self.parameters += [(reference, name) for name, _ in module.named_parameters(recurse=False)]
            self.buffers += [(reference, name) for name, _ in module.named_buffers(recurse=False)]


class _Seen(NamedTuple):
    module: weakref.ref[nn.Module]
    name: str
    tensor: Any
    version: int
    value: Tensor | None  # a buffer's, before forward


class ModuleState:
    """Parameters and buffers of a layer at the start of one forward call.

    A parameter that has changed when the layer is recomputed is refused: by then its old value is nowhere. Small buffers
    (running statistics, counters, scales) get their old values back for the recomputation and lose them after it, past
    the version counters, for the values are those that graphs alive have saved.
    """

    def __init__(self, places: Places) -> None:
        self._parameters = [_Seen(module, name, *_look(module, name), None) for module, name in places.parameters]
        buffers = [_Seen(module, name, *_look(module, name), None) for module, name in places.buffers]
        # Batch normalisation writes its statistics past the version counter: small buffers are copied in any case.
        self._buffers = [
            seen._replace(value=seen.tensor.detach().clone()) for seen in buffers if _is_small(seen.tensor)
        ]
        self._large_buffers = [seen for seen in buffers if not _is_small(seen.tensor)]

    def end_forward(self) -> None:
        """Close forward.

        Raises:
            RuntimeError: if it changed a buffer of which no copy was made.
        """
        for seen in self._large_buffers:
            tensor, version = _look(seen.module, seen.name)
            if tensor is not seen.tensor or version != seen.version:
                raise RuntimeError(
                    f"a layer's forward changes its buffer {seen.name!r}, of which no copy was made because it has "
                    f"{seen.tensor.nbytes} bytes (limit {_SMALL_BYTES}); recomputation would change it a second time. "
                    "Leave the layer out of layers=, or use enable_ckpt=False"
                )

    def changed(self) -> str | None:
        """The first parameter or buffer that is not as it was; None where all are."""
        for module, name, was, version, _ in (*self._parameters, *self._large_buffers):
            now, version_now = _look(module, name)
            # FSDP1 puts in new views for each pass, which are no parameters.
            if now is was:
                if version_now != version:
                    return f"{name!r} has been modified by an inplace operation"
            elif isinstance(now, Parameter) or isinstance(was, Parameter):
                return f"{name!r} has been replaced"
        return None

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Run a block with the small buffers as they were before forward."""
        with contextlib.ExitStack() as stack:
            for seen in self._buffers:
                module = seen.module()
                assert module is not None and seen.value is not None
                now = getattr(module, seen.name)
                stack.callback(setattr, module, seen.name, now)
                if now is seen.tensor:
                    stack.callback(now.data.copy_, now.detach().clone())
                    now.data.copy_(seen.value)
                else:
                    setattr(module, seen.name, seen.value.clone())
            yield


def _look(module: weakref.ref[nn.Module], name: str) -> tuple[Any, int]:
    tensor = getattr(module(), name, None)
    return tensor, tensor._version if isinstance(tensor, Tensor) and not tensor.is_inference() else 0


def _is_small(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.nbytes < _SMALL_BYTES
