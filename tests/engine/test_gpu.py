"""The engine on a GPU: bf16 compute, NCCL, memory that is given back."""

import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from rlx.config.host_memory import HostMemory
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
from rlx.engine.fsdp_units import local
from rlx.engine.host_offload import HostRelief
from rlx.engine.micro_batches import MicroBatchRule
from rlx.engine.objectives import PolicyObjective
from rlx.engine.optimizer_state import OptimizerStateOnHost
from rlx.models.preflight import SHARDS_BYTES
from rlx.offload import host_arena

pytestmark = [pytest.mark.gpu]

PROMPT, RESPONSE = 90, 203
MIB = 1 << 20
FP32 = FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="fp32"))
PARKED = {"param_offload": True, "optimizer_offload": True}


@pytest.fixture(scope="module")
def large(tiny_folder: Callable[..., str]) -> str:
    """A Qwen3 wide enough that its attention takes the kernels that real models take."""
    return tiny_folder(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2
    )


@pytest.fixture(scope="module")
def wide(tiny_folder: Callable[..., str]) -> str:
    """Half a GB of fp32 parameters, beside which what CUDA's libraries keep is little."""
    return tiny_folder(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2
    )


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


def test_packed_rows_say_in_bf16_what_padded_ones_say(gpu, large):
    """Attention by the kernel for variable lengths, beside padded rows and beside fp32, a sequence at a time."""
    found = {}
    for name, fsdp, packs in (("exact", FP32, True), ("padded", FSDPConfig(), False), ("packed", FSDPConfig(), True)):
        model = ModelConfig(path=large, use_remove_padding=packs)
        said = Engine(model, fsdp, strategy="fsdp2", device=gpu).log_probs(ragged(), MicroBatchRule(tokens=2000), 1.0)
        found[name] = said["log_probs"]
    off = {name: (found[name] - found["exact"]).abs().mean() for name in ("padded", "packed")}
    assert 0 < off["packed"] <= 1.5 * off["padded"]


@pytest.mark.parametrize("shared", [True, False])
def test_the_host_waits_for_the_device_once_not_for_each_micro_batch(gpu, large, shared):
    batch = ragged()
    if shared:  # four prompts of eight rows
        ids, mask = batch["input_ids"].clone(), batch["attention_mask"].clone()
        ids[:, :PROMPT], mask[:, :PROMPT] = (x[::8, :PROMPT].repeat_interleave(8, dim=0) for x in (ids, mask))
        batch = batch.with_(input_ids=ids, attention_mask=mask)
    model = ModelConfig(path=large, use_shared_prefix=shared)
    made, waits = Engine(model, FSDPConfig(), strategy="fsdp2", device=gpu), []
    for rows in (8, 32, 8):  # the first call compiles, and finds out what the model can do
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            made.log_probs(batch, MicroBatchRule(rows=rows), 1.0)
            torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchroniz" in str(each.message) for each in seen))
    assert waits[1] == waits[2], "four micro-batches, as many waits as one"


@pytest.mark.parametrize("save", ["boundary", "attention"])
def test_offloading_of_packed_attention_in_bf16_gives_the_same_step(gpu, large, save):
    plain, offloaded = engine(large, gpu, FSDPConfig(), offload=False), engine(large, gpu, FSDPConfig(), save=save)
    update(offloaded), update(plain)  # what the model can do is found out in the first one
    expected = update(plain)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        got = update(offloaded)
    assert got["loss"] == pytest.approx(expected["loss"], abs=1e-4)
    assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    calls = sum(event.count for event in profile.key_averages() if event.key == "aten::_flash_attention_forward")
    micro_batches, layers = 4, 4
    assert calls == micro_batches * layers * (1 if save == "attention" else 2), "twice where it is computed again"


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
        figures = offloaded.memory.stats()
        assert figures["offloaded_bytes"] > 0 == figures["held_bytes"]
        assert (figures["disk_bytes"] > 0) == (tier == "disk")
        assert figures["reserved_bytes"] > 0, "kept for the next update, or taken anew"
        assert HostRelief().relieve(HostMemory(10, 100)) >= figures["reserved_bytes"]
        assert offloaded.memory.stats()["reserved_bytes"] == 0


@pytest.mark.usefixtures("deterministic")
def test_auto_without_a_limit_changes_no_bit(gpu, large):
    """The optimizer's state appears after the first update, and is counted before."""
    found = []
    for budget in (0, "auto"):
        trained = engine(large, gpu, FP32, save="auto", max_device_bytes=budget)
        for _ in range(5):
            update(trained)
        found.append({name: tensor.cpu() for name, tensor in trained.weights.full()})
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_a_streamed_base_gives_the_same_bits_and_leaves_the_device(gpu, large, quantization):
    if quantization is not None:
        pytest.importorskip("bitsandbytes", reason="NF4 needs bitsandbytes (rlx[nf4])")
    lora = {"lora_rank": 8, "quantization": quantization, "enable_activation_offload": True}
    found = []
    has_resident = quantization is None or torch.__version__ >= SHARDS_BYTES
    for streams in (False, True) if has_resident else (True, True):
        model = ModelConfig(path=large, layer_offload=streams, **lora)
        fsdp = FSDPConfig(model_dtype="bf16", param_offload=True)
        trained = Engine(model, fsdp, strategy="fsdp2", device=gpu, optim=OptimConfig(lr=1e-2), total_steps=10)
        figures = [update(trained)]
        trained.memory.to_host()
        said = trained.log_probs(ragged(), MicroBatchRule(rows=8), 1.0)["log_probs"]
        adapters = {name: tensor.cpu() for name, tensor in trained.weights.adapters()}
        found.append((figures, update(trained), said, adapters))
        if streams:
            assert trained.memory.streaming.streamed_bytes > 0
            trained.memory.to_host()
            assert all(parameter.is_pinned() for parameter in trained.memory.streaming.parameters)
    (one, again, said, adapters), (other, again_too, said_too, adapters_too) = found
    assert (one, again) == (other, again_too)
    assert torch.equal(said, said_too)
    assert all(torch.equal(adapters[name], adapters_too[name]) for name in adapters)


def device_tensors(trained: Engine) -> list[torch.Tensor]:
    """Parameters and optimizer state that live on the device."""
    states = [x for state in trained.stepper.optimizer.state.values() for x in state.values()]
    return [local(tensor) for tensor in (*trained.root.parameters(), *states) if local(tensor).is_cuda]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_a_round_trip_changes_no_bit_and_training_goes_on_as_without(gpu, large, strategy):
    still = engine(large, gpu, FP32, strategy)
    moved = engine(large, gpu, replace(FP32, **PARKED), strategy)
    moved.stepper.on_host = OptimizerStateOnHost(  # in many pieces
        moved.stepper.optimizer, host_arena(True), "model_optimizer_state", gpu, piece_bytes=MIB
    )
    for _ in range(3):
        expected, got = update(still), update(moved)
        assert got == expected
        moved.memory.to_device()
        before = [tensor.clone() for tensor in device_tensors(moved)]
        assert len(before) >= 3 * sum(1 for _ in moved.root.parameters())
        moved.memory.to_host()
        left = [x for x in device_tensors(moved) if x.untyped_storage().nbytes()]
        assert all(x.dim() == 0 for x in left), "only counts of steps stay, those of states that are divided"
        assert host_arena(True).holders()["model_parameters"] >= sum(p.numel() * 4 for p in moved.root.parameters())
        moved.memory.to_device()
        assert all(torch.equal(*pair) for pair in zip(device_tensors(moved), before, strict=True))
        moved.memory.to_host()
    assert host_arena(True).pinned


class DeviceMemory(NamedTuple):
    """Bytes in use on the device by anybody, of torch's tensors, and that torch keeps."""

    used: int
    allocated: int
    reserved: int


def device_memory() -> DeviceMemory:
    free, total = torch.cuda.mem_get_info()
    return DeviceMemory(total - free, torch.cuda.memory_allocated(), torch.cuda.memory_reserved())


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_at_rest_the_device_is_free_for_others_and_no_cycle_needs_more_than_the_first(gpu, wide, strategy):
    gc.collect()
    torch.cuda.empty_cache()
    empty = device_memory()
    trained = engine(wide, gpu, FSDPConfig(**PARKED), strategy)
    parameter_bytes = sum(p.numel() * 4 for p in trained.root.parameters())
    trained.memory.to_host()
    assert device_memory().allocated <= empty.allocated + 0.1 * parameter_bytes, "before the first step, too"
    arena, at_rest = host_arena(True), []
    for _ in range(3):
        update(trained)
        busy = device_memory()
        trained.memory.to_host()
        rest = device_memory()
        # Not only to torch's allocator: a sampler with one of its own can take it.
        assert busy.used - rest.used >= 0.95 * parameter_bytes
        assert busy.allocated <= empty.allocated + 1.6 * parameter_bytes, "both moments have left in the step already"
        assert rest.allocated <= empty.allocated + 0.5 * parameter_bytes, "the gradients are gone"
        at_rest.append((rest, arena.reserved_bytes, arena.allocations))
    first, *later = at_rest
    for rest, *host in later:
        assert host == list(first[1:])
        assert rest.allocated <= first[0].allocated + MIB
        # A segment of torch's allocator stays while one small tensor is in it.
        assert rest.reserved <= first[0].reserved + 32 * MIB and rest.used <= first[0].used + 32 * MIB


def test_offload_policy_trains_from_the_host(gpu, large):
    expected = update(engine(large, gpu, FP32))
    on_host = engine(large, gpu, FSDPConfig(offload_policy=True, mixed_precision=FP32.mixed_precision))
    metrics = update(on_host)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    assert all(p.device.type == "cpu" for p in on_host.root.parameters())


def test_a_first_update_gives_the_log_probs_of_a_pass(gpu, large):
    """In bf16 and the same micro-batches, with the head's gradient compiled once for both kinds of update."""
    made, rows = engine(large, gpu, FSDPConfig()), MicroBatchRule(rows=8)
    assert not made.differs_in_training()
    passed = made.log_probs(ragged(), rows, 1.0)
    objective = PolicyObjective(ActorConfig(), temperature=1.0, horizon=RESPONSE).of_first_update()
    metrics, found = made.update_and_read(ragged(), rows, objective)
    assert metrics["ppo_kl"] == 0 < metrics["grad_norm"]
    for name, column in passed.items():
        assert (found[name] - column).abs().max() < 1e-3, name
