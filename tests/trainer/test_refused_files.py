"""Every file that is refused is named, with its line or row and the cause, and without a traceback."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import ByT5Tokenizer

from rlx.config.schema import DataConfig
from rlx.data import prompts
from rlx.data.prompts import PromptDataset
from rlx.errors import ExplainedError, wrapped
from rlx.models.loading import ModelError, load_tokenizer

Row = dict[str, Any]
SURROGATE = "\ud800"
HALF = r"half a surrogate pair, '\ud800', such as half an emoji"


def row(**changes: Any) -> Row:
    """A right row, with some columns changed; `...` removes one."""
    right = {
        "prompt": [{"role": "user", "content": "1 + 1"}],
        "data_source": "d",
        "reward_model": {"style": "rule", "ground_truth": "2"},
    }
    return {name: value for name, value in {**right, **changes}.items() if value is not ...}


def text(*rows: Row) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in rows)


def parquet(folder: Path, columns: dict[str, Any] | pa.Table) -> bytes:
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), folder / "source")
    return (folder / "source").read_bytes()


def columns(**changes: Any) -> dict[str, Any]:
    """Columns of two right rows."""
    names = {name: [value] * 2 for name, value in row().items()}
    return {name: value for name, value in {**names, **changes}.items() if value is not ...}


class Fault(NamedTuple):
    """A faulty file: its content (of the folder that it is in), and what the message says beside its name."""

    content: bytes | Callable[[Path], bytes]
    said: str
    name: str = "rows.jsonl"


def second(**changes: Any) -> bytes:
    return text(row(), row(**changes))


def of_parquet(said: str, harm: Callable[[bytes], bytes] = bytes, only: Any = None, **changes: Any) -> Fault:
    """A file of right rows with other columns, or of `only` these; `harm` changes its bytes."""
    return Fault(
        lambda folder: harm(parquet(folder, columns(**changes) if only is None else only)), said, "rows.parquet"
    )


FAULTS = {
    # Lines
    "no JSON": Fault(text(row()) + b"{'a': 1}\n", "line 2: got"),
    "a torn line": Fault(text(row(), row())[:-20], "line 2: got"),
    "a list": Fault(text(row()) + b"[1]\n", "line 2: got a JSON list"),
    "a NUL byte": Fault(text(row()) + b'{"a": "\x00"}\n', "line 2: got"),
    "no UTF-8": Fault(text(row()) + b'{"a": "\xff"}\n', "line 2: cannot be read as UTF-8"),
    "UTF-16": Fault("{}\n".encode("utf-16"), "line 1: cannot be read as UTF-8"),
    "nested without end": Fault(text(row()) + b"[" * 100_000 + b"\n", "line 2: got"),
    "empty": Fault(b"", "has no rows"),
    "an array of rows": Fault(b"[" + text(row()).strip() + b"]", "line 1: got a JSON list"),
    # Rows of JSONL
    "no prompt at all": Fault(text(row(prompt=...)), "expected also ['prompt']"),
    "no prompt": Fault(second(prompt=...), "line 2: prompt is None"),
    "an empty text": Fault(second(prompt=""), "line 2: the prompt is empty"),
    "a message without role": Fault(second(prompt=[{"content": "a"}]), "line 2: prompt is [{"),
    "a message of parts": Fault(second(prompt=[{"role": "user", "content": ["a"]}]), "line 2: prompt is [{"),
    "half a surrogate pair": Fault(second(prompt=SURROGATE), f"line 2: prompt holds {HALF}"),
    "half a pair in a chat": Fault(
        second(prompt=[{"role": "user", "content": SURROGATE}]), f"line 2: prompt holds {HALF}"
    ),
    "half a pair in a tool": Fault(
        second(prompt=[{"role": "user", "content": "a"}], tools=[{"name": SURROGATE}]), f"line 2: tools holds {HALF}"
    ),
    "a role that the template refuses": Fault(second(prompt=[{"role": "critic", "content": "a"}]), "no role critic"),
    "a template without end": Fault(second(prompt=[{"role": "endless", "content": "a"}]), "line 2: the tokenizer"),
    "a long prompt": Fault(second(prompt="a" * 65), "line 2: the prompt has 65 tokens"),
    "no data source": Fault(second(data_source=...), "line 2: data_source is None"),
    "no reward model": Fault(second(reward_model=...), "line 2: reward_model is None"),
    "no ground truth": Fault(second(reward_model={"style": "rule"}), "line 2: reward_model is {'style'"),
    "extra_info of a list": Fault(second(extra_info=[1]), "line 2: extra_info is [1]"),
    "an answer without ####": Fault(text({"question": "1 + 1", "answer": "2"}), "line 1: "),
    "a question of a number": Fault(text({"question": 1, "answer": "#### 2"}), "line 1: got question 1"),
    # Parquet
    "half a Parquet": of_parquet("cannot be read as Parquet", lambda data: data[:-100]),
    "damaged pages": of_parquet("cannot be read as Parquet", lambda data: b"PAR1" + b"\xff" * 300 + data[304:]),
    "Parquet without rows": of_parquet("has no rows", only={"prompt": pa.array([], pa.string())}),
    "Parquet without a column": of_parquet("expected also ['reward_model']", reward_model=...),
    "a column twice": of_parquet(
        "['prompt', 'prompt'], expected different names",
        only=pa.Table.from_arrays([pa.array(["a"])] * 2, ["prompt"] * 2),
    ),
    "a null in Parquet": of_parquet("row 2: prompt is None", prompt=["a", None]),
    "text that is no UTF-8": of_parquet(
        "row 2: cannot be read (UnicodeDecodeError",
        prompt=pa.array([b"a", b"\xff"]).view(pa.binary()).cast(pa.string(), safe=False),
    ),
    "a time out of range": of_parquet("row 2: ", extra_info=pa.array([0, 2**62], pa.timestamp("us"))),
}


@pytest.fixture(scope="module")
def tokenizer() -> ByT5Tokenizer:
    template = (
        "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('no role critic') }}{% endif %}"
        "{% if m.role == 'endless' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    return ByT5Tokenizer(chat_template=template)


@pytest.mark.parametrize("name", FAULTS)
def test_a_refused_data_file(name: str, tokenizer: ByT5Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if name == "a template without end":
        monkeypatch.setattr(prompts, "TEMPLATE_LIMIT_S", 1.0)
    fault = FAULTS[name]
    file = tmp_path / fault.name
    file.write_bytes(fault.content if isinstance(fault.content, bytes) else fault.content(tmp_path))
    with pytest.raises(ExplainedError) as raised:
        PromptDataset([str(file)], DataConfig(max_prompt_length=64), tokenizer, "train")
    message = str(raised.value)
    assert message.startswith(str(file)) and fault.said in message, message
    assert raised.value.__cause__ is None, "the driver would print a traceback"
    assert len(message.replace(str(file), "")) < 500, "it quotes too much"
    assert all(len(line) <= 100 or str(file) in line for line in wrapped(message).splitlines())


MODEL_FAULTS = {
    "no JSON": (b'{"model_type":\n qwen3}', "cannot be read as JSON (Expecting value: line 2 column 2"),
    "empty": (b"", "cannot be read as JSON (Expecting value: line 1"),
    "half": (b'{"model_type": "qwen3", ', "cannot be read as JSON (Expecting property name"),
    "no text": (b"\xff\xfe\xfd", "cannot be read as JSON ("),
    "a list": (b"[]", "got a JSON list, expected an object"),
    "nested without end": (b"[" * 100_000, "cannot be read as JSON ("),
}


@pytest.mark.parametrize("fault", MODEL_FAULTS)
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_a_refused_file_of_a_model(name: str, fault: str, tmp_path: Path):
    content, said = MODEL_FAULTS[fault]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError) as raised:
        load_tokenizer(str(tmp_path), trust_remote_code=False)
    assert str(raised.value).startswith(f"{tmp_path / name}: {said}") and raised.value.__cause__ is None
