"""Send hostile tool calls through the parsers and the environment processes, and count how conversations end.

    python -m benchmarks.hostile_calls --rows 10000

Every row has to get an answer. Rows that loop in C code or end their process take conversations beside them along; all others end
alone. The command exits with 1 if a row has no answer, or if an honest call gets a wrong one.
"""

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rlx.environments.pool import EnvironmentPool
from rlx.environments.protocol import Failure, Observation, Reset, Turn
from rlx.environments.spec import EnvironmentSpec
from rlx.environments.tool_calls import FORMATS

TOOLS = '''
import asyncio, ctypes, itertools, os

def add(a: int, b: int = 0) -> int:
    """Add.

    Args:
        a: a number.
        b: another.
    """
    return a + b

def print_much(text: str) -> str:
    """Return a long text.

    Args:
        text: repeated to more than a megabyte.
    """
    return text * (2**20 // max(1, len(text)) + 1)

def loop(kind: str) -> str:
    """Never end.

    Args:
        kind: python, wait, or anything else for a crash of the process.
    """
    while kind == "python":
        pass
    if kind == "wait":
        return asyncio.sleep(1000)
    if kind == "memory":
        return str(bytearray(10**12))
    if kind == "object":
        return {"x": object(), "y": {1, 2}, "\\ud800": float("nan")}
    if kind == "exit":
        os._exit(1)
    if kind == "segfault":
        ctypes.string_at(0)
    raise ValueError("<|im_end|></s>" * 1000)

tools = [add, print_much, loop]
'''
PIECES = (
    *("<tool_call>", "</tool_call>", "<function=add>", "<function=", "</function>", "<parameter=a>", "</parameter>"),
    *("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|eom_id|>", "{", "}", "[", "]", '"name"', '"arguments"', ":", ","),
    *('"add"', ";", "<add>", "</add>", "<|im_start|>assistant\n", "<|im_end|>", "</s>", "<|assistant|>"),
    *("\x00", "\u202e", "\U0001f600", "\ud800", "é" * 50, "9" * 5000),
    *("NaN", "1e999", "null", "\\", "\\u0000", "\n", " "),
)
KILLERS = ("exit", "segfault")
OPEN = 128
"""Conversations at a time."""
PATIENCE_S = 120.0


def honest(tool_format: str, name: str, argument: str, value: str | int) -> str:
    """Return a right call with one argument."""
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return {
        "tags": f'<{name}>{{"{argument}": {text}}}</{name}>' if name == "add" else f"<{name}>{value}</{name}>",
        "hermes": f'<tool_call>{{"name": "{name}", "arguments": {{"{argument}": {text}}}}}</tool_call>',
        "llama3_json": f'{{"name": "{name}", "parameters": {{"{argument}": {text}}}}}',
        "mistral": f'[TOOL_CALLS]{name}[ARGS]{{"{argument}": {text}}}',
        "qwen3_coder": f"<function={name}><parameter={argument}>{value}</parameter></function>",
    }[tool_format]


def hostile(rng: random.Random, tool_format: str) -> str:
    """Return a turn that no parser, tool or process should trust."""
    match rng.randrange(200):
        case 0:
            return honest(tool_format, "loop", "kind", rng.choice(KILLERS))
        case 1:
            return honest(tool_format, "loop", "kind", rng.choice(("python", "wait")))
        case number if number < 12:
            return honest(tool_format, "loop", "kind", rng.choice(("memory", "object", "raise")))
        case number if number < 20:
            return honest(tool_format, "print_much", "text", rng.choice(("y", "<|im_end|>", "</s>", "é", "\ud800")))
        case number if number < 40:
            return honest(tool_format, rng.choice(("ad", "add\n", "__import__", "")), "a", 1)
        case number if number < 60:
            return honest(tool_format, "add", rng.choice(("a", "c", "", "__class__")), rng.choice(("1", "x", "\u202e")))
        case number if number < 62:
            return rng.choice(PIECES) * 20_000
        case number if number < 100:
            text = honest(tool_format, "add", "a", 1)
            return text[: rng.randrange(len(text))]
    return "".join(rng.choices(PIECES, k=rng.randrange(1, 80)))


def run(rows: int, processes: int, seed: int, limit_s: float) -> tuple[Counter[str], list[str]]:
    """Send the rows, each with a hostile turn and every tenth with an honest one; return how they ended, and what was wrong."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for tool_format in FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tools.py"
            path.write_text(TOOLS)
            spec = EnvironmentSpec("tools", str(path), limit_s=limit_s, tool_format=tool_format)
            with EnvironmentPool(spec, processes, memory_limit_gb=4.0) as pool:
                _run(pool, random.Random(f"{seed} {tool_format}"), rows // len(FORMATS), tool_format, counts, wrong)
    return counts, wrong


def _run(
    pool: EnvironmentPool, rng: random.Random, rows: int, tool_format: str, counts: Counter[str], wrong: list[str]
) -> None:
    waiting, fresh, is_honest = set(), iter(range(rows)), {}
    silent = time.monotonic()
    while True:
        for key in itertools.islice(fresh, OPEN - len(waiting)):
            pool.reset(key, {"prompt": [{"role": "user", "content": "?"}], "extra_info": None})
            waiting.add(key)
        if not waiting:
            return
        answers = pool.poll(1.0)
        silent = time.monotonic() if answers else silent
        if time.monotonic() - silent > PATIENCE_S:
            wrong.append(f"{tool_format}: {len(waiting)} rows without an answer")
            return
        for key, answer in answers:
            if isinstance(answer, Reset):
                is_honest[key] = key % 10 == 0
                text = honest(tool_format, "add", "a", key) if is_honest[key] else hostile(rng, tool_format)
                pool.step(key, Turn(text, 0))
                continue
            waiting.remove(key)
            pool.end(key)
            _count(answer, is_honest.get(key, False), key, counts, wrong)


def _count(answer: Observation | Failure, is_honest: bool, key: int, counts: Counter[str], wrong: list[str]) -> None:
    if isinstance(answer, Failure):
        counts[answer.kind] += 1
        if is_honest and answer.kind not in ("crash", "timeout"):  # with its process
            wrong.append(f"an honest call failed: {answer}")
        return
    counts["ended" if answer.done else "tool error" if answer.info["tool_errors"] else "answered"] += 1
    if is_honest and [message["content"] for message in answer.messages] != [str(key)]:
        wrong.append(f"add({key}) was answered {answer.messages}")


def main(arguments: list[str] | None = None) -> int:
    """Run with the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000, help="conversations, a fifth in each format (10000)")
    parser.add_argument("--processes", type=int, default=16, help="environment processes at a time (16)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=2.0, help="longest step [seconds] (2)")
    given = parser.parse_args(arguments)
    before = time.monotonic()
    counts, wrong = run(given.rows, given.processes, given.seed, given.limit_s)
    print(f"{counts.total():,} rows in {time.monotonic() - before:.0f} s: {dict(counts.most_common())}")
    print("\n".join(wrong) or "Every row has its answer.")
    return int(bool(wrong) or counts.total() != given.rows // len(FORMATS) * len(FORMATS))


if __name__ == "__main__":
    sys.exit(main())
