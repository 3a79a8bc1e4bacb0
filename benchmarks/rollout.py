"""Measure generation next to training: `python -m benchmarks.rollout [--shape NAME] [key=value ...]`.

It takes the overrides of a run and builds that run's worker with actor and sampler, in this process; several GPUs with
`torchrun --nproc-per-node N -m benchmarks.rollout`. Measured are the sync of weights next to a plain copy on the
device, how far the sampler's log-probs are from the trainer's, cycles of sleep, training, wake, sync and generation, and
throughput beside the same vLLM engine called directly. It prints a table and writes the figures as JSON.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import GB, seconds_of, write_random_model
from rlx.config.check.validate import check
from rlx.config.compose.command_line import compose
from rlx.config.faults import numbered
from rlx.config.machine import inspect_machine
from rlx.config.schema import PPOConfig, RolloutConfig
from rlx.data.batch import SEQUENCE, Batch
from rlx.models.loading import load_model
from rlx.models.log_probs import token_log_probs
from rlx.models.tiny import make_tiny_tokenizer
from rlx.offload.plan.shapes import SHAPES
from rlx.rollout.protocol import Request
from rlx.rollout.vllm_support import OwnRandomState
from rlx.trainer.run import with_models
from rlx.trainer.samples import spread
from rlx.workers.roles import ActorRole, RolloutRole
from rlx.workers.worker import Worker

Figures = dict[str, float]


def main(arguments: list[str]) -> int:
    """Measure, print and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape, in place of model.path")
    parser.add_argument("--requests", type=int, default=256, help="prompts of a generation (default 256)")
    cycles = "of sleep, training, wake, sync, generation (default 20)"
    parser.add_argument("--cycles", type=int, default=20, help=cycles)
    parser.add_argument("--rounds", type=int, default=5, help="of which medians are taken (default 5)")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options, overrides = parser.parse_known_args(arguments)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    with contextlib.ExitStack() as stack:
        if options.shape:
            # Each rank makes its own; they are equal.
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rlx-shape-"))
            changed = {"max_position_embeddings": 32768, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
            write_random_model(Path(folder), options.shape, own_device(), **changed)
            make_tiny_tokenizer().save_pretrained(folder)
            overrides = [*overrides, f"actor_rollout_ref.model.path={folder}"]
        config = configured(overrides)
        if config is None:
            return 2
        figures = measure(config, options.requests, options.cycles, options.rounds)
    if os.environ["RANK"] == "0" and options.out:
        options.out.write_text(json.dumps({"arguments": arguments, **figures}, indent=1))
    torch.distributed.destroy_process_group()
    return 0


def configured(overrides: list[str]) -> PPOConfig | None:
    """Return a checked configuration with one optimizer step per update at rate 0; print its faults and return None if any."""
    world_size = int(os.environ["WORLD_SIZE"])
    fixed = ["trainer.total_training_steps=1", f"trainer.n_gpus_per_node={world_size}", "algorithm.adv_estimator=grpo"]
    # With rate 0 training does not change the weights, so they must give the same samples again.
    optim = "actor_rollout_ref.actor.optim"
    fixed += ["actor_rollout_ref.rollout.n=2", f"{optim}.lr=0.0", f"{optim}.weight_decay=0.0"]
    composed = compose([*fixed, *overrides])
    faults = check(composed, inspect_machine()).faults
    if faults:
        print(numbered(faults), file=sys.stderr)
        return None
    return with_models(composed.config)


def own_device() -> torch.device:
    """Return this rank's accelerator after making it the current one, or the CPU if there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    index = int(os.environ["LOCAL_RANK"])
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def measure(config: PPOConfig, requests: int, cycles: int, rounds: int) -> Figures:
    """Measure and show all figures; every rank calls it."""
    settings, start = config.actor_rollout_ref.rollout, time.perf_counter()
    worker = Worker(config, ["actor", "rollout"])
    figures: Figures = {}
    engines = 1 if settings.engines_per_gpu == "auto" else int(settings.engines_per_gpu)
    show(figures, {"engines": engines, "start_s": time.perf_counter() - start})
    show(figures, measure_sync(worker, settings, rounds))
    rank, prompts = int(os.environ["RANK"]), make_prompts(config, requests)
    together = settings.tensor_model_parallel_size
    mine = prompts.rows(list(range(rank // together, requests, int(os.environ["WORLD_SIZE"]) // together)))
    show(figures, measure_throughput(worker, mine, rounds))
    show(figures, measure_mismatch(worker, config, mine))
    show(figures, measure_cycles(worker, mine, cycles))
    roles(worker)[1].sampler.close()
    return figures


def call(worker: Worker, role: str, method: str, *arguments: Any) -> Any:
    """Call a method of a role as the worker's process does."""
    with worker.at_work(role, method) as function:
        return function(*arguments)


def make_prompts(config: PPOConfig, count: int) -> Batch:
    """Return prompts of random bytes, between a quarter of the longest length and all of it."""
    longest = config.data.max_prompt_length
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(max(1, longest // 4), longest + 1, (count, 1), generator=generator)
    mask = torch.arange(longest) >= longest - lengths
    ids = torch.randint(10, 250, (count, longest), generator=generator).masked_fill(~mask, 0)
    return spread(Batch.of({"prompt_ids": ids, "prompt_mask": mask}), 1, 0, "benchmark", 0)


def measure_sync(worker: Worker, settings: RolloutConfig, rounds: int) -> Figures:
    """Measure a sync of all weights, and a copy of as many bytes on the device [s]."""
    actor, _ = roles(worker)
    call(worker, "rollout", "sync", 0)
    seconds = [seconds_of(lambda: call(worker, "rollout", "sync", 1), worker.device) for _ in range(rounds)]
    count = sum(tensor.numel() for _, tensor in actor.engine.weights.full())
    actor.rest()
    bytes_each = 4 if settings.dtype == "fp32" or worker.device.type == "cpu" else 2
    source = torch.empty(count * bytes_each, dtype=torch.uint8, device=worker.device)
    target = torch.empty_like(source)
    copies = [seconds_of(lambda: target.copy_(source), worker.device) for _ in range(rounds + 1)][1:]
    sync_s, copy_s, gigabytes = statistics.median(seconds), statistics.median(copies), count * bytes_each / GB
    return {
        "weights_gb": gigabytes,
        "sync_s": sync_s,
        "sync_s_per_gb": sync_s / gigabytes,
        "copy_s": copy_s,
        "sync_to_copy": sync_s / copy_s,
    }


def direct(engine: Any, requests: Sequence[Request], seeded: bool) -> Callable[[], list[Any]]:
    """Return a function that calls vLLM's own `generate` and returns its objects, to compare with; it may be called repeatedly."""
    from vllm.inputs import TokensPrompt

    from rlx.rollout.vllm import _sampling_params

    prompts = [TokensPrompt(prompt_token_ids=list(request.prompt_ids)) for request in requests]
    params = [_sampling_params(request, seeded, engine._temperature) for request in requests]

    def call() -> list[Any]:
        with OwnRandomState(requests[0].seed).in_use(), torch.compiler.set_stance(engine._stance):
            return engine._engine.generate(prompts, params, use_tqdm=False, lora_request=engine._adapters)

    return call


def measure_throughput(worker: Worker, prompts: Batch, rounds: int) -> Figures:
    """Measure tokens per second of this process through rlx and of the same engine called directly, taking turns."""
    _, rollout = roles(worker)
    sampler, sampling = rollout.sampler, rollout.sampling["train"]
    ways: dict[str, Callable[[], Any]] = {"rlx": lambda: call(worker, "rollout", "generate", prompts, "train")}
    if hasattr(sampler, "engine"):  # vLLM in this process
        rows = zip(prompts["prompt_ids"], prompts["prompt_mask"], prompts["seed"].tolist(), strict=True)
        requests = [Request(tuple(ids[mask].tolist()), seed, sampling) for ids, mask, seed in rows]
        ways["vllm"] = direct(sampler.engine, requests, sampler.has_seeds)
        ways["vllm_unseeded"] = direct(sampler.engine, requests, seeded=False)
    samples = ways["rlx"]()
    tokens = int(samples["response_mask"].sum())
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        order = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
        for name in order:
            seconds[name].append(seconds_of(ways[name], worker.device))
    figures = {f"{name}_tokens_per_s": tokens / statistics.median(each) for name, each in seconds.items()}
    if "vllm" in ways:
        ratios = [a / b for a, b in zip(seconds["vllm"], seconds["rlx"], strict=True)]
        figures["rlx_to_vllm"] = statistics.median(ratios)
    return figures


def measure_mismatch(worker: Worker, config: PPOConfig, prompts: Batch) -> Figures:
    """Measure the distances between log-probs of sampler, trainer and the same weights in fp32.

    Two forwards that round to bf16 in different places cannot agree better than each agrees with the exact one.
    """
    samples = call(worker, "rollout", "generate", prompts.rows(range(min(len(prompts), 64))), "train")
    trained = call(worker, "actor", "log_probs", samples.select(*SEQUENCE))["old_log_probs"]
    worker.roles["actor"].rest()
    worker.roles["rollout"].rest()
    exact, mask = exact_log_probs(config, samples, worker.device), samples["response_mask"]
    pairs = {"": (trained, samples["rollout_log_probs"])}
    pairs |= {"_trainer_to_fp32": (trained, exact), "_sampler_to_fp32": (samples["rollout_log_probs"], exact)}
    gaps = {name: (one - other).abs()[mask] for name, (one, other) in pairs.items()}
    means = {f"log_prob_gap_mean{name}": gap.mean().item() for name, gap in gaps.items()}
    return {**means, "log_prob_gap_max": gaps[""].max().item()}


@torch.no_grad()
def exact_log_probs(config: PPOConfig, samples: Batch, device: torch.device) -> torch.Tensor:
    """Return the responses' log-probs (B, R) in fp32 under the first weights, which training has not changed."""
    policy = config.actor_rollout_ref
    model = load_model(policy.model, "lm", torch.float32).to(device)
    responses, rows = samples.responses(), []
    for row in range(len(samples)):
        taken = samples["attention_mask"][row]
        logits = model(input_ids=samples["input_ids"][row, taken][None].to(device)).logits[0]
        count = int(samples["response_mask"][row].sum())
        ids = responses[row, :count].to(device)
        log_probs, _ = token_log_probs(logits[-count - 1 : -1], ids, policy.rollout.temperature, False)
        rows.append(torch.nn.functional.pad(log_probs.cpu(), (0, responses.shape[1] - count)))
    return torch.stack(rows)


def measure_cycles(worker: Worker, prompts: Batch, cycles: int) -> Figures:
    """Measure device memory after each cycle, and count cycles with other greedy tokens than the first."""
    call(worker, "rollout", "sync", 1)
    greedy = call(worker, "rollout", "generate", prompts, "val")["input_ids"]
    samples = call(worker, "rollout", "generate", prompts, "train")
    old = call(worker, "actor", "log_probs", samples.select(*SEQUENCE))["old_log_probs"]
    noise = torch.randn(old.shape, generator=torch.Generator().manual_seed(0))
    batch = samples.select(*SEQUENCE).with_(old_log_probs=old, advantages=noise)
    used_gb, training_gb, seconds, others = list[float](), list[float](), list[float](), 0
    for cycle in range(cycles):
        start = time.perf_counter()
        call(worker, "actor", "update", batch)
        training_gb.append(device_gb(worker.device))
        call(worker, "rollout", "sync", 2 + cycle)
        again = call(worker, "rollout", "generate", prompts, "val")["input_ids"]
        others += not torch.equal(again, greedy)
        used_gb.append(device_gb(worker.device))
        seconds.append(time.perf_counter() - start)
    shown = {0, min(1, cycles - 1), cycles - 1}
    return {
        "cycles": cycles,
        "cycles_with_other_tokens": others,
        "cycle_s": statistics.median(seconds),
        **{f"cycle_{1 + n}_gb": used_gb[n] for n in shown},
        **{f"training_{1 + n}_gb": training_gb[n] for n in shown},
    }


def roles(worker: Worker) -> tuple[ActorRole, RolloutRole]:
    """Return the worker's roles actor and rollout."""
    return worker.roles["actor"], worker.roles["rollout"]  # type: ignore[return-value]


def device_gb(device: torch.device) -> float:
    """Return the device memory in use by all processes [10^9 bytes]; 0 on CPU."""
    if device.type == "cpu":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / GB


def show(figures: Figures, more: Figures) -> None:
    """Add figures, and print them on the first rank."""
    figures |= more
    if os.environ["RANK"] == "0":
        for name, value in more.items():
            print(f"{name:>34} {value:.6g}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
