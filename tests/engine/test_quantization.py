"""`model.quantization=nf4`: LoRA on an NF4 base computes the bits of LoRA on the dequantised base, streamed or resident."""

import pytest
import torch
from test_layer_offload import assert_same

pytest.importorskip("bitsandbytes", reason="NF4 needs bitsandbytes (rlx[nf4])")


@pytest.fixture(scope="module")
def wide_folder(tiny_folder):
    """A two-layer Qwen3 whose widths are multiples of 64."""
    return tiny_folder(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)


def assert_all_same(ones, others):
    for one, other in zip(ones, others, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(
    ("head", "dtype", "streams"),
    [
        ("lm", "fp32", True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("lm", "fp32", False), ("lm", "bf16", True), ("value", "fp32", True))
        ),
    ],
)
def test_training_is_that_on_the_dequantised_base(wide_folder, one_rank, tmp_path, head, dtype, streams):
    """Streamed NF4 weights, adapters, and a reference with adapters off, beside everything resident and in full."""
    ((results, again, merged, held, streamed),) = one_rank(
        "quantization", "compared", wide_folder, str(tmp_path), head, dtype, streams
    )
    for other in results[1:]:
        assert_all_same(results[0], other)
    assert_all_same(*again)  # the engine that saved, and the one that loaded
    for other in merged[1:]:
        for name, weight in merged[0].items():
            assert torch.equal(other[name].to(weight.dtype), weight), name
    if head == "lm":
        assert held[0] == held[1] * 9 / 16 / (4 if dtype == "fp32" else 2)
    assert (streamed > 0) == streams


@pytest.mark.slow
def test_sharded_weights(wide_folder, two_ranks, tmp_path):
    for small, full, sizes in two_ranks("quantization", "on_two", wide_folder, str(tmp_path)):
        assert_all_same(small, full)
        assert sizes == {64 * 128 * 9 // 16 // 2}
