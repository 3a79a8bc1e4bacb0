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
    ("head", "save", "is_on_disk"),
    [
        ("lm", "boundary", True),
        ("value", "attention", False),
        *(pytest.param("lm", save, False, marks=pytest.mark.slow) for save in ("auto", "all")),
    ],
)
def test_training_is_the_same(model_folder, one_rank, tmp_path, head, save, is_on_disk):
    weights_in = str(tmp_path) if is_on_disk else None
    (((resident, streamed), streamed_bytes, copied_bytes, frozen_bytes),) = one_rank(
        "layer_offload", "compared", model_folder, str(tmp_path), head, save, weights_in
    )
    for one, other in zip(resident, streamed, strict=True):
        assert_same(one, other)
    assert 0.4 * frozen_bytes < streamed_bytes < frozen_bytes
    assert copied_bytes >= 2 * streamed_bytes


@pytest.mark.parametrize("head", ["lm", "value"])
def test_a_reference_is_the_same(model_folder, one_rank, head):
    ((resident, streamed),) = one_rank("layer_offload", "reference", model_folder, head)
    assert_same(resident, streamed)


@pytest.mark.parametrize(
    ("machines", "is_on_disk"), [(1, False), (1, True), pytest.param(2, False, marks=pytest.mark.slow)]
)
def test_processes_share_one_copy(model_folder, two_ranks, tmp_path, machines, is_on_disk):
    """Both ways on two processes, of one machine or of two; the streaming one also from its checkpoint."""
    weights = tmp_path / "weights"
    weights.mkdir()
    arguments = (model_folder, str(tmp_path), machines, str(weights) if is_on_disk else None)
    (*_, first), (*_, second) = found = two_ranks("layer_offload", "shared", *arguments)
    for resident, streamed, loaded, _ in found:
        for one, other, third in zip(resident, streamed, loaded, strict=True):
            assert_same(one, other)
            assert_same(one, third)
    assert first == second != set() and list(weights.iterdir()) == []
    if is_on_disk:
        assert all(name.endswith("(deleted)") for name in first)
    else:
        assert first == {"/memfd:frozen weights (deleted)"}
