import pytest

from rlx.rollout.protocol import Sampling


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 0},
        {"max_tokens": 4, "temperature": -0.1},
        {"max_tokens": 4, "temperature": float("nan")},
        {"max_tokens": 4, "temperature": float("inf")},
        {"max_tokens": 4, "top_p": 0.0},
        {"max_tokens": 4, "top_p": 1.1},
        {"max_tokens": 4, "top_k": 0},
        {"max_tokens": 4, "top_k": -2},
    ],
)
def test_a_value_out_of_range_is_named(values):
    with pytest.raises(ValueError, match=list(values)[-1]):
        Sampling(**values)
