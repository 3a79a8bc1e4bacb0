"""The compiled module of flash-attn 2.8, by torch's FlashAttention 2 kernels, for releases of torch that have no wheel of it.

The Python files of flash-attn import this module by name. Shapes and order of arguments are theirs (`flash_attn_interface.py`).
Dropout, soft caps, ALiBi and paged keys are refused.
"""

from typing import Any

import torch
from torch import Tensor

ops = torch.ops.aten
Lengths = tuple[Tensor | None, Tensor | None, int, int]
Options = dict[str, Any]


def _options(scale: float, left: int, right: int) -> Options:
    """Return torch's names of the options. flash-attn writes -1 for no window."""
    return {
        "scale": scale,
        "window_size_left": left if left >= 0 else None,
        "window_size_right": right if right >= 0 else None,
    }


def _refuse(**given: Any) -> None:
    wrong = [name for name, value in given.items() if value is not None and value != 0.0]
    if wrong:
        raise NotImplementedError(
            f"flash_attn over torch's kernels has no {', '.join(wrong)}; install flash-attn's own wheel"
        )


def _forward(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, causal: bool, options: Options) -> tuple[Tensor, ...]:
    out, lse, random, _, debug = ops._flash_attention_forward(q, k, v, *lengths, 0.0, causal, False, **options)
    return out, lse, debug, random


def _backward(
    tensors: tuple[Tensor, ...],
    into: tuple[Tensor, ...],
    lengths: Lengths,
    causal: bool,
    random: Tensor,
    options: Options,
) -> tuple[Tensor, ...]:
    unused = torch.empty(0, device=random.device)
    found = ops._flash_attention_backward(*tensors, *lengths, 0.0, causal, random, unused, **options)
    for own, given in zip(found, into, strict=True):
        given.copy_(own)
    softmax_d = torch.empty(0, device=random.device)  # nobody reads it, and a custom operator may not return an input
    return *into, softmax_d


def fwd(q, k, v, out, alibi, dropout, scale, causal, left, right, softcap, return_softmax, generator):  # type: ignore[no-untyped-def]
    """q, k, v (B, S, H, D); returns output, lse (B, H, S), nothing, random state."""
    _refuse(out=out, alibi_slopes=alibi, dropout_p=dropout, softcap=softcap)
    return _forward(q, k, v, (None, None, q.shape[1], k.shape[1]), causal, _options(scale, left, right))


def varlen_fwd(*given):  # type: ignore[no-untyped-def]
    """q, k, v (T, H, D), output, bounds of q and k, and the rest; returns output, lse (H, T), nothing, random state."""
    (
        q,
        k,
        v,
        out,
        bounds_q,
        bounds_k,
        used,
        leftpad,
        table,
        alibi,
        most_q,
        most_k,
        dropout,
        scale,
        _,
        causal,
        left,
        right,
        cap,
        *_,
    ) = given
    _refuse(
        out=out,
        seqused_k=used,
        leftpad_k=leftpad,
        block_table=table,
        alibi_slopes=alibi,
        dropout_p=dropout,
        softcap=cap,
    )
    return _forward(q, k, v, (bounds_q, bounds_k, most_q, most_k), causal, _options(scale, left, right))


def bwd(*given):  # type: ignore[no-untyped-def]
    """Gradient, q, k, v, output, lse, then dq, dk, dv to write to, and the options of `fwd`."""
    *tensors, dq, dk, dv = given[:9]
    alibi, dropout, scale, causal, left, right, cap, _, _, random = given[9:]
    _refuse(alibi_slopes=alibi, dropout_p=dropout, softcap=cap)
    lengths = None, None, tensors[1].shape[1], tensors[2].shape[1]
    return _backward(tuple(tensors), (dq, dk, dv), lengths, causal, random, _options(scale, left, right))


def varlen_bwd(*given):  # type: ignore[no-untyped-def]
    """Gradient, q, k, v, output, lse, then dq, dk, dv to write to, and the options of `varlen_fwd`."""
    *tensors, dq, dk, dv = given[:9]
    bounds_q, bounds_k, alibi, most_q, most_k, dropout, scale, _, causal, left, right, cap, _, _, random = given[9:]
    _refuse(alibi_slopes=alibi, dropout_p=dropout, softcap=cap)
    lengths = bounds_q, bounds_k, most_q, most_k
    return _backward(tuple(tensors), (dq, dk, dv), lengths, causal, random, _options(scale, left, right))
