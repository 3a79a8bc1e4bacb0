import importlib
import multiprocessing
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A two-layer Qwen3 with tied embeddings and its byte tokenizer."""
    from rlx.config.schema import TinyModelConfig
    from rlx.models.tiny import make_tiny

    folder = tmp_path_factory.mktemp("model")
    config = TinyModelConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1
    )
    for part in make_tiny(config):
        part.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list]]:
    """As `two_ranks`, for few calls: the processes are forked from one that has imported already what takes each seconds."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    join = importlib.import_module("rank_tools").join
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rlx.engine.engine", "transformers.models.qwen3.modeling_qwen3"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with context.Pool(4) as pool:

        def call(module: str, function: str, *args: object) -> list:
            request = (f"on_ranks_{module}", function, args)
            return pool.starmap_async(join, [(rank, 4, port, *request) for rank in range(4)], chunksize=1).get(120)

        yield call
