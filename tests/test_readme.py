"""The figures and the program of README.md; its commands are tested in test_code_blocks.py, its links in test_docs.py."""

import re
import shlex
from pathlib import Path

from transformers import AutoModelForCausalLM

from rlx.config.compose.command_line import compose

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "README.md").read_text()


def docs(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def rows(text: str, *first: str) -> list[str]:
    """The lines of tables that begin with the cells `first`."""
    return [line for line in text.splitlines() if line.strip().startswith("| " + " | ".join(first) + " |")]


def numbers(line: str) -> list[int | None]:
    """The cells of a row that are numbers of tokens or pairs of them, of which the smaller one counts; None for `none`."""
    cells = re.findall(r"(?<=\| )[\d,; none]+(?= \|)", line)
    return [
        None if "none" in cell else min(int(part.replace(",", "")) for part in cell.split(";"))
        for cell in cells
        if cell.strip()
    ]


def test_the_longest_sequences_are_those_of_the_pages():
    for size in ("7B", "14B", "32B"):
        (line,), (source, *_) = (
            rows(PAGE, f"GRPO, adapters on Qwen2.5 {size}"),
            rows(docs("lora.md"), f"Qwen2.5-{size}"),
        )
        assert numbers(line) == numbers(source)
    (line,) = rows(PAGE, "an update alone, adapters on 72B in 4 bits")
    after = docs("lora.md").partition("| Qwen2.5-72B | nf4 |")[2].splitlines()
    assert numbers(line) == numbers(after[1])
    assert "786,433 tokens on two H100 of 80 GB, 524,289 on one H200, 196,609 on one H100" in docs("long_context.md")
    assert (
        "| 196,609 | 72.5 GB | 138 s | 111 GB |" in PAGE
        and "| 524,289 | 132 GB | 573 s | 99 GB, and 49 GB of disk |" in PAGE
        and "| 786,433 | 71.1 GB of each | 609 s | 221 GB |" in PAGE
        and "| whole step, s | 608.9 | 572.6 | 333.6 | 138 |" in docs("long_context.md")
    )
    assert (
        "took 39.2 s, 20.1 GB on the device and 81.9 GB on the host" in docs("lora.md")
        and "| 32,768 | 20.1 GB | 39 s | 82 GB |" in PAGE
        and "110 GB" in PAGE
        and "524,288 tokens" in docs("benchmarks.md")
    )
    assert "| `qwen2.5_0.5b_1x24gb` |" in docs("start.md") and "| `qwen3_8b_1x141gb` |" in docs("start.md")


def test_the_figures_of_offloading_are_those_of_the_benchmarks():
    page = (
        docs("benchmarks.md").partition("## What does activation offloading cost and save?")[2].partition("\n### ")[0]
    )
    names = {"transformers' gradient checkpointing": "transformers checkpointing"}
    names |= {
        f'rlx `save="{name}"`{tail}': f"rlx {name}" for name, tail in (("boundary", ", the default"), ("attention", ""))
    }
    measured = [part for part in page.split("\n**") if re.match(r"\d+,\d+ tokens", part)]
    assert len(measured) == 3
    for shown, name in names.items():
        (line,) = rows(PAGE, shown)
        for (times, gigabytes), part in zip(re.findall(r"([\d.]+) x, ([\d.]+) GB", line), measured, strict=True):
            _, _, _, ratio, peak, *_ = (cell.strip() for cell in rows(part, name)[0].split("|"))
            assert abs(float(ratio) - float(times)) <= 0.0051 and abs(float(peak) - float(gigabytes)) <= 0.051
    (without,), (shared,) = rows(docs("benchmarks.md"), "`False`"), rows(docs("benchmarks.md"), "`True`")
    assert "took 3.72 s in place of 8.23 s" in PAGE and "| 8.23 |" in without and "| **3.72** |" in shared


def test_the_command_for_eight_gpus_is_the_experiment():
    (command,) = re.findall(r"rlx train \\\n(.*?)```", docs("eight_gpus.md"), re.DOTALL)
    composed = compose(shlex.split(command.replace("\\\n", " ")))
    assert composed.config == compose(["experiment=gsm8k_grpo_8gpu"]).config and not composed.faults


def test_the_program_runs(untrained, capsys):
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(program, {"model": AutoModelForCausalLM.from_pretrained(untrained)})
    assert capsys.readouterr().out.startswith("offloaded ")
