"""Restore the process state that vLLM changes, so that it can run in the process that trains."""

import contextlib
import os
import random
from collections.abc import Iterator

import numpy
import torch


@contextlib.contextmanager
def restored_process_state() -> Iterator[None]:
    """Restore the process state afterwards, because vLLM seeds every generator and changes settings of torch.

    Restored are the states of random generators, the environment except vLLM's own variables, `torch.set_num_threads` and the
    number of threads, the choice of attention kernels and the precision of matrix products.
    """
    environment, python_state, numpy_state = dict(os.environ), random.getstate(), numpy.random.get_state()
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
            numpy.random.set_state(numpy_state)
            _restore(environment)


@contextlib.contextmanager
def own_random_state(seed: int | None = None) -> Iterator[None]:
    """Run with separate states of torch's generators on host and device, seeded with `seed` if it is given."""
    devices = [torch.accelerator.current_device_index()] if torch.accelerator.is_available() else []
    with torch.random.fork_rng(devices):
        if seed is not None:
            torch.manual_seed(seed)
        yield


class OwnRandomState:
    """States of torch's generators on host and device that go on where they ended, whatever the process draws between uses."""

    def __init__(self) -> None:
        self._seed: int | None = 0  # not drawn from yet
        self._states: list[torch.Tensor] = []

    def seed(self, seed: int) -> None:
        """Begin the next use with this seed."""
        self._seed = seed

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Use these states in place of the process's own, which are restored."""
        modules = [torch.random, *([torch.get_device_module()] if torch.accelerator.is_available() else [])]
        with own_random_state(self._seed):
            if self._seed is None:
                for module, state in zip(modules, self._states, strict=True):
                    module.set_rng_state(state)
            try:
                yield
            finally:
                self._seed, self._states = None, [module.get_rng_state() for module in modules]


def _restore(environment: dict[str, str]) -> None:
    for name in set(os.environ) | set(environment):
        if name.startswith("VLLM_"):
            continue
        if name in environment:
            os.environ[name] = environment[name]
        else:
            del os.environ[name]
