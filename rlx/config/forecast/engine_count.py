"""How many vLLM engines each GPU gets with `rollout.engines_per_gpu=auto`, and why; figures are in docs/rollout.md.

A step of an engine is Python, in which the GPU waits for it, and then work, which waits for that of other engines. So each of N
engines takes a step in T = Python + work + (N - 1) work * (work / T), the last factor being the share of time that another engine
works; and in N * work at least.
"""

import math
from itertools import pairwise
from typing import NamedTuple

from rlx.config.machine import Machine, on_accelerator
from rlx.config.schema import PPOConfig
from rlx.config.schema.roles import sampling_processes
from rlx.config.vllm_range import ENGINE_BYTES
from rlx.offload.plan.decoder import Decoder
from rlx.offload.plan.hardware import MATMUL_SHARE, MEMORY_SHARE, PROFILES, Hardware

NUMBERS = (1, 2, 4)  # eight were no faster
# How much faster twice as many must be, as each takes memory. Two were 1.23 times as fast where 1.18 is predicted (0.5B, 128 samples
# with prompts of 4,096 tokens), and four slower than two at 1.24.
GAINS = {2: 1.15, 4: 4 / 3}
CORES = 2  # of an engine: its scheduler and its kernels' launches
CACHE_SHARE = 0.8  # of one engine's cache must remain, unless it holds all sequences
OF_ONE_ENGINE = {
    *("kv_cache_memory_bytes", "num_gpu_blocks_override", "cpu_offload_gb", "kv_offloading_size"),
    *("kv_transfer_config", "speculative_config"),
}
# Of vLLM 0.26 on an H100's host
PYTHON_S, PYTHON_S_PER_REQUEST = 3.5e-3, 28e-6
KERNELS_S = 80e-6  # of a layer, even if it has nothing to do; with the change from one process to another
LOGIT_PASSES = 8  # over fp32 logits, to sample


class EngineCount(NamedTuple):
    """Engines of a GPU, and the reason."""

    per_gpu: int
    reason: str


def engine_count(config: PPOConfig, machine: Machine, actor: Decoder | str | None) -> EngineCount:
    """Return the engines of each GPU: as configured, or for `auto` as many as make generation faster and fit."""
    rollout, model, data = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, config.data
    if rollout.engines_per_gpu != "auto":
        return EngineCount(int(rollout.engines_per_gpu), "as configured")
    for is_single, reason in (
        (rollout.name != "vllm", "hf decodes in the worker"),
        (not on_accelerator(config, machine), "on a CPU engines share the cores"),
        (model.sends_adapters, "each engine would keep a copy of the base on the host"),
        (rollout.tensor_model_parallel_size > 1, "an engine has several GPUs"),
        (config.trainer.nnodes > 1, "the machines may differ"),
        (bool(OF_ONE_ENGINE & rollout.engine_kwargs.vllm.keys()), "engine_kwargs.vllm has sizes of one engine"),
    ):
        if is_single:
            return EngineCount(1, reason)
    if not isinstance(actor, Decoder) or machine.device_bytes is None:
        return EngineCount(1, "the model or the GPU is of unknown size here")
    rows = -(-data.train_batch_size * rollout.n // sampling_processes(config))
    places, tokens = min(rollout.max_num_seqs, rows), data.max_prompt_length + data.max_response_length // 2
    element = 4 if rollout.dtype == "fp32" else 2
    weights = actor.parameters * element
    sequence_bytes = 2 * len(actor.windows) * actor.kv_heads * actor.head_width * element * tokens
    caches = {n: rollout.gpu_memory_utilization * machine.device_bytes - n * (weights + ENGINE_BYTES) for n in NUMBERS}
    hardware = machine.hardware or PROFILES["h100"]
    times = {n: step_s(actor, hardware, -(-places // n), sequence_bytes, weights, n) for n in NUMBERS}
    for count, more in pairwise(NUMBERS):
        if (gain := times[count] / times[more]) < GAINS[more]:
            return EngineCount(count, f"{more} would be {gain:.1f} times as fast, too little for their memory")
        if machine.cpus < more * CORES * config.trainer.samplers_per_node:
            return EngineCount(count, f"{machine.cpus} cores are too few for more")
        if caches[more] < min(CACHE_SHARE * caches[1], places * sequence_bytes):
            return EngineCount(count, "copies of the weights would take too much of the cache")
    return EngineCount(NUMBERS[-1], "more are no faster")


def step_s(
    actor: Decoder, hardware: Hardware, places: int, sequence_bytes: float, weights: float, engines: int
) -> float:
    """Return the seconds in which each of so many engines decodes a token for `places` sequences."""
    rate = MEMORY_SHARE * hardware.memory_bytes_per_s
    matmuls = 2 * actor.parameters * places / (MATMUL_SHARE * hardware.peak_flops)
    work = KERNELS_S * len(actor.windows) + max(weights / rate, matmuls)
    work += places * (sequence_bytes + 4 * LOGIT_PASSES * actor.vocabulary) / rate
    alone = PYTHON_S + PYTHON_S_PER_REQUEST * places + work
    return max(engines * work, (alone + math.sqrt(alone**2 + 4 * (engines - 1) * work**2)) / 2)
