import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlx.algorithms.losses import AGGREGATION_MODES, denominator, token_weights
from rlx.config.schema import AGGREGATIONS

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()


def aggregate(loss, mask, mode, horizon=8):
    weights = token_weights(mask, mode, horizon, loss.dtype)
    return (weights * loss).sum() / denominator(mask, mode)


def naive(loss, mask, mode, horizon):
    rows = [
        [x for x, keep in zip(xs, ms, strict=True) if keep] for xs, ms in zip(loss.tolist(), mask.tolist(), strict=True)
    ]
    rows = [row for row in rows if row]
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    per_row = {
        "seq-mean-token-sum": sum,
        "seq-mean-token-mean": lambda row: sum(row) / len(row),
        "seq-mean-token-sum-norm": lambda row: sum(row) / horizon,
    }[mode]
    return sum(map(per_row, rows)) / len(rows)


@given(st.data())
def test_like_the_loop_and_the_same_for_any_cut(data):
    rows, width, seed = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 6)), data.draw(st.integers(0, 999))
    source = torch.Generator().manual_seed(seed)
    loss = torch.randn(rows, width, generator=source, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=source) < 0.6
    mask[0, 0] = True
    order = torch.randperm(rows, generator=source)
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=4)))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
    for mode in AGGREGATION_MODES:
        total = sum((token_weights(mask[p], mode, 7, torch.float64) * loss[p]).sum() for p in parts)
        count = sum(denominator(mask[p], mode) for p in parts)
        assert abs(total / count - naive(loss, mask, mode, 7)) <= 1e-12
        # Rows and columns of padding, as ranks and micro-batches add them, change nothing.
        wide = torch.zeros(rows + 2, width + 3, dtype=torch.bool)
        wide[:rows, :width] = mask
        wide_loss = torch.full(wide.shape, 1e6, dtype=torch.float64)
        wide_loss[:rows, :width] = loss
        assert abs(aggregate(wide_loss, wide, mode, 7) - total / count) <= 1e-12


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_nothing_to_count(mode):
    mask = torch.zeros(2, 3, dtype=torch.bool)
    assert denominator(mask, mode) == 0
    assert token_weights(mask, mode, 3).tolist() == [[0.0] * 3] * 2


def test_denominator_is_exact_beyond_fp32():
    mask = torch.ones(1, 2**24 + 1, dtype=torch.bool)
    assert denominator(mask, "token-mean").item() == 2**24 + 1


def test_modes_are_those_of_the_configuration():
    assert AGGREGATION_MODES == AGGREGATIONS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_have_the_dtype_asked_for(dtype):
    for mode in AGGREGATION_MODES:
        assert token_weights(MASK, mode, 8, dtype).dtype == dtype


def test_errors():
    with pytest.raises(ValueError, match="got 'mean', expected one of token-mean"):
        token_weights(MASK, "mean", 8)
    with pytest.raises(ValueError, match="got 'mean'"):
        denominator(MASK, "mean")
    with pytest.raises(ValueError, match=r"torch\.float32, expected"):
        denominator(MASK.float(), "token-mean")
    with pytest.raises(ValueError, match="horizon: got 0"):
        token_weights(MASK, "seq-mean-token-sum-norm", 0)
    token_weights(MASK, "token-mean", 0)
