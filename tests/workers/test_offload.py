"""Two steps of actor, reference and critic in one process: with each way of offloading not a bit differs from without."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlx.config.host_memory import HostMemory
from rlx.config.schema import PPOConfig
from rlx.data.batch import Batch
from rlx.offload import Account, DiskError, host_arena
from rlx.offload.storage.ranges import MIN_STAGING_BYTES
from rlx.workers.worker import Worker

SEQUENCE = ("input_ids", "attention_mask", "response_mask")
ROWS, MICRO_ROWS, P, R = 30, 20, 9, 6
DISK = {"tier": "disk", "directory": "folder"}
OVERFLOW = {"max_host_bytes": 4 * MIN_STAGING_BYTES, "directory": "folder"}

Run = Callable[..., tuple[list[Any], list[dict[str, float]]]]


def call(worker: Worker, role: str, method: str, *arguments: Any) -> Any:
    """Call a method of a role as the worker's process does."""
    with worker.at_work(role, method) as function:
        return function(*arguments)


def sequences() -> Batch:
    """Rows of different lengths with everything that an update reads beside the log-probs and values."""
    g = torch.Generator().manual_seed(3)
    prompts, responses = (torch.randint(1, n + 1, (ROWS, 1), generator=g) for n in (P, R))
    mask = torch.cat([torch.arange(P) >= P - prompts, torch.arange(R) < responses], dim=1)
    return Batch.of(
        {
            "input_ids": torch.randint(3, 250, (ROWS, P + R), generator=g).masked_fill(~mask, 0),
            "attention_mask": mask,
            "response_mask": mask[:, P:].clone(),
            "advantages": torch.randn(ROWS, R, generator=g),
            "returns": torch.randn(ROWS, R, generator=g),
        }
    )


def train(config: PPOConfig, steps: int = 2) -> tuple[list[Any], list[dict[str, float]]]:
    """What actor, reference and critic compute in some steps, and what the process took in each."""
    worker, numbers, usage = Worker(config, ["actor", "ref", "critic"]), [], []
    worker.usage()
    for _ in range(steps):
        batch = sequences()
        for role, method in (("actor", "log_probs"), ("ref", "log_probs"), ("critic", "values")):
            answer = call(worker, role, method, batch.select(*SEQUENCE))
            batch = batch.with_(**answer.tensors)
            numbers += [tensor.tolist() for _, tensor in sorted(answer.tensors.items())]
        numbers.append(call(worker, "critic", "update", batch.select(*SEQUENCE, "values", "returns")))
        columns = (*SEQUENCE, "old_log_probs", "advantages", "ref_log_probs")
        numbers.append(call(worker, "actor", "update", batch.select(*columns)))
        usage.append(call(worker, "process", "usage"))
    dist.destroy_process_group()
    return numbers, usage


def configured(config: PPOConfig, **model: Any) -> PPOConfig:
    """The same for actor and critic."""
    policy, critic, rows = config.actor_rollout_ref, config.critic, {"ppo_micro_batch_size_per_gpu": MICRO_ROWS}
    changed = {"enable_gradient_checkpointing": True, **model}
    return replace(
        config,
        actor_rollout_ref=replace(policy, model=replace(policy.model, **changed), actor=replace(policy.actor, **rows)),
        critic=replace(critic, model=replace(critic.model, **changed), **rows),
        trainer=replace(config.trainer, n_gpus_per_node=1),
    )


def offloading(config: PPOConfig, options: dict[str, Any], folder: Any) -> PPOConfig:
    located = {**options, "directory": str(folder)} if "directory" in options else options
    offload = replace(config.actor_rollout_ref.model.activation_offload, min_bytes=0, **located)
    return configured(config, enable_activation_offload=True, activation_offload=offload)


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_offloading_changes_no_bit_of_any_role(config, tmp_path):
    plain, usage = train(configured(config, enable_activation_offload=False))
    for figures in usage:
        assert {n for n in figures if not n.startswith("memory/")} == {"peak_memory_gb", "readings"}
    numbers, usage = train(offloading(config, {"save": "attention", **OVERFLOW}, tmp_path))
    assert numbers == plain
    assert plain[-1]["actor/grad_norm"] > 0 and plain[-2]["critic/grad_norm"] > 0
    for role in ("actor", "critic"):
        first, second = ({n: v for n, v in figures.items() if n.startswith(role)} for figures in usage)
        assert second[f"{role}/offloaded_bytes"] == first[f"{role}/offloaded_bytes"] > 0, "figures are of one step"
        assert second[f"{role}/held_bytes"] == 0
        assert second[f"{role}/recomputed_ms"] > 0
        assert second[f"{role}/reserved_bytes"] == first[f"{role}/reserved_bytes"], "no growth after the first step"
        assert second[f"{role}/disk_bytes"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("environment")
def test_offloading_changes_no_bit_and_takes_no_memory_after_the_first_step(config, tmp_path):
    still = offloading(config, {"save": "boundary"}, tmp_path)
    policy, critic, flags = still.actor_rollout_ref, still.critic, {"param_offload": True, "optimizer_offload": True}
    actor = replace(policy.actor, fsdp_config=replace(policy.actor.fsdp_config, **flags))
    ref = replace(policy.ref, fsdp_config=replace(policy.ref.fsdp_config, **flags))
    moved = replace(
        still,
        actor_rollout_ref=replace(policy, actor=actor, ref=ref),
        critic=replace(critic, fsdp=replace(critic.fsdp, **flags)),
    )
    numbers, usage = train(moved, steps=3)
    assert numbers == train(still, steps=3)[0]
    first, second, third = (
        {name.removeprefix("memory/host_"): v for name, v in figures.items() if name.startswith("memory/host_")}
        for figures in usage
    )
    assert second == third and second["reserved_gb"] == first["reserved_gb"]
    weights = first["ref_parameters_gb"]
    assert weights > 0 and first["critic_optimizer_state_gb"] >= 2 * first["critic_parameters_gb"] > 0
    actors = {name for name in first if name.startswith("actor")}
    assert actors == {"actor_optimizer_state_gb"}, "it was the last to work; its state is on the host but for the step"
    for figures in usage:
        calls = {name.removeprefix("memory/") for name in figures if name.endswith("_before_gb")}
        assert calls == {
            f"{call}_before_gb"
            for call in ("actor.log_probs", "ref.log_probs", "critic.values", "critic.update", "actor.update")
        }


@pytest.mark.usefixtures("environment")
def test_parameters_leave_once_for_a_sync(config, monkeypatch):
    still = configured(config)
    policy = still.actor_rollout_ref
    fsdp = replace(policy.actor.fsdp_config, param_offload=True, optimizer_offload=True)
    actor = replace(policy.actor, fsdp_config=fsdp)
    worker = Worker(replace(still, actor_rollout_ref=replace(policy, actor=actor)), ["actor", "rollout"])
    arena, batch = host_arena(False), sequences()
    assert arena.holders()["actor_parameters"] > 0, "they wait from the start"
    log_probs = call(worker, "actor", "log_probs", batch.select(*SEQUENCE))["old_log_probs"]
    batch = batch.with_(old_log_probs=log_probs, ref_log_probs=log_probs)
    call(worker, "actor", "update", batch.select(*SEQUENCE, "old_log_probs", "advantages", "ref_log_probs"))
    assert arena.holders()["actor_parameters"] == 0
    taken, allocate = [], Account.allocate
    monkeypatch.setattr(Account, "allocate", lambda self, nbytes: taken.append(self.name) or allocate(self, nbytes))
    call(worker, "rollout", "sync", 1)
    assert taken == ["actor_parameters"], "the optimizer's state was there already"
    assert arena.holders()["actor_parameters"] > 0 < arena.holders()["actor_optimizer_state"]


@pytest.mark.usefixtures("environment")
def test_a_worker_without_the_folder_on_its_machine_names_it(config, tmp_path):
    missing = tmp_path / "nowhere"
    with pytest.raises(DiskError, match=r"cannot use the directory .*another directory.*nowhere"):
        Worker(offloading(config, DISK, missing), ["actor"])


@pytest.mark.usefixtures("environment")
def test_the_rollout_finds_the_host_memory_given_back_if_it_is_short(config, monkeypatch):
    gc.collect()  # engines of other tests hold a part of the arena
    memory = HostMemory(90, 100)
    monkeypatch.setattr("rlx.workers.worker.host_memory", lambda: memory)
    worker = Worker(configured(config), ["actor", "rollout"])
    batch = sequences()
    batch = batch.with_(old_log_probs=call(worker, "actor", "log_probs", batch.select(*SEQUENCE))["old_log_probs"])
    batch = batch.with_(ref_log_probs=batch["old_log_probs"])
    columns = (*SEQUENCE, "old_log_probs", "advantages", "ref_log_probs")

    def reserved_after_a_step() -> float:
        call(worker, "actor", "update", batch.select(*columns))
        before = worker.usage()["actor/reserved_bytes"]
        call(worker, "rollout", "sync", 1)
        assert before > 0
        return worker.usage()["actor/reserved_bytes"]

    assert reserved_after_a_step() > 0, "there is plenty: kept for the next update"
    memory = HostMemory(10, 100)
    assert reserved_after_a_step() == 0
    assert reserved_after_a_step() == 0, "and taken anew by the update between"
