"""Grouped products of experts on a GPU: under FSDP2, with adapters, recomputation and offloading."""

import pytest
import torch
import torch.distributed as dist
from on_ranks_experts import in_ways

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    torch.cuda.set_device(0)
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield torch.device("cuda", 0)
    dist.destroy_process_group()


@pytest.mark.parametrize("adapters", [{}, {"lora_rank": 4}], ids=["all weights", "LoRA"])
def test_grouped_products_are_taken_and_right(adapters, experts_folder, gpu):
    eager, others = in_ways(experts_folder, gpu, adapters, ["boundary", "attention", "all"])
    assert eager < 2e-2 and set(others.values()) == {0.0}
