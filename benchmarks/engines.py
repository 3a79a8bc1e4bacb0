"""Measure engines on one GPU: `python -m benchmarks.engines (--model FOLDER | --shape NAME) [--engines 1 2 4]`.

It samples the same requests with each number of engines, without Ray and without a trainer, and prints a line of JSON for each:
seconds of start, sync and generation, tokens per second, and the device memory that is taken awake and asleep.
"""

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from benchmarks.common import GB, benchmark_parser, chosen_device, join_alone, write_random_model
from rlx.config.schema import ModelConfig, RolloutConfig
from rlx.offload.plan.shapes import SHAPES
from rlx.rollout.protocol import Request, Sampling
from rlx.rollout.sampler import build_rollout


def main(arguments: list[str]) -> int:
    """Measure, print and return the exit code."""
    parser = benchmark_parser("engines", __doc__)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", help="folder of a model")
    model.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4], help="numbers of engines (default 1 2 4)")
    parser.add_argument("--places", type=int, default=1024, help="sequences decoded at once by all engines together")
    parser.add_argument("--requests", type=int, default=2048, help="in groups of --group equal prompts")
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=120, help="tokens of a prompt")
    parser.add_argument(
        "--response", type=int, nargs=2, default=(120, 256), help="fewest and most tokens of a response"
    )
    parser.add_argument("--utilization", type=float, default=0.6, help="rollout.gpu_memory_utilization")
    options = parser.parse_args(arguments)
    device = chosen_device(options.device)
    device = device if device.type == "cpu" else torch.device(device.type, 0)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    join_alone(device)
    found = []
    with contextlib.ExitStack() as stack:
        folder = options.model
        if options.shape:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rlx-shape-"))
            write_random_model(Path(folder), options.shape, device)
        for count in options.engines:
            found.append(measure(folder, device, count, options))
            print(json.dumps(found[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()
    return 0


def measure(folder: str, device: torch.device, count: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the figures of so many engines."""
    settings = RolloutConfig(
        name="vllm",
        engines_per_gpu=count,
        max_num_seqs=options.places,
        gpu_memory_utilization=options.utilization,
    )
    longest = options.prompt + options.response[1]
    before, start = used_gb(device), time.perf_counter()
    sampler = build_rollout(settings, ModelConfig(path=folder), device, longest)
    figures = {"engines": count, "places_each": -(-options.places // count), "start_s": time.perf_counter() - start}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    vocabulary, weights = model.config.vocab_size, model.to(device).state_dict()
    for _ in range(2):
        start = time.perf_counter()
        sampler.update_weights(weights.items(), 1)
        figures["sync_s"] = time.perf_counter() - start
    del model, weights
    generator = random.Random(0)
    for turn in range(options.rounds):
        requests = []
        for _ in range(options.requests // options.group):
            prompt = tuple(generator.randrange(2, vocabulary) for _ in range(options.prompt))
            for _ in range(options.group):
                sampling = Sampling(generator.randint(*options.response))
                requests.append(Request(prompt, len(requests) + turn * options.requests, sampling))
        start = time.perf_counter()
        tokens = sum(len(each.token_ids) for each in sampler.generate(requests))
        figures |= {"generate_s": time.perf_counter() - start, "tokens_per_s": tokens / (time.perf_counter() - start)}
        print(json.dumps({"round": turn, **figures, **sampler.take_load()}), file=sys.stderr, flush=True)
    figures["awake_gb"] = used_gb(device) - before
    sampler.sleep()
    figures["asleep_gb"] = used_gb(device) - before
    sampler.close()
    return {name: round(value, 2) for name, value in figures.items()}


def used_gb(device: torch.device) -> float:
    """Return the device memory that all processes take [10^9 bytes], but for what torch's allocator here keeps free."""
    if device.type == "cpu":
        return 0.0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / GB


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
