"""The engine on a GPU: bf16 compute, NCCL, memory that is given back."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlx.config.schema import (
    ActivationOffloadConfig,
    ActorConfig,
    FSDPConfig,
    MixedPrecisionConfig,
    ModelConfig,
    OptimConfig,
)
from rlx.data.batch import Batch
from rlx.engine.engine import Engine
from rlx.engine.host_memory import HostMemory, HostRelief
from rlx.engine.micro_batch import MicroBatchRule
from rlx.engine.objectives import PolicyObjective

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPT, RESPONSE = 90, 203
FP32 = FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="fp32"))


@pytest.fixture(scope="module")
def gpu() -> Iterator[torch.device]:
    """A process group of one, with collectives on both kinds of memory."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=address, rank=0, world_size=1)
    yield torch.device("cuda", 0)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3 wide enough that its attention takes the kernels that real models take."""
    from rlx.config.schema import TinyModelConfig
    from rlx.models.tiny import make_tiny

    folder = tmp_path_factory.mktemp("large")
    shape = TinyModelConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2
    )
    for part in make_tiny(shape):
        part.save_pretrained(folder)
    return str(folder)


def ragged(rows: int = 32) -> Batch:
    """Rows of very different lengths: the shortest is mostly padding on both sides."""
    g = torch.Generator().manual_seed(0)
    prompts, responses = (torch.randint(1, n + 1, (rows, 1), generator=g) for n in (PROMPT, RESPONSE))
    mask = torch.cat([torch.arange(PROMPT) >= PROMPT - prompts, torch.arange(RESPONSE) < responses], dim=1)
    return Batch.of(
        {
            "input_ids": torch.randint(3, 250, (rows, PROMPT + RESPONSE), generator=g).masked_fill(~mask, 0),
            "attention_mask": mask,
            "response_mask": mask[:, PROMPT:],
            "advantages": torch.randn(rows, RESPONSE, generator=g),
            "old_log_probs": torch.full((rows, RESPONSE), -5.5),
        }
    )


def engine(
    folder: str,
    device: torch.device,
    fsdp: FSDPConfig,
    strategy: str = "fsdp2",
    offload: bool = True,
    recompute: bool = True,
    **options: Any,
) -> Engine:
    model = ModelConfig(
        path=folder,
        enable_gradient_checkpointing=recompute,
        enable_activation_offload=offload,
        activation_offload=ActivationOffloadConfig(**options),
    )
    return Engine(model, fsdp, strategy=strategy, device=device, optim=OptimConfig(lr=1e-4), total_steps=10)


def update(trained: Engine, rows: int = 8) -> dict[str, float]:
    objective = PolicyObjective(ActorConfig(), temperature=1.0, horizon=RESPONSE)
    return trained.update(ragged(), MicroBatchRule(rows=rows), objective)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("rows", [5, 8, 32])
def test_bf16_gradients_are_finite_and_near_those_of_fp32(gpu, large, strategy, offload, rows):
    exact = update(engine(large, gpu, FP32), rows)
    metrics = update(engine(large, gpu, FSDPConfig(), strategy, offload), rows)
    assert metrics["skipped"] == 0
    assert metrics["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.05)
    assert metrics["loss"] == pytest.approx(exact["loss"], abs=0.02)


@pytest.mark.parametrize("tier", ["cpu", "disk"])
@pytest.mark.parametrize("save", ["boundary", "attention", "all"])
def test_offloading_gives_the_same_step_and_its_host_memory_comes_back(gpu, large, save, tier, tmp_path):
    options = {"save": save, "tier": tier, "directory": str(tmp_path)} if tier == "disk" else {"save": save}
    plain = engine(large, gpu, FP32, offload=False, recompute=save != "all")
    offloaded = engine(large, gpu, FP32, recompute=save != "all", **options)
    for _ in range(2):
        expected, got = update(plain), update(offloaded)
        # Kernels of the backward add up in no fixed order.
        assert got["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        figures = offloaded.offload_stats()
        assert figures["offloaded_bytes"] > 0 == figures["held_bytes"]
        assert (figures["disk_bytes"] > 0) == (tier == "disk")
        assert figures["reserved_bytes"] > 0, "kept for the next update, or taken anew"
        assert HostRelief().relieve(HostMemory(10, 100)) >= figures["reserved_bytes"]
        assert offloaded.offload_stats()["reserved_bytes"] == 0


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_parked_parameters_and_state_free_the_device_and_come_back(gpu, large, strategy):
    plain = engine(large, gpu, FP32, strategy)
    parked = engine(
        large,
        gpu,
        FSDPConfig(param_offload=True, optimizer_offload=True, mixed_precision=FP32.mixed_precision),
        strategy,
    )
    for _ in range(2):
        expected, got = update(plain), update(parked)
        assert got["loss"] == pytest.approx(expected["loss"], abs=1e-4)
        before = torch.cuda.memory_allocated()
        parked.to_host()
        freed = before - torch.cuda.memory_allocated()
        stored = sum(p.numel() * 4 for p in parked.root.parameters())
        assert freed >= 2.9 * stored, "parameters and both moments"


def test_offload_policy_trains_from_the_host(gpu, large):
    expected = update(engine(large, gpu, FP32))
    on_host = engine(large, gpu, FSDPConfig(offload_policy=True, mixed_precision=FP32.mixed_precision))
    metrics = update(on_host)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    assert all(p.device.type == "cpu" for p in on_host.root.parameters())
