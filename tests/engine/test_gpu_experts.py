"""Grouped products of experts on a GPU: under FSDP2, with adapters, recomputation and offloading."""

import pytest
import torch
import torch.distributed as dist
from on_ranks_experts import objective, with_experts
from rank_tools import Gradients, build, grouped, make_batch

from rlx.config.schema import ActivationOffloadConfig, FSDPConfig
from rlx.engine.experts import ExpertOptions
from rlx.engine.micro_batch import MicroBatchRule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    torch.cuda.set_device(0)
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield torch.device("cuda", 0)
    dist.destroy_process_group()


def gradient(folder, gpu, **model):
    options = {"model": model, "device": gpu, "lr": 0.0, "experts": ExpertOptions(True, 0.5)}
    engine = build(folder, FSDPConfig(), **options)
    seen, batch = Gradients(engine), with_experts(grouped(make_batch()))
    metrics = engine.update(batch, MicroBatchRule(rows=4), objective(replays=True))
    return seen.seen[0], metrics, engine.root.get_experts_implementation()[""]


@pytest.mark.parametrize("adapters", [{}, {"lora_rank": 4}], ids=["all weights", "LoRA"])
def test_grouped_products_are_taken_and_right(adapters, experts_folder, gpu):
    kept = {"enable_gradient_checkpointing": False} | adapters
    want, metrics, kernel = gradient(experts_folder, gpu, **kept)
    assert kernel == "grouped_mm" and metrics["grad_norm"] > 0
    eager, _, kernel = gradient(experts_folder, gpu, experts_implementation="eager", **kept)
    assert kernel == "eager"
    off = ((eager - want).norm() / eager.norm()).item()
    ways = {"recomputed": adapters}
    for save in ("boundary", "attention", "all"):
        options = {"enable_activation_offload": True, "activation_offload": ActivationOffloadConfig(save, min_bytes=0)}
        ways[save] = adapters | options | ({"enable_gradient_checkpointing": False} if save == "all" else {})
    far = {name: (gradient(experts_folder, gpu, **model)[0] - want).abs().max().item() for name, model in ways.items()}
    print(f"eager off by {off}, in other ways by {far}")
    assert off < 2e-2
    assert far == dict.fromkeys(ways, 0.0)
