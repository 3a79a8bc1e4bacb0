"""Rank processes that live as long as the test session, so that torch is imported once per process and not once per test.

Run as a script this file is one rank: it joins a gloo group, then answers requests (module, function, arguments) from
stdin until stdin closes. The modules are the `on_ranks_*.py` beside it.
"""

import datetime
import importlib
import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch

TIMEOUT_S = 120


class Ranks:
    """A gloo group of `world` processes that run functions of the modules beside this file."""

    def __init__(self, world: int):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), str(world)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
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

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait(30)
            process.stdout.close()


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Ranks]:
    ranks = Ranks(1)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A two-layer Qwen3 with tied embeddings and its byte tokenizer."""
    from rlx.config.schema import TinyModelConfig
    from rlx.models.tiny import make_tiny

    folder = tmp_path_factory.mktemp("model")
    config = TinyModelConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    )
    for part in make_tiny(config):
        part.save_pretrained(folder)
    return str(folder)


def serve(rank: int, world: int) -> None:
    answers, sys.stdout = os.fdopen(os.dup(1), "wb"), sys.stderr
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world, timeout=timeout)
    while True:
        try:
            module, function, args = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        try:
            answer = (False, getattr(importlib.import_module(module), function)(*args))
        except Exception:
            answer = (True, f"rank {rank}: {traceback.format_exc()}")
        pickle.dump(answer, answers)
        answers.flush()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
