"""What every test may use."""

import pytest
from hypothesis import settings

# No deadline: a slow machine is no failure.
settings.register_profile("rlx", deadline=None)
settings.load_profile("rlx")


@pytest.fixture(scope="session")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny model with fresh weights, so that a run needs no warm start."""
    from rlx.config.schema import TinyModelConfig
    from rlx.models.tiny import make_tiny

    folder = tmp_path_factory.mktemp("untrained")
    for part in make_tiny(TinyModelConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=3)):
        part.save_pretrained(folder)
    return str(folder)
