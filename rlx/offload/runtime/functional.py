"""Run a function while a module has other parameters and buffers than its own."""

import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

_LOCK = threading.RLock()


class _Around(nn.Module):
    """Wraps the module, so that `functional_call` replaces its tensors and calls neither its hooks nor its forward."""

    def __init__(self, module: nn.Module, run: Callable[[], None]) -> None:
        super().__init__()
        self.module = module
        self._run = run

    def forward(self) -> None:
        self._run()


def run_with(module: nn.Module, tensors: Mapping[str, Tensor], run: Callable[[], None], *, tied: bool = False) -> None:
    """Call `run` while these tensors are registered in the module. Threads take turns.

    Args:
        module: gets its own tensors back, also after an exception.
        tensors: by the names of parameters and buffers in the module.
        run: what to call.
        tied: whether a tensor also replaces the others that are tied to it.
    """
    named = {f"module.{name}": tensor for name, tensor in tensors.items()}
    with _LOCK:
        torch.func.functional_call(_Around(module, run), named, (), tie_weights=tied)
