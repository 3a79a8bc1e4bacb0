import copy
import math

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from rlx.config.schema import OptimConfig
from rlx.engine.optimizer import PART, build_optimizer, learning_rate_factor, step_in_parts


def test_warm_up_is_linear_and_starts_above_zero():
    optim = OptimConfig(lr_warmup_steps=3)
    assert [learning_rate_factor(step, 10, optim) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_warm_up_as_a_share_of_all_steps():
    optim = OptimConfig(lr_warmup_steps_ratio=0.2)
    assert [learning_rate_factor(step, 5, optim) for step in range(2)] == [0.5, 1.0]


@pytest.mark.parametrize(("kind", "middle"), [("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)])
def test_schedules_pass_the_middle_and_end_at_the_floor(kind, middle):
    optim = OptimConfig(lr_scheduler_type=kind, min_lr_ratio=0.1, lr_warmup_steps=2)
    assert learning_rate_factor(2, 12, optim) == 1.0
    assert math.isclose(learning_rate_factor(7, 12, optim), middle)
    floor = 1.0 if kind == "constant" else 0.1
    assert math.isclose(learning_rate_factor(12, 12, optim), floor)
    assert math.isclose(learning_rate_factor(99, 12, optim), floor)


def weights(device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(n, generator=generator).to(device)) for n in (3, 40)]


def stepped(optimizer, number):
    generator = torch.Generator().manual_seed(number)
    parameters = optimizer.param_groups[0]["params"]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)
    optimizer.step()
    return [parameter.detach().cpu() for parameter in parameters]


@pytest.mark.parametrize("was_fused", [False, True])
def test_a_state_of_another_kernel_is_gone_on_from(was_fused):
    before = AdamW(weights(), lr=OptimConfig().lr, fused=was_fused)
    reached = stepped(before, 0)
    going_on = build_optimizer(weights(), OptimConfig())
    assert going_on.param_groups[0]["fused"] is None, "on the CPU it is torch's default"
    with torch.no_grad():
        for parameter, value in zip(going_on.param_groups[0]["params"], reached, strict=True):
            parameter.copy_(value)
    going_on.load_state_dict(copy.deepcopy(before.state_dict()))
    assert going_on.param_groups[0]["fused"] is None
    torch.testing.assert_close(stepped(going_on, 1), stepped(before, 1), rtol=1e-6, atol=0)


def test_a_step_in_parts_is_one_step():
    sizes, found = [1 + number % 3 for number in range(2 * PART + 1)], []
    for parts in (False, True):
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
        groups = [{"params": parameters[: PART + 5]}, {"params": parameters[PART + 5 :], "lr": 0.5}]
        optimizer, calls = AdamW(groups, lr=0.1), []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append(1))
        for _ in range(2):
            for number, parameter in enumerate(parameters):
                parameter.grad = None if number == 3 else torch.randn(parameter.shape, generator=generator)
            step_in_parts(optimizer) if parts else optimizer.step()
        assert len(calls) == (6 if parts else 2)
        assert [len(group["params"]) for group in optimizer.param_groups] == [PART + 5, PART - 4]
        found.append([*parameters, *(x for state in optimizer.state.values() for x in state.values())])
    assert len(found[0]) == len(sizes) + 3 * (len(sizes) - 1)
    assert all(map(torch.equal, *found))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_one_kernel_steps_and_takes_up_a_state_of_the_cpu():
    on_cpu, on_gpu = (build_optimizer(weights(device), OptimConfig()) for device in ("cpu", "cuda"))
    assert on_gpu.param_groups[0]["fused"]
    torch.testing.assert_close(stepped(on_gpu, 0), stepped(on_cpu, 0), rtol=1e-5, atol=1e-7)
    on_gpu.load_state_dict(copy.deepcopy(on_cpu.state_dict()))
    assert on_gpu.param_groups[0]["fused"]
    assert all(state["step"].is_cuda for state in on_gpu.state.values())
    torch.testing.assert_close(stepped(on_gpu, 1), stepped(on_cpu, 1), rtol=1e-5, atol=1e-7)
