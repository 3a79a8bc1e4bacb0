"""`model.layer_offload`: an engine with streamed weights computes the same bits as one with resident weights."""

import pytest
import torch


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_same(one[name], other[name])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize(
    ("head", "save"),
    [
        ("lm", "boundary"),
        ("value", "attention"),
        *(pytest.param("lm", save, marks=pytest.mark.slow) for save in ("auto", "all")),
    ],
)
def test_training_is_the_same(model_folder, one_rank, tmp_path, head, save):
    (((resident, streamed), streamed_bytes, copied_bytes, frozen_bytes),) = one_rank(
        "layer_offload", "compared", model_folder, str(tmp_path), head, save
    )
    for one, other in zip(resident, streamed, strict=True):
        assert_same(one, other)
    assert 0.4 * frozen_bytes < streamed_bytes < frozen_bytes
    assert copied_bytes >= 2 * streamed_bytes


def test_training_from_the_disk_is_the_same(model_folder, one_rank, tmp_path):
    (tmp_path / "weights").mkdir()
    arguments = (model_folder, str(tmp_path), "lm", "boundary", str(tmp_path / "weights"))
    (((resident, streamed), streamed_bytes, copied_bytes, _),) = one_rank("layer_offload", "compared", *arguments)
    for one, other in zip(resident, streamed, strict=True):
        assert_same(one, other)
    assert copied_bytes >= 2 * streamed_bytes > 0


@pytest.mark.parametrize("head", ["lm", "value"])
def test_a_reference_is_the_same(model_folder, one_rank, head):
    ((resident, streamed),) = one_rank("layer_offload", "reference", model_folder, head)
    assert_same(resident, streamed)


@pytest.mark.parametrize("machines", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_processes_share_one_copy(model_folder, two_ranks, tmp_path, machines):
    """Both ways on two processes, of one machine or of two; the streaming one also from its checkpoint."""
    for resident, streamed, loaded, names in two_ranks(
        "layer_offload", "shared", model_folder, str(tmp_path), machines
    ):
        for one, other, third in zip(resident, streamed, loaded, strict=True):
            assert_same(one, other)
            assert_same(one, third)
        assert names == {"/memfd:frozen weights (deleted)"}


def test_processes_share_one_file_of_a_disk(model_folder, two_ranks, tmp_path):
    (tmp_path / "weights").mkdir()
    found = two_ranks("layer_offload", "shared", model_folder, str(tmp_path), 1, str(tmp_path / "weights"))
    for resident, streamed, loaded, _ in found:
        for one, other, third in zip(resident, streamed, loaded, strict=True):
            assert_same(one, other)
            assert_same(one, third)
    (_, _, _, first), (_, _, _, second) = found
    assert first == second != set() and all(name.endswith("(deleted)") for name in first)
    assert list((tmp_path / "weights").iterdir()) == []
