import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlx.data.batch import INFO, TENSORS, Batch, BatchError, concat


def make(rows=3, prompt=2, response=4, start=0):
    total = prompt + response
    ids = torch.arange(start, start + rows * total).reshape(rows, total)
    mask = torch.ones(rows, total, dtype=torch.bool)
    mask[:, 0] = False
    return Batch.of(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "response_mask": torch.ones(rows, response, dtype=torch.bool),
            "scores": torch.arange(rows, dtype=torch.float32),
        },
        {"data_source": [f"s{start + i}" for i in range(rows)]},
    )


def same(one, other):
    return (
        one.tensors.keys() == other.tensors.keys()
        and bool((one.tensors == other.tensors).all())
        and one.info == other.info
    )


def test_layout_names_every_writer():
    assert {column.writer for column in TENSORS.values()} <= {
        *("data", "trainer", "rollout", "rewards", "actor", "ref", "critic", "reward", "algorithms")
    }
    assert all(set(column.shape) <= set("BPRTLK") and column.shape[0] == "B" for column in TENSORS.values())
    assert set(INFO) >= {"data_source", "ground_truth", "extra_info", "prompt_text", "response_text"}


@pytest.mark.parametrize(
    "tensors, info, what",
    [
        ({}, {}, "at least one column"),
        ({"scores": torch.tensor(1.0)}, {}, "numbers of rows"),
        ({"scores": torch.zeros(2), "seed": torch.zeros(3, dtype=torch.int64)}, {}, "numbers of rows"),
        ({"score": torch.zeros(2)}, {}, "unknown column 'score'"),
        ({"seed": torch.zeros(2)}, {}, r"seed: got shape \(2,\) torch.float32, expected \(B\) torch.int64"),
        ({"scores": torch.zeros(2, 1)}, {}, "scores: got shape"),
        ({"scores": torch.zeros(2, dtype=torch.int64)}, {}, "scores: got shape"),
        ({"values": torch.zeros(2, 3), "returns": torch.zeros(2, 4)}, {}, "R is 4, but 3"),
        ({"scores": torch.zeros(2)}, {"reward": [1, 2]}, "unknown info 'reward'"),
        ({"scores": torch.zeros(2)}, {"data_source": ["a"]}, "has 1 entries, the batch 2 rows"),
    ],
)
def test_faults(tensors, info, what):
    with pytest.raises(BatchError, match=what):
        Batch.of(tensors, info)


def test_wider_floats_are_fine():
    assert Batch.of({"scores": torch.zeros(2, dtype=torch.float64)})["scores"].dtype == torch.float64


def test_missing_column_says_who_writes_it():
    with pytest.raises(BatchError, match=r"no column 'values' \(written by critic\); it has \['attention_mask'"):
        make()["values"]
    with pytest.raises(BatchError, match="no column of that name exists"):
        make()["value"]
    assert "scores" in make() and "values" not in make()


def test_with_select_drop():
    batch = make()
    more = batch.with_(values=torch.ones(3, 4), info={"ground_truth": [1, 2, 3]})
    assert more["values"].sum() == 12 and "values" not in batch
    assert more.info == {**batch.info, "ground_truth": [1, 2, 3]} and "ground_truth" not in batch.info
    assert more["input_ids"].data_ptr() == batch["input_ids"].data_ptr()
    with pytest.raises(BatchError, match="R is 5, but 4"):
        batch.with_(values=torch.ones(3, 5))
    sent = more.select("values", "scores")
    assert set(sent.tensors.keys()) == {"values", "scores"} and sent.info == {}
    with pytest.raises(BatchError, match="written by ref"):
        more.select("ref_log_probs")
    assert same(more.drop("values", "returns"), batch.with_(info={"ground_truth": [1, 2, 3]}))


@given(st.lists(st.integers(0, 4), max_size=7))
def test_rows_repeats_reorders_and_may_be_empty(index):
    batch = make(rows=5)
    taken = batch.rows(index)
    assert len(taken) == len(index)
    assert torch.equal(taken["input_ids"], batch["input_ids"][index])
    assert taken.info["data_source"] == [f"s{i}" for i in index]


@given(st.lists(st.integers(0, 5), max_size=5))
def test_concat_undoes_a_cut(cuts):
    batch, edges = make(rows=5), sorted({0, *cuts, 5})
    parts = [batch.rows(range(start, min(stop, 5))) for start, stop in zip(edges, [*edges[1:], 5], strict=True)]
    assert same(concat(parts), batch)


def test_concat_faults():
    with pytest.raises(BatchError, match="no batch to join"):
        concat([])
    batch = make()
    assert len(concat([batch.rows([]), batch.rows([])])) == 0
    with pytest.raises(BatchError, match="differ in columns or widths"):
        concat([batch, batch.drop("scores")])
    with pytest.raises(BatchError, match="differ in columns or widths"):
        concat([batch, make(prompt=3)])
    with pytest.raises(BatchError, match="differ in info"):
        concat([batch, batch.with_(info={"ground_truth": [1, 2, 3]})])


def test_travels_between_processes_in_one_buffer_of_its_own_bytes():
    trip = lambda value: pickle.loads(pickle.dumps(value))  # noqa: E731
    arrived = trip(make(rows=1000).with_(info={"ground_truth": ["same"] * 1000}))
    assert same(arrived, make(rows=1000).with_(info={"ground_truth": ["same"] * 1000}))
    assert len({column.untyped_storage().data_ptr() for column in arrived.tensors.values()}) == 1
    assert same(trip(arrived), arrived) and same(
        trip(arrived.rows([])), make(rows=1000).with_(info=arrived.info).rows([])
    )
    one, changed = arrived.rows([7]), arrived.with_(scores=torch.ones(1000))
    assert same(trip(one), one) and len(pickle.dumps(one)) < 10_000
    assert len(pickle.dumps(arrived.select("scores"))) < 10_000
    assert same(trip(changed), changed) and trip(changed)["scores"].eq(1).all()
    assert isinstance(trip(BatchError("x")), BatchError)
