"""Measure turns with tools beside other libraries: `python -m benchmarks.turns_peers --way rlx|TRL|verl`.

Every way generates the same trajectories of one model with random weights: turns of equal length, and between them answers of a tool
that takes no time, or 0 to `--tool-s` seconds at random. A call is one process and one library, because they want other packages.

- `rlx`: environments in processes, as in `benchmarks.turns`. It waits for the tool after the last turn too.
- `TRL`: the sampling part of a step of 1.16's `GRPOTrainer` with `tools` and vLLM beside it in the process.
- `verl`: 0.9.1's `AgentLoopManager` with `ToolAgentLoop` and its server, without a trainer.

Random weights write no calls. So each turn counts as one: TRL gets a tokenizer whose `parse_response` finds a call, verl a tool parser
of its own. A turn ends after `--tokens` tokens and by nothing else. Seconds run from prompts as messages to tokens, masks and log-probs.
"""

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks import turns
from benchmarks.common import benchmark_parser, chosen_device, title, write_json, write_random_model
from benchmarks.turns import add_trajectories
from rlx.offload.plan.shapes import SHAPES
from rlx.workers.worker import join_process_group

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ANSWER = "w4 w5 w6 w7"
END, NEWLINE = "<|im_end|>", "\n"  # tokens that verl expects of a Qwen tokenizer
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} : {{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %} {{ call['function']['name'] }} {{ call['function']['arguments'] | tojson }}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}assistant : {% endif %}"
)
Sample = Callable[[int, int, float], int]
"""Generates trajectories, given their number, the tokens of a turn and the tool's longest seconds; returns the tokens sampled."""


async def wait(seconds: float) -> str:
    """Answer after some time.

    Args:
        seconds: until the answer.
    """
    if seconds:
        await asyncio.sleep(seconds)
    return ANSWER


def prompts_of(count: int) -> list[list[dict[str, str]]]:
    """Return first messages, other ones on every call."""
    words = range(turns.PROMPT_WORDS)
    return [
        [{"role": "user", "content": " ".join(f"w{random.randrange(3, 900)}" for _ in words)}] for _ in range(count)
    ]


def make_tokenizer(size: int) -> "PreTrainedTokenizerFast":
    """Return the tokenizer of `benchmarks.turns` with a chat template that shows calls, and marks at the ends of messages."""
    tokenizer = turns.make_tokenizer(size, {size - 2: END, size - 1: NEWLINE})
    tokenizer.add_tokens([END, NEWLINE], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@contextmanager
def rlx_way(options: Namespace, folder: str) -> Iterator[Sample]:
    """Give a function that samples with rlx."""
    device = join_process_group(options.device or "auto")
    rollout = turns.make_rollout(options, folder, device)
    tokenizer = make_tokenizer(SHAPES[options.shape]["vocab_size"])

    def sample(count: int, tokens: int, longest_s: float) -> int:
        own = Namespace(**{**vars(options), "trajectories": count, "tokens": tokens})
        turns.one_way(own, rollout, tokenizer, longest_s, first=random.randrange(2**30))
        return count * options.turns * tokens  # others would have raised

    yield sample
    rollout.close()


@contextmanager
def trl_way(options: Namespace, folder: str) -> Iterator[Sample]:
    """Give a function that samples with TRL."""
    from transformers import PreTrainedTokenizerFast

    trl, datasets = map(import_module, ("trl", "datasets"))
    longest = [0.0]

    class EachTurnCalls(PreTrainedTokenizerFast):
        response_schema: ClassVar[dict[str, Any]] = {}  # TRL then asks the tokenizer for calls

        def parse_response(self, response: Any, *_: Any, **__: Any) -> dict[str, Any]:
            call = {"name": "wait", "arguments": {"seconds": random.uniform(0.0, longest[0])}}
            calls = [{"type": "function", "function": call}]
            return {"role": "assistant", "content": self.decode(response), "tool_calls": calls}

    places, width = (
        min(options.max_num_seqs, options.trajectories),
        options.turns * (options.tokens + turns.ANSWER_TOKENS),
    )
    on_cpu = chosen_device(options.device).type == "cpu"
    settings = trl.GRPOConfig(
        tempfile.mkdtemp(),
        use_cpu=on_cpu,
        bf16=not on_cpu,
        per_device_train_batch_size=places,
        steps_per_generation=1,
        num_generations=2,
        max_completion_length=width,
        max_tool_calling_iterations=options.turns - 1,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=options.gpu_memory_utilization,
        vllm_max_model_length=2 * turns.PROMPT_WORDS + width,
        generation_kwargs={"ignore_eos": True, "max_tokens": options.tokens},
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32" if on_cpu else "bfloat16"},
        report_to="none",
    )
    trainer = trl.GRPOTrainer(
        model=folder,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts_of(places)]),
        processing_class=EachTurnCalls.from_pretrained(folder),
        tools=[wait],
    )
    trainer.model.train()

    def sample(count: int, tokens: int, longest_s: float) -> int:
        longest[0] = longest_s
        trainer.vllm_generation.generation_kwargs["max_tokens"] = tokens
        trainer._sync_tool_dicts, trainer._async_tool_dicts = [{}] * count, [{"wait": wait}] * count
        _, _, masks, *_ = trainer._generate(prompts_of(count))
        return sum(map(sum, masks))

    yield sample


@cache
def _verl_classes() -> tuple[type, type]:
    """Return subclasses of verl's tool parser and agent loop for turns of one length that are all calls."""
    parsers = import_module("verl.experimental.agent_loop.tool_parser")
    loops = import_module("verl.experimental.agent_loop.tool_agent_loop")

    class EachTurnCalls(parsers.ToolParser):  # type: ignore[name-defined,misc]
        longest_s = 0.0

        async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[Any]]:
            running = asyncio.get_running_loop()
            text = await running.run_in_executor(None, self.tokenizer.decode, responses_ids)  # as its own parsers do
            arguments = json.dumps({"seconds": random.uniform(0.0, self.longest_s)})
            return text, [parsers.FunctionCall(name="wait", arguments=arguments)]

    class EqualTurns(loops.ToolAgentLoop):  # type: ignore[name-defined,misc]
        tokens = 0

        async def run(self, sampling_params: dict[str, Any], **given: Any) -> Any:
            return await super().run({**sampling_params, "max_tokens": self.tokens}, **given)

    return EachTurnCalls, EqualTurns


def verl_loop(name: str, tokens: int, longest_s: float, **given: Any) -> Any:
    """Return an agent loop; verl's workers call this for each trajectory, as its file of agent loops says."""
    functions, (parser, loop) = import_module("verl.tools.function_tool"), _verl_classes()
    made = loop(**given)
    made.tokens, made.tool_parser = tokens, parser(made.tokenizer)
    made.tool_parser.longest_s = longest_s
    schema = functions._build_schema_from_fn(wait, "wait")
    made.tools = {"wait": functions.FunctionTool("wait", wait, schema, is_async=True)}
    return made


def _verl_config(options: Namespace, folder: str, agents: Path) -> Any:
    hydra = import_module("hydra")
    width = options.turns * (options.tokens + turns.ANSWER_TOKENS)
    rollout = {
        "name": "vllm",
        "nnodes": 1,
        "n_gpus_per_node": 1,
        "tensor_model_parallel_size": 1,
        "load_format": "auto",
        "prompt_length": 2 * turns.PROMPT_WORDS,
        "response_length": width,
        "max_model_len": 2 * turns.PROMPT_WORDS + width,
        "max_num_seqs": options.max_num_seqs,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "ignore_eos": True,
        "multi_turn.enable": True,
        "multi_turn.max_assistant_turns": options.turns,
        "agent.num_workers": options.processes,
        "agent.agent_loop_config_path": agents,
    }
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose(
            "ppo_trainer",
            [
                "trainer.nnodes=1",
                "trainer.n_gpus_per_node=1",
                f"actor_rollout_ref.model.path={folder}",
                *(f"actor_rollout_ref.rollout.{key}={value}" for key, value in rollout.items()),
            ],
        )


@contextmanager
def verl_way(options: Namespace, folder: str) -> Iterator[Sample]:
    """Give a function that samples with verl."""
    import numpy as np

    ray, omegaconf = map(import_module, ("ray", "omegaconf"))
    agents = Path(folder, "agents.yaml")
    own = {"_target_": f"{__spec__.name}.{verl_loop.__name__}" if __spec__ else f"{__name__}.{verl_loop.__name__}"}
    named = {f"{tokens}, {s:g}": (tokens, s) for tokens in (options.tokens, WARM_TOKENS) for s in (0.0, options.tool_s)}
    entries = [{**own, "name": name, "tokens": tokens, "longest_s": s} for name, (tokens, s) in named.items()]
    omegaconf.OmegaConf.save(omegaconf.OmegaConf.create(entries), agents)
    ray.init(num_gpus=1)
    config = _verl_config(options, folder, agents)
    servers = import_module("verl.workers.rollout.llm_server").LLMServerManager.create(config=config)
    loops = import_module("verl.experimental.agent_loop").AgentLoopManager
    manager = loops.create(config=config, llm_client=servers.get_client())
    batches = import_module("verl").DataProto

    def sample(count: int, tokens: int, longest_s: float) -> int:
        prompts = np.empty(count, dtype=object)
        prompts[:] = prompts_of(count)
        names = np.array([f"{tokens}, {longest_s:g}"] * count, dtype=object)
        found = manager.generate_sequences(batches(non_tensor_batch={"raw_prompt": prompts, "agent_name": names}))
        return int(found.batch["response_mask"].sum())

    yield sample
    ray.shutdown()


WAYS = {"rlx": rlx_way, "TRL": trl_way, "verl": verl_way}
WARM_TOKENS = 8


def make_parser() -> ArgumentParser:
    """Return the parser of the command line."""
    parser = benchmark_parser("turns_peers", __doc__ or "")
    parser.add_argument("--way", choices=WAYS, required=True)
    add_trajectories(parser)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.6, help="of vLLM (default 0.6)")
    parser.add_argument(
        "--processes", type=int, default=8, help="of rlx's environments, verl's agent loops (default 8)"
    )
    parser.set_defaults(rounds=1, sampler="vllm", unseeded=True, listen_every=1, block_size=None)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and return the exit code."""
    options = make_parser().parse_args(arguments)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29513"}
    if options.way != "verl":
        for name, value in alone.items():
            os.environ.setdefault(name, value)
    device, began = chosen_device(options.device), time.perf_counter()
    figures: dict[str, list[float]] = {"instant tools": [], "slow tools": []}
    with tempfile.TemporaryDirectory(prefix="rlx-shape-") as folder:
        write_random_model(Path(folder), options.shape, device)
        make_tokenizer(SHAPES[options.shape]["vocab_size"]).save_pretrained(folder)
        with WAYS[options.way](options, folder) as sample:
            for longest_s in (0.0, options.tool_s):  # kernels and graphs of the first call
                sample(min(options.max_num_seqs, options.trajectories), WARM_TOKENS, longest_s)
            print(f"{title(device)}: {options.way} is ready after {time.perf_counter() - began:.0f} s", flush=True)
            for _ in range(options.rounds):
                for name, longest_s in zip(figures, (0.0, options.tool_s), strict=True):
                    start = time.perf_counter()
                    tokens = sample(options.trajectories, options.tokens, longest_s)
                    seconds = time.perf_counter() - start
                    expected = options.trajectories * options.turns * options.tokens
                    if tokens != expected:
                        raise RuntimeError(f"{options.way} sampled {tokens:,} tokens, expected {expected:,}")
                    figures[name].append(tokens / seconds)
                    print(f"{options.way:>5} {name:>14}: {tokens / seconds:9.0f} tokens/s, {seconds:.1f} s", flush=True)
    write_json(options, device, {"way": options.way, "tokens/s": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
