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
