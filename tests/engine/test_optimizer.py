"""The optimizer: its schedule, steps on shards and on fp32 masters, and how far a step moved the weights."""

import copy
import gc
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.optim import AdamW

from rlx.config.schema import OptimConfig
from rlx.engine.optimizer import (
    PART,
    ShardAdamW,
    UpdateProbe,
    build_optimizer,
    learning_rate_factor,
    step_in_parts,
    update_metrics,
)


def test_warm_up_is_linear_and_starts_above_zero():
    optim = OptimConfig(lr_warmup_steps=3)
    assert [learning_rate_factor(step, 10, optim) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


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
def test_on_a_gpu_one_kernel_steps_and_takes_up_a_state_of_the_cpu():
    on_cpu, on_gpu = (build_optimizer(weights(device), OptimConfig()) for device in ("cpu", "cuda"))
    assert on_gpu.param_groups[0]["fused"]
    torch.testing.assert_close(stepped(on_gpu, 0), stepped(on_cpu, 0), rtol=1e-5, atol=1e-7)
    on_gpu.load_state_dict(copy.deepcopy(on_cpu.state_dict()))
    assert on_gpu.param_groups[0]["fused"]
    assert all(state["step"].is_cuda for state in on_gpu.state.values())
    torch.testing.assert_close(stepped(on_gpu, 1), stepped(on_cpu, 1), rtol=1e-5, atol=1e-7)


OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture
def mesh():
    """The mesh of a process group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def parameters(dtype, mesh=None):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in ((7,), (5, 3))]
    if mesh is not None:
        values = [distribute_tensor(value, mesh, [Shard(0)]) for value in values]
    return [nn.Parameter(value) for value in values]


def step(optimizer, number):
    generator = torch.Generator().manual_seed(number)
    trained = optimizer.param_groups[0]["params"]
    for parameter in trained:
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        is_sharded = isinstance(parameter, DTensor)
        parameter.grad = distribute_tensor(gradient, parameter.device_mesh, [Shard(0)]) if is_sharded else gradient
    if number == 2:
        trained[0].grad = None
    optimizer.step()


def plain(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_steps_and_state_are_those_of_adamw(mesh, dtype, fused):
    expected = AdamW(parameters(dtype), fused=fused, **OPTIONS)
    found = [ShardAdamW(parameters(dtype, where), fused=fused, **OPTIONS) for where in (None, mesh)]
    for number in range(5):
        for optimizer in (expected, *found):
            step(optimizer, number)
    for optimizer in found:
        for one, other in zip(expected.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True):
            assert torch.equal(one, plain(other))
            assert expected.state[one].keys() == optimizer.state[other].keys()
            for name, value in expected.state[one].items():
                kept = optimizer.state[other][name]
                assert torch.equal(value, plain(kept)) and value.dtype == kept.dtype, name
                assert name == "step" or type(kept) is type(other.data), (
                    "a checkpoint needs it sharded as the parameter"
                )


def test_a_step_leaves_no_object_behind(mesh):
    """torch's caches for DTensors have no limit, and AdamW's numbers differ in each step."""
    optimizer = ShardAdamW(parameters(torch.float32, mesh), **OPTIONS)
    counts = []
    for number in range(12):
        step(optimizer, 3 + number)
        gc.collect()
        counts.append(sum("torch" in str(type(each).__module__) for each in gc.get_objects()))
    assert counts[-1] <= counts[3], counts


SIZES = ((40,), (3, 5), (1,))


def start() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).bfloat16() for size in SIZES]


def gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).bfloat16() for size in SIZES]


def give(parameters, seed, dtype):
    for parameter, gradient in zip(parameters, gradients(seed), strict=True):
        parameter.grad_dtype = dtype
        parameter.grad = gradient.to(dtype)


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


def test_without_masters_sums_of_gradients_in_fp32_are_rounded_to_the_weights_type():
    parameters = [[nn.Parameter(value) for value in start()] for _ in range(2)]
    for each, dtype in zip(parameters, (torch.bfloat16, torch.float32), strict=True):
        optimizer = build_optimizer(each, OptimConfig(lr=1e-1, master_weights=False))
        give(each, 0, dtype)
        optimizer.step()
    assert all(map(torch.equal, *parameters))
    assert not torch.equal(parameters[0][0], start()[0])


CPU = torch.device("cpu")


def measured(probe: UpdateProbe) -> dict[str, float]:
    return update_metrics({name: figure.item() for name, figure in probe.sums(CPU).items()})


def test_share_and_length_by_hand():
    weights = [torch.tensor([3.0, 4.0]), torch.zeros(0), torch.tensor([[12.0], [0.0]])]
    probe = UpdateProbe(weights)
    assert measured(probe) == {"update_share": 0.0, "update_length": 0.0}
    weights[0][0] += 1.3
    assert measured(probe) == {"update_share": 0.25, "update_length": pytest.approx(1.3 / 13, rel=1e-6)}


@pytest.mark.parametrize("tensors", [1, 6, 12])
def test_a_tensor_counts_by_its_size_in_whatever_order_tensors_repeat(tensors):
    """As in 28 layers of Qwen2.5, whose matrices had no part in the sample because every sixth tensor is a small one."""
    weights = [torch.zeros(4 if place % tensors == 0 else 997) for place in range(28 * 12)]
    probe = UpdateProbe(weights)
    for weight in weights:
        weight[: len(weight) // 4] = 1.0
    changed = sum(len(weight) // 4 for weight in weights) / sum(map(len, weights))
    assert measured(probe)["update_share"] == pytest.approx(changed, abs=0.01)


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
