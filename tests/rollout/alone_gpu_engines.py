"""Several vLLM engines on one GPU, each a process: weights by CUDA IPC, sleep and wake, faults. Run alone, without Ray and Hydra."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from rlx.config.schema import FSDPConfig, ModelConfig, OptimConfig, RolloutConfig
from rlx.engine.engine import Engine
from rlx.rollout.engines import start_engines
from rlx.rollout.protocol import EngineError, Sampling
from rlx.rollout.sampler import build_rollout
from tests.rollout.alone_gpu_vllm import (
    GREEDY,
    MIB,
    PROMPT,
    RESPONSE,
    ROWS,
    UTILIZATION,
    make_model,
    requests,
    sampled,
    tokens,
    train,
    used_bytes,
)
from tests.rollout.alone_gpu_vllm import cudnn_attention as cudnn_attention
from tests.rollout.alone_gpu_vllm import gpu as gpu

pytestmark = [pytest.mark.gpu]
COUNT = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model("dense").save_pretrained(folder)
    return ModelConfig(path=str(folder))


@pytest.fixture(scope="module")
def trainer(gpu, model):
    fsdp = FSDPConfig(param_offload=True, optimizer_offload=True)
    return Engine(model, fsdp, strategy="fsdp2", device=gpu, optim=OptimConfig(lr=0.0), total_steps=100)


def settings(count):
    return RolloutConfig(name="vllm", gpu_memory_utilization=2 * UTILIZATION, max_num_seqs=64, engines_per_gpu=count)


def built(count, model, gpu):
    start = time.perf_counter()
    sampler = build_rollout(settings(count), model, gpu, PROMPT + RESPONSE, seed=1)
    print(f"\n{count} engines: built in {time.perf_counter() - start:.1f} s, {used_bytes() / 1e9:.2f} GB in use")
    return sampler


@pytest.fixture(scope="module")
def engines(gpu, model, trainer):
    before = used_bytes()
    trainer.memory.to_host()
    sampler = built(COUNT, model, gpu)
    yield sampler
    sampler.close()
    assert used_bytes() - before < 1000 * MIB, "the processes took their memory with them; the rest is the trainer's"


def sync(sampler, trainer, version):
    start = time.perf_counter()
    sampler.update_weights(trainer.weights.full(), version)
    print(f"sync of version {version}: {time.perf_counter() - start:.3f} s")
    trainer.memory.to_host()


def test_log_probs_are_the_trainers_and_every_engine_has_the_weights(engines, trainer):
    assert type(engines).__name__ == "EngineRollout"
    sync(engines, trainer, 0)
    assert len(engines.probe()) > 1000  # it raises if engines differ
    batch = sampled(engines, Sampling(RESPONSE))
    own, mask = trainer.log_probs(batch, ROWS, 1.0)["log_probs"], batch["response_mask"]
    trainer.memory.to_host()
    off = (batch["rollout_log_probs"] - own)[mask].abs().mean()
    print(f"log-probs off by {off:.5f} in the mean")
    assert off < 0.01, "other random weights are 0.5 away"


def test_cycles_of_sleep_training_and_sync_give_the_same_tokens_and_take_no_more_memory(engines, trainer):
    sync(engines, trainer, 0)
    first, batch = tokens(engines.generate(requests(GREEDY))), sampled(engines, Sampling(RESPONSE))
    asleep, awake = [], []
    for version in range(1, 5):
        awake.append(used_bytes())
        engines.sleep()
        assert engines.version is None
        asleep.append(used_bytes())
        assert train(trainer, batch)["grad_norm"] > 0
        trainer.memory.to_host()
        engines.wake()
        sync(engines, trainer, version)
        assert engines.version == version
        again = tokens(engines.generate(requests(GREEDY)))
        assert sum(a != b for a, b in zip(again, first, strict=True)) <= 1
    print(f"awake {awake[-1] / 1e9:.2f} GB, asleep {asleep[-1] / 1e9:.2f} GB")
    assert min(awake) - max(asleep) > UTILIZATION * torch.cuda.mem_get_info()[1], "weights and cache are given back"
    assert max(asleep[1:]) <= asleep[1] + 64 * MIB and max(awake[1:]) <= awake[1] + 64 * MIB


def test_an_engine_that_is_killed_is_named_and_another_set_gives_the_same_samples(engines, trainer, model, gpu):
    sync(engines, trainer, 8)
    before = tokens(engines.generate(requests(GREEDY)))
    others = start_engines(RolloutConfig(engines_per_gpu=2))
    others_pids = {each.pid for each in psutil.Process().children()}
    sampler = build_rollout(settings(2), model, gpu, PROMPT + RESPONSE, seed=1, engines=others)
    sync(sampler, trainer, 8)
    for each in requests(GREEDY):
        sampler.add_request(each)
    newest = max(others_pids)
    os.kill(newest, signal.SIGKILL)
    with pytest.raises(EngineError, match=rf"engine 2 of 2 \(process {newest}\) ended \(SIGKILL\)"):
        while sampler.running:
            sampler.step()
    sync(sampler, trainer, 9)  # with the other engine
    sampler.close()
    again = tokens(engines.generate(requests(GREEDY)))
    assert sum(a != b for a, b in zip(again, before, strict=True)) <= 1


def test_samples_are_those_of_one_engine_but_for_the_rounding_of_bf16(engines, trainer, model, gpu):
    """In this process as always; last, because it imports vLLM."""
    sync(engines, trainer, 0)
    several = tokens(engines.generate(requests(Sampling(RESPONSE))))
    engines.sleep()
    one = built(1, model, gpu)
    try:
        sync(one, trainer, 0)
        alone = tokens(one.generate(requests(Sampling(RESPONSE))))
        few = [tokens(one.generate([each]))[0] for each in requests(Sampling(RESPONSE))]
    finally:
        one.close()
    share, share_of_one = (
        sum(a == b for a, b in zip(found, other, strict=True)) / len(alone)
        for found, other in ((several, alone), (few, alone))
    )
    print(f"equal samples: {share:.2f} on {COUNT} engines, {share_of_one:.2f} on one engine at batch size 1")
    assert share >= min(0.5, share_of_one - 0.2)


EXPANDABLE = """
import sys, torch
from rlx.config.schema import ModelConfig, RolloutConfig
from rlx.models.loading import load_model
from rlx.rollout.protocol import Request, Sampling
from rlx.rollout.sampler import build_rollout
from benchmarks.common import join_alone
gpu, model = torch.device("cuda", 0), ModelConfig(path=sys.argv[1])
torch.cuda.set_device(gpu)
join_alone(gpu)
weights = load_model(model, "lm", torch.float32).to(gpu).state_dict()
vllm = build_rollout(RolloutConfig(name="vllm", gpu_memory_utilization=0.15, max_num_seqs=16), model, gpu, 64)
requests, found = [Request((5, 6, 7), 0, Sampling(32, 0.0)) for _ in range(8)], []
for version in range(3):
    vllm.update_weights(weights.items(), version)
    found.append([each.token_ids for each in vllm.generate(requests)])
    free = torch.cuda.mem_get_info()[0]
    vllm.sleep()
    torch.empty(3 << 30, dtype=torch.uint8, device=gpu)  # in segments that grow
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] - free > 0.1 * torch.cuda.mem_get_info()[1], "it gives its memory back"
assert found[0] == found[1] == found[2]
assert torch.cuda.memory_snapshot()[0]["is_expandable"], "the trainer's segments are"
"""


def test_vllm_sleeps_beside_a_trainer_with_expandable_segments(model):
    """By torch's new name, which vLLM does not read."""
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-c", EXPANDABLE, model.path]
    done = subprocess.run(command, env={**os.environ, **names}, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
