"""AdamW on fp32 masters of bf16 weights equals AdamW on fp32 weights, to the last bit."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from rlx.config.schema import OptimConfig
from rlx.engine.optimizer import MASTER, MasterAdamW, ShardAdamW, build_optimizer

SIZES = ((40,), (3, 5), (1,))
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def start() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).bfloat16() for size in SIZES]


def gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).bfloat16() for size in SIZES]


def give(parameters, seed, dtype, scale=1.0):
    for parameter, gradient in zip(parameters, gradients(seed), strict=True):
        parameter.grad_dtype = dtype
        parameter.grad = gradient.to(dtype) * scale


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32])
def test_a_step_is_that_of_adamw_on_fp32_weights(gradient_dtype, fused):
    wide = [nn.Parameter(value.float()) for value in start()]
    narrow = [nn.Parameter(value) for value in start()]
    reference, optimizer = AdamW(wide, fused=fused, **OPTIONS), MasterAdamW(narrow, fused=fused, **OPTIONS)
    for number in range(5):
        scale = 1.0 if number % 2 else 0.37
        give(wide, number, torch.float32)
        for parameter in wide:
            parameter.grad *= scale
        give(narrow, number, gradient_dtype)
        before = [parameter.grad.clone() for parameter in narrow]
        optimizer.gradient_scale = scale
        reference.step()
        optimizer.step()
        for one, other, grad in zip(wide, narrow, before, strict=True):
            assert torch.equal(one, optimizer.state[other][MASTER])
            assert torch.equal(one.bfloat16(), other)
            assert torch.equal(grad, other.grad), "a step leaves gradients as they are"


def test_small_updates_add_up_in_the_masters_and_vanish_without_them():
    moved = {}
    for masters in (True, False):
        weights = nn.Parameter(torch.full((1000,), 0.02).bfloat16())
        optim = OptimConfig(lr=1e-6, weight_decay=0.0, master_weights=masters)
        optimizer = build_optimizer([weights], optim)
        for _ in range(200):
            weights.grad = torch.ones_like(weights)
            optimizer.step()
        moved[masters] = (weights.detach().float() - torch.tensor(0.02).bfloat16().float()).mean().item()
    assert moved[False] == 0.0
    assert moved[True] == pytest.approx(-200e-6, abs=62e-6), "half the distance between two bf16 numbers at 0.02"


def test_masters_are_made_for_narrow_weights_alone():
    for dtype, kind in ((torch.bfloat16, MasterAdamW), (torch.float32, ShardAdamW), (torch.float64, ShardAdamW)):
        parameters = [nn.Parameter(torch.zeros(2, dtype=dtype))]
        assert type(build_optimizer(parameters, OptimConfig())) is kind
        assert type(build_optimizer(parameters, OptimConfig(master_weights=False))) is ShardAdamW


def test_a_loaded_state_keeps_every_bit():
    parameters = [nn.Parameter(value) for value in start()]
    optimizer = build_optimizer(parameters, OptimConfig(lr=1e-3))
    for number in range(3):
        give(parameters, number, torch.bfloat16)
        optimizer.step()
    others = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    loaded = build_optimizer(others, OptimConfig(lr=1e-3))
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, other in zip(parameters, others, strict=True):
        assert optimizer.state[one].keys() == loaded.state[other].keys()
        for name, value in optimizer.state[one].items():
            assert value.dtype == loaded.state[other][name].dtype == torch.float32
            assert torch.equal(value, loaded.state[other][name])
    for each in (parameters, others):
        give(each, 9, torch.bfloat16)
    optimizer.step()
    loaded.step()
    assert all(map(torch.equal, parameters, others))


def test_a_parameter_without_gradient_is_left_alone():
    parameters = [nn.Parameter(value) for value in start()]
    optimizer = build_optimizer(parameters, OptimConfig(lr=1e-1))
    give(parameters, 0, torch.bfloat16)
    parameters[1].grad = None
    optimizer.step()
    assert torch.equal(parameters[1], start()[1]) and parameters[1] not in optimizer.state
    assert not torch.equal(parameters[0], start()[0])


def test_without_masters_sums_of_gradients_in_fp32_are_rounded_to_the_weights_type():
    parameters = [[nn.Parameter(value) for value in start()] for _ in range(2)]
    for each, dtype in zip(parameters, (torch.bfloat16, torch.float32), strict=True):
        optimizer = build_optimizer(each, OptimConfig(lr=1e-1, master_weights=False))
        give(each, 0, dtype)
        optimizer.step()
    assert all(map(torch.equal, *parameters))
    assert not torch.equal(parameters[0][0], start()[0])
