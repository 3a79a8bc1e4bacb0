"""The sampler's role on a GPU: it sleeps when another role works, takes weights again by itself, and survives a failure."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlx.config.schema import EngineKwargsConfig, RolloutConfig
from rlx.data.batch import Batch
from rlx.workers.worker import Worker

pytestmark = [pytest.mark.gpu]

SEQUENCE = ("input_ids", "attention_mask", "response_mask")
UTILIZATION = 0.1


def call(worker: Worker, role: str, method: str, *arguments: Any) -> Any:
    """Call a method of a role as the worker's process does."""
    with worker.at_work(role, method) as function:
        return function(*arguments)


@pytest.fixture(scope="module")
def worker(config) -> Iterator[Worker]:
    """Actor and sampler in this process, with a plug-in of vLLM that fails on demand."""
    plugin = EngineKwargsConfig(vllm={"logits_processors": ["failing_plugin:Failing"]})
    rollout = RolloutConfig(
        name="vllm", engine_kwargs=plugin, gpu_memory_utilization=UTILIZATION, enforce_eager=True, max_num_seqs=16
    )
    changed = replace(
        config,
        actor_rollout_ref=replace(config.actor_rollout_ref, rollout=rollout),
        trainer=replace(config.trainer, device="cuda", n_gpus_per_node=1),
    )
    with pytest.MonkeyPatch.context() as patch:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": port}.items():
            patch.setenv(name, str(value))
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.syspath_prepend(Path(__file__).parent)
        started = Worker(changed, ["actor", "rollout"])
        call(started, "rollout", "sync", 0)
        yield started
        started.roles["rollout"].sampler.close()
        dist.destroy_process_group()


def used_bytes() -> int:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.fixture(scope="module")
def samples(worker, prompts) -> Batch:
    return call(worker, "rollout", "generate", prompts, "train")


def test_it_sleeps_while_another_role_works_and_takes_the_weights_again(worker, prompts, samples):
    awake = used_bytes()
    for _ in range(3):
        call(worker, "actor", "log_probs", samples.select(*SEQUENCE))
        assert worker.roles["rollout"].sampler.version is None
        assert awake - used_bytes() > 0.7 * UTILIZATION * torch.cuda.mem_get_info()[1]
        again = call(worker, "rollout", "generate", prompts, "train")
        assert torch.equal(again["input_ids"], samples["input_ids"])
        assert torch.equal(again["policy_versions"], samples["policy_versions"])


def test_an_engine_that_fails_is_started_again_in_the_same_memory(worker, prompts, samples, caplog):
    from failing_plugin import Failing

    awake = used_bytes()
    for _ in range(2):
        caplog.clear()
        Failing.calls, Failing.raises_at = 0, (3,)
        again = call(worker, "rollout", "generate", prompts, "train")
        assert torch.equal(again["input_ids"], samples["input_ids"])
        assert ["started again" in record.getMessage() for record in caplog.records if record.name[:3] == "rlx"] == [
            True
        ]
    assert used_bytes() < awake + 500 * 2**20
