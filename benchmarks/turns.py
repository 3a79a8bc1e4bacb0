"""Measure what turns and tools cost: `python -m benchmarks.turns [--shape NAME] [--trajectories N] ...`.

One sampler with random weights generates the same number of tokens in three ways: conversations whose tool answers after 0 to
`--tool-s` seconds, at random; conversations whose tool answers at once; and one response per prompt. Tools run in environment
processes. The table shows tokens per second, the steps of the sampler and the seconds in them, how full it was, and ratios of the
ways. Turns have equal lengths.

With `--endpoint` the ways are an environment and an agent that calls the policy's address, with the same messages and turns of half to
one and a half times `--tokens`.
"""

import os
import random
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import benchmarks.waiting_tool
from benchmarks.common import benchmark_parser, cell, title, write_json, write_random_model
from rlx.config.schema import EngineKwargsConfig, ModelConfig, RolloutConfig
from rlx.environments.chat import Chat
from rlx.environments.endpoint_pool import AgentPool
from rlx.environments.endpoint_run import AgentRun
from rlx.environments.environment_pool import EnvironmentPool
from rlx.environments.running import ConversationBounds, ConversationOptions, ConversationRow, Run
from rlx.environments.spec import EnvironmentSpec
from rlx.models.loading import load_model
from rlx.offload.plan.shapes import SHAPES
from rlx.rollout.protocol import Completion, Request, Rollout, Sampling
from rlx.rollout.sampler import build_rollout
from rlx.workers.worker import join_process_group

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PROMPT_WORDS = 128
ANSWER_TOKENS = 64  # more than a tool's answer and the template around it have
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} : {{ message['content'] }} w1 {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)
# The names of the ways, with the tool's longest seconds as a share of --tool-s; None: no tool.
TOOL_SPEEDS = {"instant tools": 0.0, "slow tools": 1.0, "single turn": None}
ENDPOINT_WAYS = {"environment": 0.0, "endpoint": 0.0}


def add_trajectories(parser: ArgumentParser) -> None:
    """Add the options that say which trajectories are sampled."""
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="qwen2-0.5b", help="of the model (default qwen2-0.5b)"
    )
    parser.add_argument("--trajectories", type=int, default=2048, help="default 2048")
    parser.add_argument("--turns", type=int, default=4, help="of a trajectory (default 4)")
    parser.add_argument("--tokens", type=int, default=256, help="of a turn (default 256)")
    parser.add_argument("--max-num-seqs", type=int, default=512, help="requests decoded at once (default 512)")
    parser.add_argument("--tool-s", type=float, default=2.0, help="longest seconds of a slow tool (default 2)")


def main(arguments: list[str]) -> int:
    """Measure, print and return the exit code."""
    parser = benchmark_parser("turns", __doc__ or "")
    add_trajectories(parser)
    parser.add_argument("--sampler", choices=["hf", "vllm"], default="vllm", help="default vllm")
    parser.add_argument("--processes", type=int, default=2, help="of tools (default 2)")
    parser.add_argument(
        "--unseeded", action="store_true", help="vLLM: no random generator per request, which is faster"
    )
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--endpoint", action="store_true", help="compare an environment and an agent")
    ways.add_argument("--only", choices=sorted(TOOL_SPEEDS), help="this way alone (default: all)")
    parser.add_argument("--engines", type=int, default=1, help="of vLLM on the GPU (default 1)")
    parser.add_argument("--block-size", type=int, help="vLLM: tokens in a block of its cache (default: vLLM's own)")
    parser.set_defaults(rounds=1, gpu_memory_utilization=0.6)
    options = parser.parse_args(arguments)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    device = join_process_group(options.device or "auto")
    with tempfile.TemporaryDirectory(prefix="rlx-shape-") as folder:
        write_random_model(Path(folder), options.shape, device)
        tokenizer = make_tokenizer(SHAPES[options.shape]["vocab_size"])
        rollout = make_rollout(options, folder, device)
        figures = measure(options, rollout, tokenizer)
    print(title(device))
    show(options, figures)
    write_json(options, device, {"options": {k: str(v) for k, v in vars(options).items()}, "ways": figures})
    rollout.close()
    torch.distributed.destroy_process_group()
    return 0


def make_tokenizer(size: int, others: Mapping[int, str] | None = None) -> "PreTrainedTokenizerFast":
    """Return a tokenizer whose token n is the word `wn`, or that of `others`; it encodes and decodes as fast as those of real models."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({(others or {}).get(n, f"w{n}"): n for n in range(size)}, unk_token="w2"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w2")
    tokenizer.chat_template = PLAIN_TEMPLATE
    return tokenizer


def make_rollout(options: Namespace, folder: str, device: torch.device) -> Rollout:
    """Return the sampler, with the weights of the folder."""
    on_cpu = device.type == "cpu"
    blocks = {"block_size": options.block_size or 32} if options.block_size or on_cpu else {}
    settings = RolloutConfig(
        name=options.sampler,
        max_num_seqs=options.max_num_seqs,
        engines_per_gpu=options.engines,
        seed_requests=not options.unseeded,
        gpu_memory_utilization=options.gpu_memory_utilization,
        engine_kwargs=EngineKwargsConfig(vllm=blocks if options.sampler == "vllm" else {}),
    )
    model = ModelConfig(path=folder)
    context = PROMPT_WORDS + options.turns * (longest_turn(options) + ANSWER_TOKENS) + ANSWER_TOKENS
    rollout = build_rollout(settings, model, device, context, seed=0)
    dtype = torch.float32 if on_cpu else torch.bfloat16
    rollout.update_weights(load_model(model, "lm", dtype).state_dict().items(), version=0)
    return rollout


def longest_turn(options: Namespace) -> int:
    """Return the most tokens of a turn."""
    return int(options.tokens * 3 // 2 if options.endpoint else options.tokens)


class CountedSteps:
    """Counts the steps of a sampler, and the seconds in them, while it is open."""

    def __init__(self, rollout: Any) -> None:
        self._rollout, self._step = rollout, rollout.step
        self.steps, self.step_s = 0, 0.0

    def __enter__(self) -> "CountedSteps":
        self._rollout.step = self._counted
        return self

    def __exit__(self, *_: object) -> None:
        del self._rollout.step

    def _counted(self) -> list[tuple[int, Completion]]:
        start = time.perf_counter()
        stopped: list[tuple[int, Completion]] = self._step()
        self.step_s += time.perf_counter() - start
        self.steps += 1
        return stopped


class StoppedTurns:
    """A sampler whose requests all end as if by a stop token, so that a turn of `max_tokens` does not end its conversation."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rollout, name)

    def step(self) -> list[tuple[int, Completion]]:
        """See Rollout."""
        return [(number, completion._replace(finish_reason="stop")) for number, completion in self._rollout.step()]


class UnequalTurns(StoppedTurns):
    """Draws the length of each turn from its seed, from a third of the longest turn to all of it."""

    def add_request(self, request: Request) -> int:
        """See Rollout."""
        most = request.sampling.max_tokens
        drawn = random.Random(request.seed).randint(most // 3, most)
        return self._rollout.add_request(replace(request, sampling=replace(request.sampling, max_tokens=drawn)))


def measure(options: Namespace, rollout: Rollout, tokenizer: "PreTrainedTokenizerFast") -> dict[str, dict[str, float]]:
    """Return figures by way, medians over the rounds."""
    few = Namespace(**{**vars(options), "trajectories": 8, "turns": 2, "tokens": 4})
    ways = ENDPOINT_WAYS if options.endpoint else TOOL_SPEEDS
    ways = {options.only: ways[options.only]} if options.only else ways
    for name, longest in ways.items():  # kernels and graphs of the first call
        one_way(few, rollout, tokenizer, longest and 0.01, 0, name)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for turn in range(options.rounds):
        start = turn % len(ways)
        for place, name in enumerate([*list(ways)[start:], *list(ways)[:start]]):
            share = ways[name]
            first = 1 + (len(ways) * turn + place) * options.trajectories
            longest = None if share is None else share * options.tool_s
            found[name].append(one_way(options, rollout, tokenizer, longest, first, name))
            print(f"{name}: {found[name][-1]}", flush=True)
    return {
        name: {figure: statistics.median(each[figure] for each in rounds) for figure in rounds[0]}
        for name, rounds in found.items()
    }


def one_way(
    options: Namespace,
    rollout: Rollout,
    tokenizer: "PreTrainedTokenizerFast",
    longest_s: float | None,
    first: int,
    name: str,
) -> dict[str, float]:
    """Generate all trajectories once and return tokens per second and the sampler's load.

    Args:
        longest_s: of a tool's answer; None: a single turn without tools.
        first: number of the first trajectory, which decides prompts and seeds.
        name: of the way.
    """
    seeds = range(first, first + options.trajectories)
    sampling = Sampling(longest_turn(options) * (1 if longest_s is not None else options.turns))
    prompts = [" ".join(f"w{3 + (seed * 31 + k * 17) % 900}" for k in range(PROMPT_WORDS)) for seed in seeds]
    rollout.take_load()
    if longest_s is None:
        ids = tokenizer(prompts)["input_ids"]
        start = time.perf_counter()
        requests = [Request(tuple(own), seed, sampling) for own, seed in zip(ids, seeds, strict=True)]
        with CountedSteps(rollout) as counted:
            answers = rollout.generate(requests)
        seconds, waited = time.perf_counter() - start, 0.0
        tokens = sum(len(answer.token_ids) for answer in answers)
    else:
        rows = [
            ConversationRow({"prompt": [{"role": "user", "content": prompt}], "seed": seed}, seed, [])
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        kwargs = {"turns": options.turns, "longest_s": longest_s}
        path = benchmarks.waiting_tool.__file__
        bounds = ConversationBounds(2 * PROMPT_WORDS, options.turns * (longest_turn(options) + ANSWER_TOKENS))
        asked = ConversationOptions(Chat(tokenizer), sampling, bounds)
        sampler: Any = (UnequalTurns if options.endpoint else StoppedTurns)(rollout)
        if name == "endpoint":
            made: EnvironmentPool = AgentPool(
                EnvironmentSpec("endpoint", path, kwargs), options.processes, None, "refuse"
            )
        else:
            made = EnvironmentPool(EnvironmentSpec("Waiting", path, kwargs), options.processes, None)
        kind = AgentRun if name == "endpoint" else Run
        with made as pool:
            few = rows[: options.processes]
            kind(sampler, pool, few, asked).to_the_end()  # the processes have started
            rollout.take_load()
            start = time.perf_counter()
            with CountedSteps(rollout) as counted:
                ran = kind(sampler, pool, rows, asked).to_the_end()
            seconds, waited = time.perf_counter() - start, ran[0].waited_s
        require_whole(ran, options)
        tokens = sum(sum(conversation.sampled) for conversation in ran)
    figures = {"tokens_per_s": tokens / seconds, "seconds": seconds, "step_s": counted.step_s, "steps": counted.steps}
    return {**figures, "waited_s": waited, **rollout.take_load()}


def require_whole(conversations: Iterable[Any], options: Namespace) -> None:
    """Raise RuntimeError if a conversation ended before its last turn."""
    for own in conversations:
        turns = sum(turn["role"] == "assistant" for turn in own.turns)
        has_all = turns == options.turns and not own.earlier
        if own.reason != "done" or not has_all or (not options.endpoint and sum(own.sampled) != turns * options.tokens):
            raise RuntimeError(
                f"a conversation ended with {own.reason!r}, {turns} turns and {sum(own.sampled)} tokens, expected 'done' and "
                f"{options.turns} turns of {options.tokens} in one row"
            )


def show(options: Namespace, figures: dict[str, dict[str, float]]) -> None:
    """Print the table and the ratios."""
    print(
        f"{options.trajectories} trajectories of {options.turns} turns of {options.tokens} tokens, max_num_seqs {options.max_num_seqs}"
    )
    names = ("tokens_per_s", "seconds", "step_s", "steps", "waited_s", "running_mean", "busy_share", "tail_s")
    print(f"{'':>14}" + "".join(f"{name:>14}" for name in names))
    for way, own in figures.items():
        print(
            f"{way:>14}"
            + "".join(cell(own.get(name), 0 if name in ("tokens_per_s", "steps") else 2, 14) for name in names)
        )
    rate = {way: own["tokens_per_s"] for way, own in figures.items()}
    if options.endpoint:
        print(f"endpoint / environment: {rate['endpoint'] / rate['environment']:.3f}")
    if options.endpoint or options.only:
        return
    print(f"slow / instant tools: {rate['slow tools'] / rate['instant tools']:.3f}")
    print(f"instant tools / single turn: {rate['instant tools'] / rate['single turn']:.3f}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
