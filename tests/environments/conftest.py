import sys
import time
from pathlib import Path

import pytest

from rlx.environments.environment_pool import EnvironmentPool
from rlx.environments.spec import EnvironmentSpec
from rlx.models.tiny import make_tiny_tokenizer

sys.path.insert(0, str(Path(__file__).parent))  # for in_this_process


TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}{{ raise_exception('role is ' + message.role) }}{%- endif -%}"
    "{{ '<|' + ('user' if message.role == 'tool' else message.role) + '|>' + message.content }}"
    "{%- if message.role == 'assistant' -%}{{ eos_token }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


@pytest.fixture
def tokenizer():
    """The tiny model's, with a template that writes a tool's output as a user's message."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def answers():
    """Wait for the answers of conversations that all have a request open."""

    def wait(pool, keys, timeout_s=120.0):
        missing, found, until = set(keys), {}, time.monotonic() + timeout_s
        while missing and time.monotonic() < until:
            for key, answer in pool.poll(0.1):
                assert key in missing, "one answer for each request"
                found[key] = answer
                missing.discard(key)
        assert not missing, f"no answer for {sorted(missing)}"
        return found

    return wait


@pytest.fixture
def make_pool(tmp_path):
    """A pool of environments from a text, or of a built-in name."""
    pools = []

    def make(name, text=None, processes=1, memory_limit_gb=None, **spec):
        path = None
        if text is not None:
            path = tmp_path / "mine.py"
            path.write_text(text)
        pool = EnvironmentPool(EnvironmentSpec(name, path and str(path), **spec), processes, memory_limit_gb)
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close()
