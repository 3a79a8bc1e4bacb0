"""torchao's AdamW on one step, beside AdamW in fp32."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from rlx.config.schema import OptimConfig
from rlx.engine.optimizer import build_optimizer, configure

pytest.importorskip("torchao", reason="optional package: pip install torchao")
pytestmark = pytest.mark.slow  # torch.compile builds its kernel

COUNT = 1 << 16


def one_step(name: str, lr: float):
    """bf16 weights, the same after a step of torchao's optimizer, the same weights and state in fp32 after AdamW's, and the optimizer."""
    generator = torch.Generator().manual_seed(0)
    start = (0.02 * torch.randn(COUNT, generator=generator)).bfloat16()
    gradient = torch.randn(COUNT, generator=generator).bfloat16()
    narrow, wide = nn.Parameter(start.clone()), nn.Parameter(start.float())
    optim = OptimConfig(optimizer=name, lr=1.0, weight_decay=0.1)
    optimizer, reference = build_optimizer([narrow], optim), AdamW([wide], lr=lr, weight_decay=0.1)
    configure(optimizer, optim, lr)  # as a schedule does
    narrow.grad, wide.grad = gradient, gradient.float()
    torch.manual_seed(0)
    optimizer.step()
    reference.step()
    return start, narrow.detach(), wide.detach(), optimizer.state[narrow], reference.state[wide]


@pytest.mark.parametrize("name", ["_AdamW", "AdamW8bit"])
def test_a_step_rounds_the_exact_result_to_a_neighbour_and_without_bias(name):
    start, narrow, wide, state, exact = one_step(name, lr=1e-5)
    bits = wide.view(torch.int32)
    toward_zero = (bits & -65536).view(torch.float32)
    away = ((bits & -65536) + 65536).view(torch.float32)
    error = 1e-6 * wide.abs()  # the exact result itself is rounded to fp32
    is_neighbour = (narrow.float() == toward_zero) | (narrow.float() == away)
    assert (is_neighbour | ((narrow.float() - wide).abs() <= error)).all()
    moved, wanted = (narrow.float() - start.float()).double(), (wide - start.float()).double()
    # Over 65,536 weights the sum of errors is far below the way; rounding to nearest would lose most of it.
    along = (moved * wanted.sign()).mean() / wanted.abs().mean()
    assert along == pytest.approx(1.0, abs=0.15)
    nearest = (wide.bfloat16().float() - start.float()).double()
    assert (nearest * wanted.sign()).mean() / wanted.abs().mean() < 0.7
    assert 0.1 < (moved != 0).double().mean() < 1
    for moment in ("exp_avg", "exp_avg_sq"):
        kept = state[moment]
        found = kept.dequantize() if name == "AdamW8bit" else kept.float()
        relative = (found - exact[moment]).norm() / exact[moment].norm()
        assert relative < (0.02 if name == "AdamW8bit" else 0.004)
    if name == "AdamW8bit":
        assert state["exp_avg"].codes.dtype == torch.uint8


def test_a_state_is_continued_after_it_was_loaded():
    generator = torch.Generator().manual_seed(1)
    weights = [nn.Parameter(torch.randn(8, generator=generator).bfloat16()) for _ in range(2)]
    optim = OptimConfig(optimizer="_AdamW", lr=1e-2)
    first, second = (build_optimizer([w], optim) for w in weights)
    weights[0].grad = torch.ones(8, dtype=torch.bfloat16)
    first.step()
    with torch.no_grad():
        weights[1].copy_(weights[0])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    configure(second, optim, 1e-2)
    weights[1].grad = weights[0].grad.clone()
    for optimizer in (first, second):
        torch.manual_seed(2)
        optimizer.step()
    assert torch.equal(*weights)
