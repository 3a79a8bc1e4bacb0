import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))  # for test_forward


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`tiny_folder(**shape)`: the folder of a Qwen3 with tied embeddings and its byte tokenizer."""
    from rlx.config.schema import TinyModelConfig
    from rlx.models.tiny import make_tiny

    def make(**shape: int) -> str:
        folder = tmp_path_factory.mktemp("model")
        for part in make_tiny(TinyModelConfig(**shape)):
            part.save_pretrained(folder)
        return str(folder)

    return make


@pytest.fixture(scope="session")
def model_folder(tiny_folder: Callable[..., str]) -> str:
    """The folder of a narrow model with two layers."""
    return tiny_folder(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1
    )


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[torch.device]:
    """A process group of one, with collectives on both kinds of memory."""
    torch.cuda.set_device(0)
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield torch.device("cuda", 0)
    dist.destroy_process_group()
