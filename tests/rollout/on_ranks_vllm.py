"""vLLM beside the trainer's engine, as it lives in a worker: what the tests let each rank do."""

import copy
import gc
import logging
import os
import random
import re
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from rounds import in_rounds
from transformers import AutoTokenizer

from rlx.config.schema import ActorConfig, EngineKwargsConfig, FSDPConfig, ModelConfig, OptimConfig, RolloutConfig
from rlx.data.batch import Batch
from rlx.engine.engine import Engine
from rlx.engine.micro_batches import MicroBatchRule
from rlx.engine.objectives import PolicyObjective
from rlx.rollout.protocol import Completion, FirstRank, Kept, PrefixMemory, Request, Rollout, Sampling
from rlx.rollout.sampler import build_rollout, generate_batch
from rlx.rollout.vllm_support import ContinuedHashes
from rlx.workers.roles import DequantizedBase

CPU = torch.device("cpu")
PROMPT, RESPONSE = 40, 12
CONTEXT = PROMPT + RESPONSE
ROWS = MicroBatchRule(rows=8)
PAD = 0


@dataclass
class Setup:
    """One configuration: the trainer's engine, a sampler to compare with and the one that is tested."""

    model: ModelConfig
    rollout: RolloutConfig
    engine: Engine
    hf: Rollout
    vllm: Rollout
    first_rank: FirstRank


NOW: list[Setup] = []
KEPT: list[DequantizedBase] = []


def trainer(model: ModelConfig, strategy: str) -> Engine:
    return Engine(model, FSDPConfig(), strategy=strategy, device=CPU, optim=OptimConfig(lr=1e-2), total_steps=10)


def start(folder, strategy, model, rollout, context=CONTEXT):
    """Builds all of it, without weights in the samplers; says what the process was like before vLLM and after."""
    chosen = ModelConfig(path=folder, **model)
    kwargs = EngineKwargsConfig(vllm={"block_size": 32, "kv_cache_memory_bytes": 1 << 22})
    settings = RolloutConfig(name="vllm", engine_kwargs=kwargs, **rollout)
    engine = trainer(chosen, strategy)
    if chosen.quantization is not None:
        KEPT.append(DequantizedBase(engine))
        chosen = replace(chosen, path=KEPT[-1].path)
    tokenizer = AutoTokenizer.from_pretrained(folder) if settings.stop else None
    hf = build_rollout(replace(settings, name="hf"), chosen, CPU, context, tokenizer=tokenizer)
    before = process()
    vllm = build_rollout(settings, chosen, CPU, context, 3, tokenizer)
    after = process()
    NOW.append(Setup(chosen, settings, engine, hf, vllm, FirstRank(settings.tensor_model_parallel_size)))
    return before, after


def decided(size):
    """Whether this rank decides, the decision, and the error of one that fails."""
    first = FirstRank(size)

    def failing():
        raise ValueError("not this one")

    try:
        first.decide(failing)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return first.is_this, first.decide(lambda: f"of rank {dist.get_rank()}"), text


def head_widths():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return set(CPUAttentionBackend.get_supported_head_sizes())


def left_names():
    """Returns the files that this process would leave if it were killed now: shared memory and sockets."""
    shared = re.findall(r"/dev/shm/psm_\S+$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    opened = {os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}
    known = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    sockets = [line[7] for line in known if len(line) > 7 and f"socket:[{line[6]}]" in opened]
    return shared, [socket for socket in sockets if Path(socket).exists()]


def stop():
    NOW.pop().vllm.close()


def disturbed():
    """What the process is like before and after it generates, takes new weights and generates again."""
    before, temperature = process(), NOW[-1].rollout.temperature
    greedy = Sampling(4, 0.0, with_log_probs=False)
    for sampling in (greedy, Sampling(4, temperature), Sampling(4, temperature, with_log_probs=False)):
        generate(sampling)
        sync(NOW[-1].vllm.version)
    return before, process()


def sync(version):
    """The engine's weights in both samplers, or its adapters."""
    for rollout in (NOW[-1].vllm, NOW[-1].hf):
        rollout.update_weights(weights(), version)
    return NOW[-1].vllm.version


def weights():
    engine = NOW[-1].engine
    return engine.weights.adapters() if NOW[-1].model.sends_adapters else engine.weights.full()


def probes():
    """What each sampler says of its weights."""
    return NOW[-1].hf.probe(), NOW[-1].vllm.probe()


def sleep():
    """The samplers' versions after they slept."""
    for rollout in (NOW[-1].hf, NOW[-1].vllm):
        rollout.sleep()
    return NOW[-1].hf.version, NOW[-1].vllm.version


def other_adapters(name):
    """Adapters of which one has another name."""
    pairs = dict(NOW[-1].engine.weights.adapters())
    chosen = {first.replace("layers.1.mlp.up_proj", name): tensor for first, tensor in pairs.items()}
    NOW[-1].vllm.update_weights(chosen.items(), 7)


def files_of_adapters():
    """The files in the sampler's folder of adapters."""
    return [file.name for file in Path(NOW[-1].vllm._folder.name).iterdir()]


def share() -> int:
    """Number of the tensor-parallel group that this rank is in: its processes get the same requests."""
    return dist.get_rank() // NOW[-1].rollout.tensor_model_parallel_size


def requests(sampling: Sampling, seed: int = 0, vocabulary: int = 40) -> list[Request]:
    """Prompts of many lengths, some of them equal or with the same beginning."""
    g = torch.Generator().manual_seed(share())
    first = torch.randint(2, vocabulary, (PROMPT,), generator=g).tolist()
    others = [torch.randint(2, vocabulary, (length,), generator=g).tolist() for length in (1, 3, 17, PROMPT)]
    prompts = [first, first[:33], first, [*first[:35], 7], *others]
    return [Request(tuple(prompt), seed + index, sampling) for index, prompt in enumerate(prompts)]


def generate(sampling, name="vllm", seed=0, only=None) -> list[Completion]:
    """Of all requests or those with these numbers; `only` may differ by rank."""
    asked = requests(sampling, seed)
    chosen = range(len(asked)) if only is None else only[dist.get_rank()] if isinstance(only, dict) else only
    return getattr(NOW[-1], name).generate([asked[index] for index in chosen])


def generate_from_other_random_states(sampling) -> list[Completion]:
    torch.manual_seed(dist.get_rank())
    return generate(sampling)


def in_rounds_of(budget, sampling) -> list[Kept]:
    return in_rounds(NOW[-1].vllm, requests(sampling), budget)


def cached_tokens(versions):
    """How many tokens of one prompt are in the cache, for a request of each version in turn."""
    engine, found = NOW[-1].vllm.engine, []
    request = Request(tuple(range(2, 40)), 0, Sampling(1, with_log_probs=False))
    for version in versions:
        engine.add(0, request, seeded=True, version=version)
        (own,) = engine._client.engine_core.scheduler.requests.values()
        stats = own.prefill_stats
        while not engine.step({0: request}):
            pass
        found.append(stats.num_cached_tokens)
    return found


def forget_prefixes():
    NOW[-1].vllm.engine._drop_prefixes()


def late(sampling):
    """All requests, of which one comes after the other between steps. Each rank alone would add them at other steps."""
    rollout, asked = NOW[-1].vllm, requests(sampling)
    waiting, asked_as, found, step = dict(enumerate(asked)), {}, {}, 0
    while waiting or rollout.running:
        due = [index for index in waiting if 2 * index * (1 + dist.get_rank()) <= step]
        for index in NOW[-1].first_rank.decide(lambda due=due: due):
            asked_as[rollout.add_request(waiting.pop(index))] = index
        found |= {asked_as[number]: completion for number, completion in rollout.step()}
        step += 1
    return [found[index] for index in range(len(asked))]


def aborted(sampling, ended):
    """Free blocks of the cache before, in flight and after; refusals in flight; the completions of what was not aborted."""
    rollout, asked = NOW[-1].vllm, requests(sampling)
    blocks, free = rollout.engine._client.engine_core.scheduler.kv_cache_manager.block_pool, []
    free.append(blocks.get_num_free_blocks())
    numbers = [rollout.add_request(request) for request in asked]
    for _ in range(3):
        assert rollout.step() == []
    free.append(blocks.get_num_free_blocks())
    refused = [refusal(*call) for call in (("sync", 9), ("fall_asleep",), ("generate", sampling))]
    rollout.abort([numbers[index] for index in ended])
    free.append(blocks.get_num_free_blocks())
    left = []
    while rollout.running:
        left += rollout.step()
    for request in asked:
        rollout.add_request(request)
    rollout.step()
    rollout.abort()
    free.append(blocks.get_num_free_blocks())
    return free, refused, {numbers.index(number): completion for number, completion in left}, rollout.take_load()


def conversation(sampling, remembers=True, before_last=None):
    """For each of four turns: its completion, how many hashes of blocks it has from the turn before, whether all of them are
    those that vLLM computes, and its tokens that were in the cache. `before_last` is `sync` or `rewrite`.
    """
    rollout, core = NOW[-1].vllm, NOW[-1].vllm.engine._client.engine_core
    memory, tokens, before, turns = PrefixMemory() if remembers else None, [2, *range(3, 40), *range(2, 39)], [], []
    for turn in range(4):
        if turn == 3 and before_last == "sync":
            sync(rollout.version + 1)
        elif turn == 3 and before_last == "rewrite":
            tokens[0] += 1
        number = rollout.add_request(Request(tuple(tokens), 10 + turn, sampling, memory))
        (own,) = core.scheduler.requests.values()
        alone, hashes, stats = copy.copy(own), list(own.block_hashes), own.prefill_stats
        alone.block_hashes = []
        alone.update_block_hashes()
        assert not isinstance(own._block_hasher, ContinuedHashes), "decoding calls vLLM's own"
        taken = sum(one is other for one, other in zip(hashes, before, strict=False))
        completion = answer_of(rollout, number)
        before = own.block_hashes
        turns.append((completion, taken, hashes == alone.block_hashes, stats.num_cached_tokens))
        tokens += [*completion.token_ids, *range(5 + turn, 30)]
    return turns


def answer_of(rollout, number):
    """The completion of the one request in flight."""
    while rollout.running:
        stopped = rollout.step()
    return dict(stopped)[number]


def fall_asleep():
    NOW[-1].vllm.sleep()


def batch_of(sampling: Sampling) -> Batch:
    """The same requests as a batch, completed by vLLM."""
    asked = requests(sampling)
    ids, mask = torch.zeros(len(asked), PROMPT, dtype=torch.int64), torch.zeros(len(asked), PROMPT, dtype=torch.bool)
    for row, request in enumerate(asked):
        ids[row, PROMPT - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
        mask[row, PROMPT - len(request.prompt_ids) :] = True
    prompts = Batch.of({"prompt_ids": ids, "prompt_mask": mask, "seed": torch.tensor([r.seed for r in asked])})
    return generate_batch(NOW[-1].vllm, prompts, sampling, PAD, RESPONSE)


def log_probs(sampling):
    """Of sampled tokens: the sampler's and the trainer's own."""
    batch = batch_of(sampling)
    own = NOW[-1].engine.log_probs(batch, ROWS, sampling.log_prob_temperature)["log_probs"]
    mask = batch["response_mask"]
    return batch["rollout_log_probs"][mask], own[mask]


def learn():
    """One optimizer step on samples of the sampler; the samplers keep their weights."""
    sampling = Sampling(RESPONSE, NOW[-1].rollout.temperature)
    batch = batch_of(sampling)
    advantages = torch.linspace(-1, 1, len(batch))[:, None].expand(-1, RESPONSE).contiguous()
    batch = batch.with_(advantages=advantages, old_log_probs=batch["rollout_log_probs"])
    return step(NOW[-1].engine, batch)


def step(engine: Engine, batch: Batch) -> dict[str, float]:
    return engine.update(batch, ROWS, PolicyObjective(ActorConfig(), 0.7, RESPONSE))


def trained(folder, strategy="fsdp2"):
    """Weights and metrics after two steps of a fresh engine, on rows that nobody sampled."""
    engine, g = trainer(ModelConfig(path=folder), strategy), torch.Generator().manual_seed(dist.get_rank())
    mask = torch.ones(6, PROMPT + RESPONSE, dtype=torch.bool)
    batch = Batch.of(
        {
            "input_ids": torch.randint(2, 40, mask.shape, generator=g),
            "attention_mask": mask,
            "response_mask": mask[:, PROMPT:],
            "advantages": torch.randn(6, RESPONSE, generator=g),
            "old_log_probs": torch.full((6, RESPONSE), -3.0),
        }
    )
    metrics = [step(engine, batch) for _ in range(2)]
    return metrics, dict(engine.weights.full())


def refusal(action, *args):
    """The error that another function of this module ends with, as its class and message; collective if that is."""
    try:
        globals()[action](*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def too_long(prompt_tokens, response_tokens):
    short, long = (Sampling(tokens, with_log_probs=False) for tokens in (2, response_tokens))
    NOW[-1].vllm.generate([Request((5,), 0, short), Request((5,) * prompt_tokens, 0, long)])


def without(name):
    """All weights but one."""
    NOW[-1].vllm.update_weights((pair for pair in list(NOW[-1].engine.weights.full()) if pair[0] != name), 7)


def with_more(name):
    weights = list(NOW[-1].engine.weights.full())
    NOW[-1].vllm.update_weights([*weights, (name, weights[0][1])], 7)


def while_gathering_fails():
    def failing():
        raise RuntimeError("another process is gone")
        yield

    NOW[-1].vllm.update_weights(failing(), 7)


def build(folder, options):
    rollout = RolloutConfig(name="vllm", engine_kwargs=EngineKwargsConfig(vllm=options))
    build_rollout(rollout, ModelConfig(path=folder), CPU, 32)


def process():
    """What training and vLLM share in a process, as text by name."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    told = {
        "torch's random state": torch.get_rng_state().tolist(),
        "numpy's random state": numpy.random.get_state()[1].tolist(),
        "Python's random state": random.getstate(),
        "set_num_threads": (torch.set_num_threads, torch.get_num_threads(), torch.get_num_interop_threads()),
        "types and modes": (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()),
        "inference mode": torch.is_inference_mode_enabled(),
        "determinism": (torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark),
        "precision": (torch.get_float32_matmul_precision(), cuda.matmul.allow_tf32, cudnn.allow_tf32),
        "attention kernels": (
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        "root logger": (logging.root.level, logging.root.handlers, logging.root.manager.disable),
        "rlx's logger": (logging.getLogger("rlx").level, logging.getLogger("rlx").handlers),
        "signals": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        "garbage collection": (gc.isenabled(), gc.get_threshold(), gc.callbacks),
        "standard streams": (sys.stdout, sys.stderr),
        "affinity": os.sched_getaffinity(0),
        "process group": (dist.is_initialized(), dist.get_backend(), dist.get_world_size()),
    }
    environment = {f"variable {name}": value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return {name: str(value) for name, value in {**told, **environment}.items()}
