"""The look at data files before anything starts finds what a run would find, by the same code."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlx.config.check.validate import check
from rlx.config.compose.command_line import compose
from rlx.config.machine import Machine
from rlx.data.files import DataError
from rlx.data.prompts import PromptDataset
from rlx.models.tiny import make_tiny_tokenizer
from rlx.trainer.try_inputs import check_data, training_rows

VERL = {"data_source": "math", "prompt": "2 + 3", "reward_model": {"ground_truth": "5"}}
PLAIN = {"prompt": "2 + 3", "answer": "5"}
OWN = "custom_reward_function.path=reward.py"
FEW = ("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2")


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., str]:
    def write(*rows: dict, kind: str = "jsonl") -> str:
        path = tmp_path / f"rows.{kind}"
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(list(rows)), path)
        else:
            path.write_text("".join(f"{json.dumps(row)}\n\n" for row in rows))
        return str(path)

    return write


def found(file: str, *overrides: str) -> list[str]:
    composed = compose([f"data.train_files={file}", *FEW, *overrides])
    return [" ".join(str(fault).split()) for fault in check_data(composed.partial, composed.broken)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_in_a_form_are_no_fault(written, kind: str):
    assert found(written(VERL, VERL, kind=kind)) == []
    assert found(written(PLAIN, PLAIN, kind=kind), "data.answer_key=answer", OWN) == []
    assert found(written({"question": "?", "answer": "#### 5"}, {"question": "?", "answer": "5"}, kind=kind)) == [], (
        "only the first row is read"
    )


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("row", "keys", "remedy"),
    [
        (PLAIN, (), "remedy: the rows have a column 'answer': set data.answer_key=answer. For"),
        ({"problem": "?", "solution": 5}, (), "set data.prompt_key=problem data.answer_key=solution. For"),
        (PLAIN, ("data.answer_key=answr",), "remedy: set data.answer_key=answer, or name"),
        (VERL, ("data.answer_key=answer",), "remedy: remove data.answer_key: the answers"),
        ({"question": "?", "label": 1}, ("data.answer_key=x",), "set data.prompt_key=question data.answer_key=label,"),
        ({"a": "?", "b": 1}, ("data.answer_key=x",), "remedy: name the columns there are with data.prompt_key and"),
        ({"prompt": "?", "data_source": "a"}, (), "reward_model holds {style, ground_truth}; for a column with the"),
        ({**VERL, "reward_model": {"style": "rule"}}, (), "1: reward_model is"),
        ({**PLAIN, "prompt": 3}, ("data.answer_key=answer",), "1: prompt is 3"),
        ({**PLAIN, "prompt": '[{"role": 1}]'}, ("data.answer_key=answer",), "the list of messages itself"),
    ],
)
def test_a_first_row_in_no_form_is_one_fault_whose_likeliest_remedy_comes_first(written, kind, row, keys, remedy):
    file = written(row, row, kind=kind)
    (fault,) = found(file, *keys)
    assert fault.startswith(f"data.train_files: the rows of {file} cannot be used") and remedy in fault
    with pytest.raises(DataError) as of_run:
        config = compose([f"data.train_files={file}", *keys]).config.data
        PromptDataset([file], config, make_tiny_tokenizer(), "train")
    assert remedy.removeprefix("remedy: ") in str(of_run.value), "the run says the same"


def test_a_faulty_first_row_brings_the_faults_of_the_others(written):
    numbers = [{**PLAIN, "prompt": number} for number in (1, 2)]
    (fault,) = found(written(numbers[0], PLAIN, numbers[1]), "data.answer_key=answer")
    assert "line 1: prompt is 1," in fault and "line 5: prompt is 2," in fault
    unread = "data.train_max_samples=2"
    (fault,) = found(written(numbers[0], PLAIN, numbers[1]), "data.answer_key=answer", unread)
    assert "line 1: prompt is 1," in fault and "prompt is 2" not in fault


MINE = {**VERL, "data_source": "mine"}
JUDGE = "reward_model.enable=True"


@pytest.mark.parametrize(
    ("keys", "remedy"),
    [
        ((), "set custom_reward_function.path to a file with a compute_score, or name the right column"),
        ((JUDGE, "reward_model.rule_weight=0.5"), "set custom_reward_function.path to"),
        (("environment.name=calculator", "environment.rewards=add"), "set custom_reward_function.path to"),
        (
            (OWN, "custom_reward_function.data_sources=[a]"),
            "add 'mine' to custom_reward_function.data_sources, or name",
        ),
    ],
)
def test_a_first_row_that_no_function_scores_is_a_fault(written, keys: tuple[str, ...], remedy: str):
    file = written(MINE, MINE)
    (fault,) = found(file, f"data.val_files={file}", *keys)
    assert fault.startswith(
        "no reward function for data source 'mine' got: 'mine' in the first row of data.train_files="
    )
    assert f", data.val_files={file} expected: " in fault and "math_dapo" in fault and f"remedy: {remedy}" in fault


def test_rows_without_a_source_that_no_function_scores_are_called_so(written):
    file = written(PLAIN, PLAIN)
    (fault,) = found(file, "data.answer_key=answer")
    assert fault.startswith(
        f"no reward function for rows without a data source got: no data_source in the first row of data.train_files={file} "
    )
    assert "remedy: set custom_reward_function.path to a file" in fault
    (fault,) = found(file, "data.answer_key=answer", OWN, "custom_reward_function.data_sources=[a]")
    assert "add 'answer' (rows without a data source) to custom_reward_function.data_sources" in fault


def test_files_without_rows_are_one_fault_of_the_configuration(written, tmp_path: Path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    splits, unknown = "a data set with several splits was named", "a data file is of an unknown kind"
    for file, what in ((str(tmp_path), splits), (written(PLAIN, kind="txt"), unknown)):
        composed = compose([f"data.train_files={file}", "data.answer_key=answer"])
        assert check_data(composed.partial, composed.broken) == ()
        faults = check(composed, Machine(gpus=0, cpus=1, packages=frozenset())).faults
        assert [fault.what for fault in faults if file in fault.got] == [what]


@pytest.mark.parametrize(
    "keys",
    [
        (OWN,),
        (OWN, "custom_reward_function.data_sources=[a,mine]"),
        (JUDGE, "reward_model.rule_weight=0"),
        ("environment.name=calculator", "environment.rewards=replace"),
        ("custom_reward_function.pth=reward.py",),
    ],
)
def test_a_source_of_a_function_a_model_or_an_environment_of_ones_own_is_no_fault(written, keys: tuple[str, ...]):
    assert found(written(MINE, MINE), *keys) == []


def test_the_source_of_a_file_that_the_run_may_not_reach_is_not_judged(written, tmp_path: Path):
    first = tmp_path / "first.jsonl"
    first.write_text(f"{json.dumps(VERL)}\n" * 2)
    both = f"[{first},{written(MINE)}]"
    assert found(both, "data.train_max_samples=2") == [] and len(found(both)) == 1


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_batch_larger_than_the_data_is_a_fault_unless_the_run_only_validates(written, kind: str):
    file = written(*[VERL] * 7, kind=kind)
    assert training_rows(compose([f"data.train_files={file}"]).partial) == 7
    (fault,) = found(file, "data.train_batch_size=16")
    assert "data.train_batch_size is larger than the data got: 16 with 7 prompts expected: 1 to 7" in fault
    assert found(file, "data.train_batch_size=16", "trainer.val_only=True") == []
    assert found(file, "data.train_batch_size=4", "data.train_max_samples=3") != []
    filtered = ("algorithm.filter_groups.enable=True", "data.gen_batch_size=8")
    assert found(file, *filtered) != [] and found(file, filtered[1]) == []
    assert "64 with 32" in " ".join(
        found("builtin:arithmetic", "data.train_batch_size=64", "data.arithmetic.train_size=32")
    )


def test_missing_files_keys_that_were_not_read_and_classes_of_ones_own_are_not_judged(written, tmp_path: Path):
    assert found(str(tmp_path / "none.jsonl")) == []
    assert found(written(PLAIN, PLAIN), "data.anser_key=answer") == []
    (tmp_path / "own.py").write_text("")
    assert found(written(PLAIN), f"data.custom_cls.path={tmp_path / 'own.py'}", "data.custom_cls.name=Mine") == []


@pytest.mark.parametrize("text", ["", "[1]\n", "{"])
def test_a_file_that_cannot_be_read_is_a_fault(tmp_path: Path, text: str):
    for kind in ("jsonl", "parquet"):
        (tmp_path / f"bad.{kind}").write_text(text)
        assert len(found(str(tmp_path / f"bad.{kind}"))) == 1
