"""Updates on a GPU with `save=auto` and no limit: the room is found and kept to."""

import gc

import pytest
import torch

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
from rlx.engine.micro_batches import MicroBatchRule
from rlx.engine.objectives import PolicyObjective

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("deterministic"),
]
FP32 = FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="fp32"))
ROWS, PROMPT, RESPONSE = 16, 64, 1984


@pytest.fixture(autouse=True)
def whole_device():
    """After a test the process may use all of the device's memory again."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture(scope="module")
def deep(tiny_folder):
    """Layers whose activations are far larger than their weights."""
    return tiny_folder(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=16, num_attention_heads=4, num_key_value_heads=2
    )


def batch():
    g = torch.Generator().manual_seed(0)
    mask = torch.ones(ROWS, PROMPT + RESPONSE, dtype=torch.bool)
    return Batch.of(
        {
            "input_ids": torch.randint(3, 250, mask.shape, generator=g),
            "attention_mask": mask,
            "response_mask": mask[:, PROMPT:],
            "advantages": torch.randn(ROWS, RESPONSE, generator=g),
            "old_log_probs": torch.full((ROWS, RESPONSE), -5.5),
        }
    )


def train(folder, device, budget, updates=5):
    """Peaks of the updates, full weights after them, and what was predicted last.

    Each update is two passes; eight precede the first that follows a plan where the device waits for the host.
    """
    torch.manual_seed(0)
    options = ActivationOffloadConfig(save="auto", max_device_bytes=budget)
    model = ModelConfig(path=folder, enable_activation_offload=True, activation_offload=options)
    engine = Engine(model, FP32, strategy="fsdp2", device=device, optim=OptimConfig(lr=1e-4), total_steps=10)
    objective = PolicyObjective(ActorConfig(), temperature=1.0, horizon=RESPONSE)
    peaks = []
    for _ in range(updates):
        torch.cuda.reset_peak_memory_stats()
        engine.update(batch(), MicroBatchRule(rows=8), objective)
        peaks.append(torch.cuda.max_memory_reserved())
    weights = {name: tensor.cpu() for name, tensor in engine.weights.full()}
    return peaks, weights, engine.memory.activations.plan().prediction.peak_bytes


def clean():
    gc.collect()
    torch.cuda.empty_cache()


def test_without_a_limit_the_room_is_found_and_kept_to(gpu, deep):
    """Optimizer states appear behind the first update, and are counted before."""
    clean()
    _, weights, _ = train(deep, gpu, 0)
    clean()
    _, weights_then, _ = train(deep, gpu, "auto")
    assert all(torch.equal(weights[name], weights_then[name]) for name in weights)
