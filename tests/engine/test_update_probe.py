"""How far a step moved the weights, from a sample."""

import math

import pytest
import torch
from torch import nn

from rlx.config.schema import OptimConfig
from rlx.engine.optimizer import SAMPLE, UpdateProbe, build_optimizer, update_metrics

CPU = torch.device("cpu")


def measured(probe: UpdateProbe) -> dict[str, float]:
    return update_metrics({name: figure.item() for name, figure in probe.sums(CPU).items()})


def test_share_and_length_by_hand():
    weights = [torch.tensor([3.0, 4.0]), torch.zeros(0), torch.tensor([[12.0], [0.0]])]
    probe = UpdateProbe(weights)
    assert measured(probe) == {"update_share": 0.0, "update_length": 0.0}
    weights[0][0] += 1.3
    assert measured(probe) == {"update_share": 0.25, "update_length": pytest.approx(1.3 / 13, rel=1e-6)}


def test_a_large_model_is_sampled_evenly():
    weights = [torch.zeros(3 * SAMPLE // 64) for _ in range(3 * 64)]
    probe = UpdateProbe(weights)
    assert probe.sums(CPU)["sampled"] == SAMPLE
    for weight in weights:
        weight[: len(weight) // 2] = 1.0
    assert measured(probe)["update_share"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("tensors", [1, 6, 12])
def test_a_tensor_counts_by_its_size_in_whatever_order_tensors_repeat(tensors):
    """As in 28 layers of Qwen2.5, whose matrices had no part in the sample because every sixth tensor is a small one."""
    weights = [torch.zeros(4 if place % tensors == 0 else 997) for place in range(28 * 12)]
    probe = UpdateProbe(weights)
    for weight in weights:
        weight[: len(weight) // 4] = 1.0
    changed = sum(len(weight) // 4 for weight in weights) / sum(map(len, weights))
    assert measured(probe)["update_share"] == pytest.approx(changed, abs=0.01)
    still = [torch.zeros(4) if place % tensors == 0 else torch.zeros(997) for place in range(28 * 12)]
    probe = UpdateProbe(still)
    for weight in still:
        weight += float(len(weight) == 4)
    small = sum(len(weight) for weight in still if len(weight) == 4) / sum(map(len, still))
    assert measured(probe)["update_share"] == pytest.approx(small, abs=0.01)


@pytest.mark.parametrize(("lr", "share"), [(1e-6, 0.019), (1e-5, 0.155)])
def test_bf16_weights_without_masters_hardly_move_at_the_learning_rates_of_rl(lr, share):
    """The share is that of weights below twice the learning rate's power of two: see `moving_share`."""
    torch.manual_seed(0)
    weights = nn.Parameter(torch.randn(40_000).mul(0.02).bfloat16())
    weights.grad = torch.randn_like(weights)
    optimizer = build_optimizer([weights], OptimConfig(lr=lr, weight_decay=0.0, master_weights=False))
    probe = UpdateProbe([weights.view(-1)[i::80] for i in range(80)])
    optimizer.step()
    assert measured(probe)["update_share"] == pytest.approx(share, rel=0.2)
    assert math.isfinite(measured(probe)["update_length"])
