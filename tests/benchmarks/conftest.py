import pytest
import torch


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen2 of the shape "tiny", with random weights."""
    from benchmarks.common import write_random_model

    folder = tmp_path_factory.mktemp("model")
    write_random_model(folder, "tiny", torch.device("cpu"), num_hidden_layers=2)
    return str(folder)
