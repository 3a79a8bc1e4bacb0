"""`python -m benchmarks.longest_update` trains on ever longer sequences beside a sleeping vLLM, until the device has no room.

Each update has four sequences of random lengths and one of the printed length, each a micro-batch, as lengths in a run differ. Compare
the longest with and without `PYTORCH_ALLOC_CONF=expandable_segments:True`. vLLM's memory counts as allocated while it sleeps.
"""

import argparse
import json
import os
import random
import tempfile
from pathlib import Path

import torch

from benchmarks.common import GB, chosen_device, join_alone, title, write_random_model
from benchmarks.offload.device import clean_up
from rlx.config.schema import ActorConfig, FSDPConfig, ModelConfig, OptimConfig, RolloutConfig
from rlx.data.batch import Batch
from rlx.engine.engine import Engine
from rlx.engine.micro_batches import MicroBatchRule
from rlx.engine.objectives import PolicyObjective
from rlx.models.loading import load_model
from rlx.offload.plan.shapes import SHAPES
from rlx.rollout.protocol import Request, Rollout, Sampling
from rlx.rollout.sampler import build_rollout

GROWTH = 1.04


def batch_of(lengths: list[int]) -> Batch:
    """Return sequences of random tokens, all but the first of which are a response."""
    longest = max(lengths)
    attention_BT = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    response_BR = attention_BT[:, 1:].clone()
    ones_BR = torch.ones(response_BR.shape)
    ids_BT = torch.randint(5, 1000, attention_BT.shape)
    columns = {"old_log_probs": -ones_BR, "advantages": ones_BR}
    return Batch.of({"input_ids": ids_BT, "attention_mask": attention_BT, "response_mask": response_BR, **columns})


def build(folder: str, device: torch.device) -> tuple[Rollout, Engine]:
    """Return a vLLM that has generated and sleeps, and an engine."""
    options = RolloutConfig(name="vllm", engines_per_gpu=1, max_num_seqs=256, gpu_memory_utilization=0.4)
    sampler = build_rollout(options, ModelConfig(path=folder), device, 1024)
    sampler.update_weights(load_model(ModelConfig(path=folder), "lm", torch.bfloat16).state_dict().items(), 1)
    sampler.generate([Request(tuple(range(5, 105)), seed, Sampling(64)) for seed in range(64)])
    sampler.sleep()
    clean_up(device)
    model = ModelConfig(path=folder, enable_gradient_checkpointing=False)
    fp32 = FSDPConfig(model_dtype="fp32")
    return sampler, Engine(model, fp32, strategy="fsdp2", device=device, optim=OptimConfig(lr=1e-6))


def main() -> None:
    """Run with the arguments above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen2-0.5b", choices=sorted(SHAPES), help="random weights of this shape")
    parser.add_argument("--tokens", type=int, default=44_000, help="of the longest sequence of the first update")
    given = parser.parse_args()
    device, length, longest = chosen_device(), given.tokens, 0
    if device.type == "cpu":
        parser.error("needs a CUDA device: got a CPU, whose memory no allocator of torch divides")
    print(f"{title(device)}, {given.shape}, PYTORCH_ALLOC_CONF={os.environ.get('PYTORCH_ALLOC_CONF', '')}")
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    join_alone(device)
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(Path(folder), given.shape, device)
        sampler, engine = build(folder, device)
    while True:
        torch.cuda.reset_peak_memory_stats()
        lengths = [random.randint(length // 8, length) for _ in range(4)] + [length]
        objective = PolicyObjective(ActorConfig(), temperature=1.0, horizon=length - 1)
        try:
            engine.update(batch_of(lengths), MicroBatchRule(rows=1), objective)
        except torch.OutOfMemoryError as error:
            print(f"{length} tokens: {error}\nlongest update: {longest} tokens")
            break
        used, held = torch.cuda.max_memory_allocated() / GB, torch.cuda.max_memory_reserved() / GB
        print(json.dumps({"tokens": length, "allocated GB": round(used, 2), "reserved GB": round(held, 2)}), flush=True)
        longest, length = length, int(length * GROWTH)
    sampler.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
