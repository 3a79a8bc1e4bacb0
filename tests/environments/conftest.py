import sys
from pathlib import Path

import pytest

from rlx.models.tiny import make_tiny_tokenizer

sys.path.insert(0, str(Path(__file__).parent))  # for in_this_process


@pytest.fixture
def tokenizer():
    return make_tiny_tokenizer()
