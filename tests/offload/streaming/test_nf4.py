"""Layers with NF4 weights compute what layers with the dequantised weights compute, bit for bit, and stream in their small form."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rlx.offload import OffloadOptions, enable_activation_offloading, enable_layer_offloading
from rlx.offload.streaming.nf4 import (
    NF4Linear,
    QuantizationError,
    dequantized,
    is_quantized,
    quantize_layers,
    quantized,
)

pytest.importorskip("bitsandbytes", reason="NF4 needs bitsandbytes (rlx[nf4])")
LEVELS = torch.special.ndtri(torch.linspace(0.9677083, 0.5, 9, dtype=torch.float64))
"""The positive levels of NF4 by arXiv:2305.14314, appendix E, before they are divided by the largest."""


@pytest.fixture
def decoder(toys):
    """A decoder with adapters and NF4 weights, and the same one with the dequantised weights in full."""
    make = lambda: toys.stack(lambda: toys.attend(64, 4, 2, dropout=0.1), blocks=4, width=64)  # noqa: E731
    plain = toys.adapt(make())
    model = copy.deepcopy(plain)
    quantize_layers(model)
    for full, small in zip(plain.layers.modules(), model.layers.modules(), strict=True):
        if isinstance(small, NF4Linear):
            full.weight.data = dequantized(small.weight, torch.float32)
    return model, plain


def read(model):
    return model(torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize(
    ("save", "resident"), [("boundary", None), (None, 0), ("attention", 0), ("all", 0), ("auto", 2)]
)
def test_gradients_are_those_of_the_dequantised_weights(decoder, toys, request, save, resident):
    model, plain = decoder
    if resident is not None:
        streaming = enable_layer_offloading(model, resident_layers=resident)
        request.addfinalizer(streaming.disable)
        elements = sum(p.numel() for n, p in plain.layers[resident:].named_parameters() if n.endswith("base.weight"))
        assert streaming.streamed_bytes == pytest.approx(elements * 9 / 16, rel=0.1)  # and alignment
    if save is not None:
        options = OffloadOptions(save=save, min_bytes=0)
        request.addfinalizer(enable_activation_offloading(model, save != "all", options).disable)
    for _ in range(3):  # `auto` measures first
        toys.grade(plain, read).assert_equal(toys.grade(model, read))


def test_attention_mode_keeps_projections(decoder, toys):
    """A product with a quantised weight is a linear map to whoever keeps results instead of recomputing them."""
    offloaded = []
    for each in decoder:
        handle = enable_activation_offloading(each, True, OffloadOptions(save="attention", min_bytes=0))
        toys.grade(each, read)
        offloaded.append(handle.stats().offloaded_bytes)
    assert offloaded[0] == offloaded[1]


def test_autograd_keeps_the_small_form(decoder):
    model, _ = decoder
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        read(model)
    weights = {p.data_ptr() for p in model.layers[1:].parameters() if is_quantized(p)}
    assert weights <= {tensor.data_ptr() for tensor in kept}
    assert not any(tensor.dtype == torch.float32 and tensor.shape == (128, 64) for tensor in kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_that_of_linear(dtype, bias):
    torch.manual_seed(0)
    linear = nn.Linear(128, 40, bias=bias, dtype=dtype).requires_grad_(False)
    small = NF4Linear(linear)
    full = dequantized(small.weight, dtype)
    x, y = (torch.linspace(-1, 1, 5 * 128, dtype=dtype).view(1, 5, 128).requires_grad_() for _ in range(2))
    one, other = small(x), F.linear(y, full, linear.bias)
    assert torch.equal(one, other)
    one.backward(other.detach())
    other.backward(other.detach())
    assert torch.equal(x.grad, y.grad)


def test_levels_are_those_of_the_paper():
    """Weights at the levels, scaled by a power of two, come back as they were; a weight between two goes to the nearer one."""
    levels = (LEVELS / LEVELS[0]).float()
    block = torch.zeros(1, 64)
    block[0, :9] = levels * 4
    back = dequantized(quantized(block), torch.float32)
    torch.testing.assert_close(back, block, atol=2e-6, rtol=0)
    block[0, 20] = 4 * (0.49 * levels[0] + 0.51 * levels[1])
    assert dequantized(quantized(block), torch.float32)[0, 20] == back[0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dequantised_weights_quantise_to_the_same_bytes(dtype):
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = quantized(weight)
    assert packed.shape == (96, 72)
    assert torch.equal(quantized(dequantized(packed, dtype)), packed)
    assert torch.equal(dequantized(packed, torch.float32).to(dtype), dequantized(packed, dtype))


@pytest.mark.parametrize("width", [16, 64])
def test_models_without_such_maps_are_refused(toys, width):
    """Widths that are no multiple of 64; weights that are all trained."""
    model = toys.stack(lambda: toys.attend(width, 4, 2), width=width)
    with pytest.raises(QuantizationError, match=r"quantization=nf4: got Stack with 0 of \d+ frozen weights"):
        quantize_layers(toys.adapt(model) if width == 16 else model)
