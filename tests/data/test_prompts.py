import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from rlx.config.schema import ArithmeticConfig, CustomClassConfig, DataConfig
from rlx.data.arithmetic import make_problems
from rlx.data.files import DataError
from rlx.data.prompts import PromptDataset, load_prompts
from rlx.user_code import UserCodeError


def row(content="hi", index=0, **more):
    chat = [{"role": "user", "content": content}]
    return {
        "data_source": "openai/gsm8k",
        "prompt": chat,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"index": index},
        **more,
    }


def load(tokenizer, *files, split="train", **options):
    return PromptDataset(files, DataConfig(**options), tokenizer, split)


def texts(dataset):
    return dataset.batch(range(len(dataset))).info["prompt_text"]


def test_batch(tokenizer, write_jsonl):
    dataset = load(tokenizer, write_jsonl([row("hello", 0), row("é", 1), row("", 2)]))
    assert len(dataset) == 3 and dataset.report == ""
    batch = dataset.batch([1, 0, 1])
    batch.check()
    longest, shorter = list(b"user:hello;>"), list("user:é;>".encode())
    width = len(longest)
    assert batch["prompt_ids"].shape == batch["prompt_mask"].shape == (3, width)
    assert batch["prompt_ids"][1].tolist() == [byte + 3 for byte in longest]
    pad = width - len(shorter)
    assert batch["prompt_ids"][0].tolist() == [tokenizer.pad_token_id] * pad + [byte + 3 for byte in shorter]
    padded = [False] * pad + [True] * (width - pad)
    assert batch["prompt_mask"].tolist() == [padded, [True] * width, padded]
    assert batch.info == {
        "data_source": ["openai/gsm8k"] * 3,
        "ground_truth": ["7"] * 3,
        "extra_info": [{"index": 1}, {"index": 0}, {"index": 1}],
        "raw_prompt": [[{"role": "user", "content": text}] for text in ("é", "hello", "é")],
        "prompt_text": ["user:é;>", "user:hello;>", "user:é;>"],
    }


def test_data_sources_are_those_of_the_rows_that_are_left(tokenizer, write_jsonl):
    rows = [row(data_source="a"), row("long " * 99, data_source="b"), row(data_source="c"), row(data_source="d")]
    options = {"filter_overlong_prompts": True, "train_max_samples": 3, "max_prompt_length": 64}
    assert load(tokenizer, write_jsonl(rows), **options).data_sources == {"a", "c"}


def test_a_batch_is_as_wide_as_its_own_longest_prompt(tokenizer, write_jsonl):
    dataset = load(tokenizer, write_jsonl([row("x" * 100), row("x"), row("xyz")]))
    assert dataset.batch([1, 2])["prompt_ids"].shape[1] == len("user:xyz;>")


def test_pads_with_eos_where_there_is_no_pad_token(write_jsonl):
    tokenizer = ByT5Tokenizer(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer.pad_token = None
    batch = load(tokenizer, write_jsonl([row("abc"), row("a")])).batch([0, 1])
    assert batch["prompt_ids"][1].tolist() == [tokenizer.eos_token_id] * 2 + [ord("a") + 3]
    assert batch["prompt_mask"][1].tolist() == [False, False, True]
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="neither pad_token nor eos_token"):
        load(tokenizer, write_jsonl([row()]))


def test_parquet_of_verl_rows(tokenizer, tmp_path):
    # Messages of different fields: Arrow gives each message all of them, None where it had none.
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi", "name": "Ann"}]
    rows = [row(prompt=chat), row("hello", reward_model={"style": "rule", "ground_truth": "8", "more": 1})]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    batch = load(tokenizer, str(path)).batch([0, 1])
    assert batch.info["prompt_text"] == ["system:be kind;user:hi;>", "user:hello;>"]
    assert batch.info["ground_truth"] == ["7", "8"]


def test_text_prompts_are_not_closed_with_eos(tokenizer, write_jsonl):
    dataset = load(tokenizer, write_jsonl([row(prompt="Once"), row("chat")]))
    batch = dataset.batch([0, 1])
    assert batch.info["prompt_text"] == ["Once", "user:chat;>"]
    assert tokenizer("Once").input_ids[-1] == tokenizer.eos_token_id
    assert batch["prompt_ids"][0][batch["prompt_mask"][0]].tolist() == [byte + 3 for byte in b"Once"]


TEMPLATE = "{{ bos_token }}{% for tool in tools or [] %}[{{ tool.name }}]{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"


def begins_texts():
    """A tokenizer that begins each text with <s>, which may also be written."""
    tokens = ["<s>", "</s>", "<x>", *map(chr, range(32, 127))]
    words = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    words.add_special_tokens(tokens[:3])
    words.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)


@pytest.mark.parametrize("prompt", ["<s>hi", "hi", "hi</s>", "<s>hi</s>"])
def test_a_text_begins_once_and_keeps_its_own_end(write_jsonl, prompt):
    tokenizer = begins_texts()
    batch = load(tokenizer, write_jsonl([row(prompt=prompt)])).batch([0])
    whole = prompt if prompt.startswith("<s>") else f"<s>{prompt}"
    assert batch["prompt_ids"][0].tolist() == tokenizer.encode(whole, add_special_tokens=False)


@pytest.mark.parametrize("write", [list, json.dumps])
def test_the_template_shows_the_tools_of_a_row(write_jsonl, write):
    tools = [write([{"name": name, "absent": None}]) for name in "ab"]
    rows = [row("1", tools=tools[0]), row("2"), row("3", tools=tools[1]), row("4", tools=[]), row("5", tools=tools[0])]
    batch = load(begins_texts(), write_jsonl(rows)).batch(range(5))
    shown = [text.rpartition("<s>")[2].replace(" ", "") for text in batch.info["prompt_text"]]
    assert shown == ["[a]1", "2", "[b]3", "4", "[a]5"]
    for faulty, what in ((7, "tools is 7"), ("{", "expected a JSON list"), ([1], "expected a list of tools")):
        with pytest.raises(DataError, match=f"line 1: .*{what}"):
            load(begins_texts(), write_jsonl([row("1", tools=faulty)]))
    with pytest.raises(DataError, match="tools and a prompt of text"):
        load(begins_texts(), write_jsonl([row(prompt="1", tools=tools[0])]))


@pytest.mark.parametrize("column", ["image", "images", "video", "videos", "audio", "audios"])
@pytest.mark.parametrize("options", [{}, {"answer_key": "answer"}])
def test_parts_of_a_prompt_that_are_no_text_are_refused_by_column(tokenizer, write_jsonl, column, options):
    rows = [row(answer="1"), row(answer="1", **{column: []}), row(answer="1", **{column: ["a"]})]
    assert len(load(tokenizer, write_jsonl(rows[:2]), **options)) == 2
    with pytest.raises(DataError, match=f"line 3: {column} holds a part of the prompt.*text"):
        load(tokenizer, write_jsonl(rows), **options)


def test_tokens_beyond_the_embedding_are_named(write_jsonl):
    dataset = load(begins_texts(), write_jsonl([row(prompt="a"), row(prompt="}a"), row(prompt="~")]))
    dataset.require_tokens_below(98)
    with pytest.raises(DataError) as raised:
        dataset.require_tokens_below(96)
    assert "line 2: got the token '}' with id 96, expected ids below 96" in str(raised.value)
    assert "line 3: got the token '~' with id 97" in str(raised.value)
    rows = [row(prompt="a" * 50), row(prompt="a"), row(prompt="~")]
    kept = load(begins_texts(), write_jsonl(rows), max_prompt_length=8, filter_overlong_prompts=True)
    assert len(kept) == 2
    with pytest.raises(DataError, match=r"line 3: got the token '~' with id 97"):
        kept.require_tokens_below(96)


@pytest.mark.parametrize("answer", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_no_answer(tokenizer, write_jsonl, answer):
    rows = [row(), row(reward_model={"ground_truth": answer})]
    with pytest.raises(
        DataError, match=r"line 2: ground_truth of reward_model is (nan|inf), expected the right answer"
    ):
        load(tokenizer, write_jsonl(rows))
    with pytest.raises(DataError, match=r"line 1: answer is (nan|inf)"):
        load(tokenizer, write_jsonl([{"prompt": "a", "answer": answer}]), answer_key="answer")


@pytest.mark.parametrize("completion", ["4", [{"role": "assistant", "content": "4"}]])
def test_prompt_and_completion(tokenizer, write_jsonl, completion):
    batch = load(tokenizer, write_jsonl([{"prompt": "2 + 2", "completion": completion}])).batch([0])
    assert batch.info["ground_truth"] == ["4"] and batch.info["prompt_text"] == ["user:2 + 2;>"]


def test_columns_by_other_names_and_no_extra_info(tokenizer, write_jsonl):
    rows = [{"q": "hi", "source": "a", "reward_model": {"ground_truth": 5}}]
    batch = load(tokenizer, write_jsonl(rows), prompt_key="q", reward_fn_key="source").batch([0])
    texts = {"raw_prompt": ["hi"], "prompt_text": ["hi"]}
    assert batch.info == {"data_source": ["a"], "ground_truth": [5], "extra_info": [{}], **texts}


def test_plain_columns_if_the_answers_column_is_named(tokenizer, write_jsonl):
    chat = [{"role": "system", "content": "kind"}, {"role": "user", "content": "1"}]
    rows = [{"prompt": "2 + 3", "answer": 5, "level": "easy"}, {"prompt": chat, "answer": "1", "data_source": "b"}]
    dataset = load(tokenizer, write_jsonl(rows), answer_key="answer")
    assert dataset.data_sources == {"answer", "b"}
    batch = dataset.batch([0, 1])
    assert batch.info["prompt_text"] == ["user:2 + 3;>", "system:kind;user:1;>"]
    assert batch.info["ground_truth"] == [5, "1"] and batch.info["extra_info"][0]["level"] == "easy"
    question = write_jsonl([{"question": "2 + 3", "answer": "5 #### no GSM8K"}])
    assert load(tokenizer, question, prompt_key="question", answer_key="answer").batch([0]).info["ground_truth"] == [
        "5 #### no GSM8K"
    ]


def test_plain_columns_without_a_chat_template_stay_text(write_jsonl):
    file = write_jsonl([{"prompt": "2 + 3", "answer": 5}])
    assert texts(load(ByT5Tokenizer(), file, answer_key="answer")) == ["2 + 3"]


def test_all_faulty_rows_come_at_once_each_by_its_line_and_with_its_remedy(tokenizer, tmp_path):
    good = '{"prompt": "1 + 1", "answer": "2"}'
    bad = [
        '{"prompt": "%s", "answer": "2"}' % ("x" * 99),
        '{"prompt": "", "answer": "2"}',
        '{"prompt": 7, "answer": "2"}',
        '{"prompt": "1',
        '{"prompt": "1 + 1"}',
        "",  # blank, which is no row but counts as a line
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join([good, *bad, *['{"prompt": ""}'] * 8, ""]))
    config = DataConfig(answer_key="answer", max_prompt_length=64)
    with pytest.raises(DataError) as caught:
        PromptDataset([str(tmp_path / "rows.jsonl")], config, tokenizer, "train")
    head, *lines = str(caught.value).splitlines()
    assert head == f"{tmp_path}/rows.jsonl: rows that cannot be used: 13; lines and rows are counted from 1"
    assert [line.split()[1].rstrip(":") for line in lines[:10]] == ["2", "3", "4", "5", "6", *map(str, range(8, 13))]
    said = '106 tokens|the prompt is empty|prompt is 7, expected text|got \'{"prompt": "1\'|answer is missing'
    assert all(part in line for part, line in zip(said.split("|"), lines[:5], strict=True)), lines
    assert [line.strip() for line in lines[10:]] == ["and 3 more"]
    assert "filter_overlong_prompts" in lines[0], "two remedies: each is beside its lines"
    assert all(line.endswith("; correct the row or remove it") for line in lines[1:10])


def test_generated_problems_and_files_one_after_the_other(tokenizer, gsm8k_file, write_jsonl):
    arithmetic = ArithmeticConfig(train_size=30, val_size=20)
    files = (gsm8k_file, "builtin:arithmetic", write_jsonl([row("last")]))
    dataset = load(tokenizer, *files, arithmetic=arithmetic)
    assert len(dataset) == 6 + 30 + 1
    assert dataset.batch([5]).info["ground_truth"] == ["25000"]
    first, last = make_problems(arithmetic, "train")[0], make_problems(arithmetic, "train")[29]
    assert dataset.batch([35, 6]).info["extra_info"] == [last["extra_info"], first["extra_info"]]
    assert dataset.batch([36]).info["prompt_text"] == ["user:last;>"]
    assert len(load(tokenizer, "builtin:arithmetic", split="val", arithmetic=arithmetic)) == 20


def test_many_rows_over_several_chunks(tokenizer, write_jsonl):
    dataset = load(tokenizer, write_jsonl([row(str(i)) for i in range(1300)]))
    assert dataset.batch([0, 511, 512, 1299]).info["prompt_text"] == [f"user:{i};>" for i in (0, 511, 512, 1299)]


def test_max_samples(tokenizer, gsm8k_file, write_jsonl):
    files = gsm8k_file, write_jsonl([row("a"), row("b")])
    dataset = load(tokenizer, *files, train_max_samples=7, val_max_samples=2)
    assert len(dataset) == 7 and dataset.batch([6]).info["prompt_text"] == ["user:a;>"]
    assert len(load(tokenizer, *files, split="val", val_max_samples=2)) == 2
    assert len(load(tokenizer, *files, train_max_samples=100)) == 8


@pytest.fixture
def uneven(write_jsonl):
    return write_jsonl([row(prompt="x" * 9), row(prompt="0123456789a"), row(prompt="y" * 10)])


def test_overlong_is_dropped_and_counted(tokenizer, uneven):
    dataset = load(tokenizer, uneven, max_prompt_length=10, filter_overlong_prompts=True)
    assert texts(dataset) == ["x" * 9, "y" * 10]
    assert dataset.report == (
        "train prompts: dropped 1 of 3, which are longer than data.max_prompt_length=10 tokens (the longest has 11)"
    )
    with pytest.raises(DataError, match="no prompt is left; train prompts: dropped 3 of 3"):
        load(tokenizer, uneven, max_prompt_length=8, filter_overlong_prompts=True)
    with pytest.raises(DataError, match=r"no prompt is left; data\.train_max_samples and the files give 0 rows"):
        load(tokenizer, uneven, train_max_samples=0)


@pytest.mark.parametrize(
    "truncation, length, left",
    [("left", 4, "789a"), ("right", 4, "0123"), ("middle", 4, "019a"), ("middle", 5, "0189a"), ("middle", 1, "a")],
)
def test_overlong_is_cut(tokenizer, uneven, truncation, length, left):
    dataset = load(tokenizer, uneven, max_prompt_length=length, truncation=truncation)
    assert texts(dataset)[1] == left
    assert f"cut ({truncation}) 3 of 3" in dataset.report
    assert dataset.batch([0, 1])["prompt_ids"].shape == (2, length)


@pytest.mark.parametrize("options", [{}, {"answer_key": "answer"}])
def test_a_prompt_without_text_is_empty_also_for_a_tokenizer_that_begins_each(write_jsonl, options):
    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "hi": 2}, "</s>"))
    words.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    begins = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    assert begins("")["input_ids"] == [0]
    with pytest.raises(DataError, match=r"line 2: the prompt is empty"):
        load(begins, write_jsonl([row(prompt="hi", answer="1"), row(prompt="", answer="1")]), **options)


def test_tokenizer_without_chat_template(write_jsonl):
    with pytest.raises(DataError, match=r"line 1: the tokenizer or its chat template does not take .* instruct model"):
        load(ByT5Tokenizer(), write_jsonl([row()]))
    assert len(load(ByT5Tokenizer(), write_jsonl([row(prompt="plain")]))) == 1


CUSTOM = """
from rlx.data.prompts import PromptDataset

class Loud(PromptDataset):
    def batch(self, indices):
        batch = super().batch(indices)
        return batch.with_(info={"ground_truth": [f"{truth}!" for truth in batch.info["ground_truth"]]})

class Poor:
    def __init__(self, files, config, tokenizer, split):
        self.report = f"{files} {split}"
"""


@pytest.fixture
def custom(tmp_path, gsm8k_file):
    path = tmp_path / "mine.py"
    path.write_text(CUSTOM)

    def config(name):
        return DataConfig(train_files=(gsm8k_file,), custom_cls=CustomClassConfig(path=str(path), name=name))

    return config


def test_load_prompts_takes_the_files_of_the_split(tokenizer, gsm8k_file):
    config = DataConfig(train_files=(gsm8k_file,), arithmetic=ArithmeticConfig(val_size=9))
    assert type(load_prompts(config, tokenizer, "train")) is PromptDataset
    assert len(load_prompts(config, tokenizer, "train")) == 6
    assert len(load_prompts(config, tokenizer, "val")) == 9


def test_custom_class(tokenizer, custom):
    dataset = load_prompts(custom("Loud"), tokenizer, "train")
    assert dataset.batch([0]).info["ground_truth"] == ["300!"]


@pytest.mark.parametrize(
    "name, what",
    [("Poor", r"Poor in .* lacks \['__len__', 'batch'\]"), ("Rich", "has no 'Rich'"), (None, "name is not set")],
)
def test_custom_class_faults(tokenizer, custom, name, what):
    with pytest.raises(UserCodeError, match=what):
        load_prompts(custom(name), tokenizer, "train")


def test_the_digest_is_of_the_rows_and_not_of_names(tokenizer, write_jsonl):
    rows = [row("a"), row("b")]
    digest = load(tokenizer, write_jsonl(rows)).digest
    assert load(tokenizer, write_jsonl(rows, "moved.jsonl")).digest == digest
    parts = [write_jsonl([each], f"part{number}.jsonl") for number, each in enumerate(rows)]
    assert load(tokenizer, *parts).digest == digest
    others = [rows[::-1], [row("a"), row("c")], [row("a"), row("b", data_source="math")], [row("a"), row("b", index=1)]]
    assert digest not in {load(tokenizer, write_jsonl(each)).digest for each in others}


def test_rows_whose_answers_cannot_be_scored_are_named(tokenizer, write_jsonl):
    files = [write_jsonl([row("a"), row("b")], "first.jsonl"), write_jsonl([row("c")], "second.jsonl")]
    dataset = load(tokenizer, *files)
    assert dataset.answers() == {index: ("openai/gsm8k", "7") for index in range(3)}
    dataset.require_answers({})
    with pytest.raises(DataError) as raised:
        dataset.require_answers({1: "no number", 2: "no answer"})
    assert "line 2: no number" in str(raised.value) and "line 1: no answer" in str(raised.value)
