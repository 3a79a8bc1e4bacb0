"""Measure engines on one GPU: `python -m benchmarks.engines (--model FOLDER | --shape NAME) [--engines 1 2 4]`.

It samples the same requests with each number of engines, without Ray and without a trainer, and prints a line of JSON for each:
seconds of start, sync and generation, tokens per second, and the device memory that is taken awake and asleep.

With `--staleness 0 2` each round is the generation of a step with such a `rollout.partial.max_staleness`, its weights sent again
before. The figures leave out the rounds until the queue is steady, and those in which it empties. `--log-normal 2000` draws lengths with
this mean, at most the longest response.
"""

import argparse
import contextlib
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from benchmarks.common import GB, benchmark_parser, chosen_device, join_alone, write_random_model
from rlx.config.schema import ModelConfig, RolloutConfig
from rlx.offload.plan.shapes import SHAPES
from rlx.rollout.protocol import Kept, Request, Rollout, Sampling
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
    parser.add_argument(
        "--log-normal", type=int, help="mean length; the longest of many responses is cut at --response"
    )
    parser.add_argument(
        "--staleness", type=int, nargs="+", default=[0], help="steps for which samples go on (default 0)"
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
            for figures in measure(folder, device, count, options):
                found.append(figures)
                print(json.dumps(figures), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()
    return 0


def measure(folder: str, device: torch.device, count: int, options: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Yield the figures of so many engines, for each staleness."""
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
    del model
    for staleness in options.staleness:
        sampler.update_weights(weights.items(), 1)
        generator, queue, rounds = random.Random(0), list[Begun](), list[tuple[float, int]]()
        for turn in range(
            options.rounds + 2 * staleness
        ):  # the queue is steady after the first, and empties at the end
            if staleness:
                sampler.update_weights(weights.items(), 2 + turn)
            while len(queue) <= min(staleness, options.rounds + 2 * staleness - turn - 1):
                seed = (turn + len(queue)) * options.requests
                queue.append([(each, Kept()) for each in requests_of(options, generator, vocabulary, seed, staleness)])
            start = time.perf_counter()
            tokens = one_round(sampler, queue, -(-options.response[1] // (staleness + 1)))
            rounds.append((time.perf_counter() - start, tokens))
            trained = sum(len(kept.token_ids) for _, kept in queue.pop(0))
            said = {
                "round": turn,
                "seconds": rounds[-1][0],
                "tokens": tokens,
                "trained": trained,
                **sampler.take_load(),
            }
            print(json.dumps({**said, "staleness": staleness}), file=sys.stderr, flush=True)
        steady = rounds[max(staleness, len(rounds) > 1) : len(rounds) - staleness]
        figures |= {
            "staleness": staleness,
            "generate_s": statistics.median(seconds for seconds, _ in steady),
            "tokens_per_s": statistics.median(tokens / seconds for seconds, tokens in steady),
        }
        figures["awake_gb"] = used_gb(device) - before
        sampler.sleep()
        figures["asleep_gb"] = used_gb(device) - before
        yield {name: round(value, 2) for name, value in figures.items()}
    sampler.close()


Begun = list[tuple[Request, Kept]]
"""The requests of a step, and what each has."""


def requests_of(
    options: argparse.Namespace, generator: random.Random, vocabulary: int, seed: int, staleness: int
) -> list[Request]:
    requests = list[Request]()
    fewest, most = options.response
    for _ in range(options.requests // options.group):
        prompt = tuple(generator.randrange(2, vocabulary) for _ in range(options.prompt))
        for _ in range(options.group):
            length = generator.randint(fewest, most)
            if options.log_normal:  # the mean of exp(N(m, 1)) is exp(m + 1/2)
                length = min(most, 1 + int(generator.lognormvariate(math.log(options.log_normal) - 0.5, 1.0)))
            requests.append(Request(prompt, seed + len(requests), Sampling(length, by_position=staleness > 0)))
    return requests


def one_round(sampler: Rollout, queue: list[Begun], budget: int) -> int:
    """Run the first requests to their end and those of later steps by a budget; return the tokens sampled."""
    places = [(step, at) for step, own in enumerate(queue) for at, (_, kept) in enumerate(own) if not kept.is_finished]
    asked = list[Request]()
    for step, at in places:
        request, kept = queue[step][at]
        prompt, own = (*request.prompt_ids, *kept.token_ids), len(kept.token_ids)
        asked.append(replace(request, prompt_ids=prompt, kept=own, budget=budget if step else None))
    completions = sampler.generate(asked)
    for (step, at), completion in zip(places, completions, strict=True):
        request, kept = queue[step][at]
        queue[step][at] = request, kept.continued(completion, 0)
    return sum(len(each.token_ids) for each in completions)


def used_gb(device: torch.device) -> float:
    """Return the device memory that all processes take [10^9 bytes], but for what torch's allocator here keeps free."""
    if device.type == "cpu":
        return 0.0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / GB


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
