"""Grouped products of experts on a GPU: under FSDP2, with adapters, recomputation and offloading."""

import pytest
import torch
from on_ranks_experts import in_ways

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("adapters", [{}, {"lora_rank": 4}], ids=["all weights", "LoRA"])
def test_grouped_products_are_taken_and_right(adapters, experts_folder, gpu):
    eager, others = in_ways(experts_folder, gpu, adapters, ["boundary", "attention", "all"])
    assert eager < 2e-2 and set(others.values()) == {0.0}
