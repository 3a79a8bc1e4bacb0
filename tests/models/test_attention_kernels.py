"""The private operators of torch still are what this torch's kernels are written for, and do what their backward needs."""

import pytest
import torch

from rlx.models.tree_attention import Call, CpuFlash

ARGUMENTS = {
    "_flash_attention_forward": (
        "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask",
        {"scale", "window_size_left", "window_size_right"},
    ),
    "_flash_attention_backward": (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal rng_state unused",
        {"scale", "window_size_left", "window_size_right"},
    ),
    "_scaled_dot_product_cudnn_attention": (
        "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask",
        {"scale"},
    ),
    "_scaled_dot_product_cudnn_attention_backward": (
        "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q max_k "
        "dropout_p is_causal",
        {"scale"},
    ),
    "_scaled_dot_product_flash_attention_for_cpu": ("query key value dropout_p is_causal", {"attn_mask", "scale"}),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "grad_out query key value out logsumexp dropout_p is_causal",
        {"attn_mask", "scale"},
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_operator_takes_the_arguments_that_it_is_given(name):
    positional, named = ARGUMENTS[name]
    arguments = getattr(torch.ops.aten, name).default._schema.arguments
    assert [argument.name for argument in arguments if not argument.kwarg_only] == positional.split()
    assert named <= {argument.name for argument in arguments if argument.kwarg_only}


def test_backward_takes_the_log_sum_exp_of_more_keys():
    """With the output and the log-sum-exp over all keys, gradients of a part of the keys are those of the whole."""
    source = torch.Generator().manual_seed(0)
    query, key, value, grad = (torch.randn(n, 2, 4, generator=source, dtype=torch.float64) for n in (3, 5, 5, 3))
    parts = [slice(0, 2), slice(2, 5)]
    whole, *calls = (Call((3,), (n,), False, None, 0.5, key.device) for n in (5, 2, 3))
    output, lse = CpuFlash().forward(query, key, value, whole)
    scores = torch.einsum("nhd,mhd->hnm", query, key) * 0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(output, torch.einsum("hnm,mhd->nhd", scores.softmax(-1), value))
    expected = CpuFlash().backward(grad, query, key, value, output, lse, whole)
    found = [
        CpuFlash().backward(grad, query, key[part], value[part], output, lse, call)
        for part, call in zip(parts, calls, strict=True)
    ]
    torch.testing.assert_close(found[0][0] + found[1][0], expected[0])
    for of_key in (1, 2):
        torch.testing.assert_close(torch.cat([found[0][of_key], found[1][of_key]]), expected[of_key])
