import json
from pathlib import Path

import pytest
from transformers import ByT5Tokenizer

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(scope="session")
def tokenizer():
    """Bytes as tokens (token id = byte + 3); a chat is `role:content;` and ends in `>`."""
    template = (
        "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('no role critic') }}{% endif %}"
        "{{ m.role + ':' + m.content + ';' }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    return ByT5Tokenizer(chat_template=template)


@pytest.fixture
def gsm8k_file():
    return str(FIXTURES / "gsm8k_tiny.jsonl")


@pytest.fixture
def write_jsonl(tmp_path):
    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write
