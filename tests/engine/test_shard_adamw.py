import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.optim import AdamW

from rlx.engine.optimizer import ShardAdamW

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
