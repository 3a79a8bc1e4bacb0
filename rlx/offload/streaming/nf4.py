"""NF4: frozen weights of linear layers in 4.5 bits each, dequantised whenever their layer multiplies.

Note [how a quantised weight is stored]
A weight (out, in) becomes one parameter of bytes, (out, in * 9 / 16): first the codes, two in a byte, then an fp32 scale for
each block of 64 weights. Rows of the parameter are no rows of the weight. One plain tensor can be streamed, sharded by FSDP2 and
written to a checkpoint. Autograd saves these bytes, so that layer offloading may fetch them again, and backward dequantises once
more. The weight in full lives as long as one product, whose result is that of `F.linear` on it, bit for bit.

Source: arXiv:2305.14314, section 3, without quantised scales. Codes and kernels are those of bitsandbytes, on CPU and GPU.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlx.offload.replay.replay_mode import show_calls
from rlx.offload.runtime.layers import find_layers

NF4_BLOCK = 64  # weights that share a scale, in bitsandbytes and in the paper


class QuantizationError(ValueError):
    """A model cannot be quantised."""


class NF4Linear(nn.Linear):
    """A linear map in place of `linear`, maybe on the meta device, whose frozen weight is quantised by `device` or its own."""

    def __init__(self, linear: nn.Linear, device: torch.device | None = None) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = nn.Parameter(quantized(linear.weight.detach(), device), requires_grad=False)
        self.bias = linear.bias

    def forward(self, input: Tensor) -> Tensor:
        return NF4Product.apply(input, self.weight, self.bias)  # type: ignore[no-any-return, no-untyped-call]


class NF4Product(torch.autograd.Function):
    """`F.linear` on a quantised weight."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(input, dequantized(weight, input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (weight,) = ctx.saved_tensors
        of_rows = gradient.reshape(-1, gradient.shape[-1])
        of_input = of_bias = None
        if ctx.needs_input_grad[0]:
            full = dequantized(weight, gradient.dtype)
            of_input = (of_rows @ full).view(*gradient.shape[:-1], full.shape[1])
        if ctx.needs_input_grad[2]:
            of_bias = of_rows.sum(0)
        return of_input, None, of_bias


show_calls(NF4Product, is_attention=False)


def is_quantized(tensor: Tensor) -> bool:
    """Return whether a parameter holds a quantised weight: no other parameter of a model is made of bytes."""
    return tensor.dtype == torch.uint8


def quantized(weight: Tensor, device: torch.device | None = None) -> Tensor:
    """Return the bytes (out, in * 9 / 16) of a weight (out, in), by `device`, on its own; what is dequantised gives them again."""
    rows, columns = weight.shape
    shape = rows, columns * 9 // 16
    if weight.is_meta:
        return torch.empty(shape, dtype=torch.uint8, device="meta")
    codes, state = _library().quantize_4bit(
        weight.to(device or weight.device).contiguous(),
        blocksize=NF4_BLOCK,
        compress_statistics=False,
        quant_type="nf4",
    )
    scales = state.absmax.to(torch.float32).view(torch.uint8)
    return torch.cat([codes.view(-1), scales]).view(shape).to(weight.device)


def dequantized(packed: Tensor, dtype: torch.dtype) -> Tensor:
    rows, columns = packed.shape[0], packed.shape[1] * 16 // 9
    flat, codes = packed.detach().reshape(-1), rows * columns // 2
    library, scales = _library(), flat[codes:].view(torch.float32)
    state = library.QuantState(scales, torch.Size((rows, columns)), blocksize=NF4_BLOCK, quant_type="nf4", dtype=dtype)
    return library.dequantize_4bit(flat[:codes], state)  # type: ignore[no-any-return]


def in_full(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return dequantized(tensor, dtype) if is_quantized(tensor) else tensor


def quantize_layers(model: nn.Module, device: torch.device | None = None) -> None:
    """Quantise the frozen weights of the linear maps in a model's layers, in place and one by one, by `device` or their own.

    Trained maps (adapters), those that share their weight, and those whose input width is no multiple of 64 stay as they are. The
    model is not sharded yet, and may be on the meta device. QuantizationError if that is less than half of the layers' frozen
    weights, as in a mixture of experts, or bitsandbytes is missing.
    """
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    found: list[tuple[nn.Module, str, nn.Linear]] = []
    total = 0
    for _, layer in find_layers(model, None):
        total += sum(p.numel() for p in layer.parameters() if not p.requires_grad)
        places = [(parent, name, child) for parent in layer.modules() for name, child in parent.named_children()]
        for parent, name, child in places:
            if isinstance(child, nn.Linear) and _can_quantize(child) and uses[id(child.weight)] == 1:
                found.append((parent, name, child))
    count = sum(linear.weight.numel() for _, _, linear in found)
    if 2 * count < total or not count:
        raise QuantizationError(
            f"quantization=nf4: got {type(model).__name__} with {count} of {total} frozen weights of its layers in linear maps "
            f"whose input width is a multiple of {NF4_BLOCK}, expected at least half; experts of a mixture cannot be quantised. "
            "Leave quantization out"
        )
    while found:  # each full weight is free before the next one is quantised
        parent, name, linear = found.pop()
        setattr(parent, name, NF4Linear(linear, device))


def _can_quantize(linear: nn.Linear) -> bool:
    is_plain = type(linear).forward is nn.Linear.forward
    return is_plain and not linear.weight.requires_grad and linear.in_features % NF4_BLOCK == 0


def _library() -> Any:
    try:
        import bitsandbytes.functional
    except ImportError as error:
        raise QuantizationError(
            f"quantization=nf4 needs bitsandbytes ({error}); pip install 'bitsandbytes>=0.50'"
        ) from None
    return bitsandbytes.functional
