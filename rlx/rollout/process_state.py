"""Restore the process state that vLLM changes, so that it can run in the process that trains."""

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch


@contextlib.contextmanager
def restored_process_state() -> Iterator[None]:
    """Restore the process state afterwards, because vLLM seeds every generator and changes settings of torch.

    Restored are the states of random generators, the environment except vLLM's own variables, `torch.set_num_threads` and the
    number of threads, the choice of attention kernels and the precision of matrix products.
    """
    environment, python_state = dict(os.environ), random.getstate()
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    attention, precision = torch.backends.cuda.cudnn_sdp_enabled(), torch.get_float32_matmul_precision()
    with own_random_state():
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            torch.set_num_threads(threads)
            torch.backends.cuda.enable_cudnn_sdp(attention)
            torch.set_float32_matmul_precision(precision)
            random.setstate(python_state)
            _restore(environment)


@contextlib.contextmanager
def own_random_state(seed: int | None = None, with_numpy: bool = True) -> Iterator[None]:
    """Run with separate states of torch's generators on host and device and of numpy's, seeded with `seed` if it is given.

    `with_numpy=False` leaves numpy's generator alone: changing its state and changing it back takes 0.3 ms.
    """
    devices = [torch.accelerator.current_device_index()] if torch.accelerator.is_available() else []
    numpy_state = numpy.random.get_state() if with_numpy else None
    try:
        with torch.random.fork_rng(devices):
            if seed is not None:
                torch.manual_seed(seed)
                if with_numpy:
                    numpy.random.seed(seed % 2**32)
            yield
    finally:
        if numpy_state is not None:
            numpy.random.set_state(numpy_state)


class OwnRandomState:
    """States of torch's generators and numpy's that go on where they ended, whatever the process draws between uses."""

    def __init__(self) -> None:
        self.seed(0)

    def seed(self, seed: int) -> None:
        """Begin the next use with this seed."""
        self._seed = seed
        self._states: list[torch.Tensor] | None = None  # not drawn from yet
        self._numpy_state: Any = None

    @contextlib.contextmanager
    def in_use(self, with_numpy: bool = True) -> Iterator[None]:
        """Use these states in place of the process's own, which are restored; see `own_random_state`."""
        modules = [torch.random, *([torch.get_device_module()] if torch.accelerator.is_available() else [])]
        with own_random_state(with_numpy=with_numpy):
            if self._states is None:
                torch.manual_seed(self._seed)
            else:
                for module, state in zip(modules, self._states, strict=True):
                    module.set_rng_state(state)
            if with_numpy and self._numpy_state is None:
                numpy.random.seed(self._seed % 2**32)
            elif with_numpy:
                numpy.random.set_state(self._numpy_state)
            try:
                yield
            finally:
                self._states = [module.get_rng_state() for module in modules]
                if with_numpy:
                    self._numpy_state = numpy.random.get_state()


def _restore(environment: dict[str, str]) -> None:
    for name in set(os.environ) | set(environment):
        if name.startswith("VLLM_"):
            continue
        if name in environment:
            os.environ[name] = environment[name]
        else:
            del os.environ[name]
