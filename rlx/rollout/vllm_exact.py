"""vLLM's operations for `rollout.exact`: the trainer gets them as `Kernels`, and vLLM's own model is made to use the same ones.

They are those of vLLM's mode for results that do not depend on the batch (VLLM_BATCH_INVARIANT), but the mode is off. It changes
torch's operations and NCCL's settings in the whole process, the trainer's, and three operations in it depend on the batch: its norm
of a sum adds in another order from 256 tokens on, the head in fp32 is cuBLAS's, and for heads of width 64 FlashAttention 3 takes
keys in blocks of another size when every sequence has one query.
"""

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rlx.models.exact import Kernels
from rlx.models.tree_attention import Call
from rlx.rollout.vllm_support import restored_process_state

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
with restored_process_state():
    from vllm import _custom_ops
    from vllm.model_executor.layers.batch_invariant import matmul_kernel_persistent, rms_norm_batch_invariant
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs
    from vllm.vllm_flash_attn import flash_attn_varlen_func

# Tiles of vLLM's product in bf16. A result adds up over K in steps of one instruction, whatever the tiles.
TILE = {f"BLOCK_SIZE_{name}": size for name, size in (("M", 128), ("N", 128), ("K", 64))}
TILE |= {"GROUP_SIZE_M": 8, "num_stages": 3, "num_warps": 8}
# cuBLAS, which is twice as fast, adds up alike unless it cuts K. It has no reason to if there are so many rows, and so many tiles for
# each processor of the GPU.
ENOUGH_ROWS, ENOUGH_TILES = 1024, 2
LARGE = 1 << 31  # elements beyond which offsets need 64 bits
# FlashAttention 3 takes kernels for few queries up to a longest sequence of 64, counted with the query heads of a key head.
FEWEST_QUERIES = 65
VERSION = 3


def product(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """See Kernels. The result of a row and column does not depend on the other ones."""
    (rows, inner), columns = x.shape, len(weight)
    if not rows:
        return out
    processors = _processors(x.device)
    tiles = -(-rows // TILE["BLOCK_SIZE_M"]) * -(-columns // TILE["BLOCK_SIZE_N"])
    if rows >= ENOUGH_ROWS and tiles >= ENOUGH_TILES * processors:
        wider = {} if out.dtype == x.dtype else {"out_dtype": out.dtype}
        return torch.mm(x, weight.t(), **wider, out=out)
    strides = (*x.stride(), weight.stride(1), weight.stride(0), *out.stride())
    large = {f"{name}_LARGE": each.numel() > LARGE for name, each in (("A", x), ("B", weight), ("C", out))}
    matmul_kernel_persistent[(min(processors, tiles),)](
        x, weight, out, None, rows, columns, inner, *strides, NUM_SMS=processors, HAS_BIAS=False, **large, **TILE
    )
    return out


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count  # type: ignore[no-any-return]


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """See Kernels. vLLM's kernel overwrites its argument."""
    turned = x.flatten(1).clone()
    places = torch.arange(len(x), device=x.device)
    _custom_ops.rotary_embedding(places, turned, None, x.shape[-1], table.contiguous(), True)
    return turned.view(x.shape)


def attention(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    starts, _, longest, _ = call.bounds
    bounds = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_k": longest}
    output, lse = flash_attn_varlen_func(
        *(query, key, value), **bounds, **_same_kernel(longest), softmax_scale=call.scaling, return_softmax_lse=True
    )
    return output, lse


def _same_kernel(longest: int) -> dict[str, Any]:
    """Return options with which FlashAttention adds up in one order, whatever the lengths and the number of queries."""
    return {"max_seqlen_q": max(longest, FEWEST_QUERIES), "causal": True, "fa_version": VERSION, "num_splits": 1}


def token_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    return compute_token_logprobs(logits, ids[:, None])[:, 0]  # type: ignore[no-any-return]


KERNELS = Kernels(product, rms_norm_batch_invariant, rotate, attention, token_log_probs)


def require_device(device: torch.device) -> None:
    """Raise ValueError if a device has no FlashAttention 3."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        found = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        raise ValueError(
            f"rollout.exact=True: got {found}, expected a GPU of compute capability 9 such as an H100, for whose kernels equality "
            "was measured; set actor_rollout_ref.rollout.exact=False"
        )


def use_in_engine(table: Callable[[int, torch.device], Tensor]) -> None:
    """Let the models that vLLM builds from now on in this process compute with `KERNELS`, and with this rotary table."""
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
    from vllm.v1.attention.backends import flash_attn

    def linear(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        result = product(rows, layer.weight, rows.new_empty(len(rows), len(layer.weight))).view(*x.shape[:-1], -1)
        return result if bias is None else result + bias

    def head(self: Any, lm_head: Any, hidden: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is None, "the families of rollout.exact have no bias there"
        return product(hidden, lm_head.weight, hidden.new_empty(len(hidden), len(lm_head.weight), dtype=torch.float32))

    def rms_norm(self: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        total = x if residual is None else residual + x
        result = rms_norm_batch_invariant(total, self.weight, self.variance_epsilon)
        return result if residual is None else (result, total)

    def paged(**given: Any) -> Any:
        assert given["causal"], "the families of rollout.exact look back only"
        return flash_attn_varlen_func(**given | {"scheduler_metadata": None} | _same_kernel(given["max_seqlen_q"]))

    UnquantizedLinearMethod.apply = linear
    LogitsProcessor._apply_head = head
    RMSNorm.forward_cuda = rms_norm
    RotaryEmbeddingBase._compute_cos_sin_cache = lambda self: table(self.max_position_embeddings, torch.empty(0).device)
    flash_attn.flash_attn_varlen_func = paged
