"""Render docs/models.md from the sweep's results: python -m benchmarks.sweep.page [part.json ...] > docs/models.md.

Results in files that are named are first added to docs/models.json.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.sweep.reference import TOLERANCE
from benchmarks.sweep.run import CheckResult

RESULTS = Path("docs/models.json")
# Columns of the page: the features of the sweep that each joins.
COLUMNS = {
    "packed": ("packed",),
    "padded": ("padded",),
    "critic": ("value",),
    "recomputed, tiled": ("recomputed", "tiled"),
    "offloaded": ("boundary", "attention", "auto", "all", "disk", "all, disk"),
    "LoRA": ("lora",),
    "replay": ("replay",),
    "saved": ("saved",),
    "2 processes": ("fsdp2", "fsdp1"),
    "Ulysses": ("ulysses",),
    "hf": ("hf sampler",),
    "vLLM": ("vllm sampler",),
}
FAMILIES = {
    "Qwen2, Qwen2.5": ("qwen2", "qwen2: tied"),
    "Qwen3": ("qwen3", "qwen3: tied", "qwen3: yarn rope"),
    "Llama 3": ("llama", "llama: llama3 rope and ties"),
    "Llama 4, text": ("llama4_text",),
    "Gemma 2": ("gemma2",),
    "Gemma 3": ("gemma3_text", "gemma3"),
    "Mistral": ("mistral", "mistral: no window"),
    "Phi-4, Phi-4-mini": ("phi3", "phi3: longrope"),
    "OLMo 2": ("olmo2",),
    "OLMo 3": ("olmo3",),
    "Qwen3-MoE": ("qwen3_moe",),
    "OLMoE": ("olmoe",),
    "DeepSeek-V3, DeepSeek-V2": ("deepseek_v3", "deepseek_v3: no q_lora", "deepseek_v2"),
    "GLM-4": ("glm4", "glm4_moe"),
    "SmolLM3": ("smollm3",),
}
TITLE = """# Models

Which models does rlx run, and how exactly? `python -m benchmarks.sweep` makes a tiny model of each causal language model type
of transformers, with large random weights, and compares rlx with transformers alone: one unpadded forward per sequence in fp64
(in fp32 where a model cannot run in fp64), eager attention, and one step of AdamW by formula.

An error is the largest of: log-probs and entropies [nat]; the change of a weight, as a share of its tensor's largest change; a
sampler's log-probs against the trainer's [nat]. An error above {tolerance:g} counts as **wrong**.

| column | what is compared |
|---|---|
| packed, padded | log-probs, entropies, and the weights after a policy update; with and without `use_remove_padding` |
| critic | values, and the weights after a value update |
| recomputed, tiled | the update with `enable_gradient_checkpointing`, and with `tiled_mlp` |
| offloaded | the update with each `activation_offload.save` in host memory; boundary and all on disk |
| LoRA | the update of adapters on all linear layers, merged into the weights |
| replay | log-probs, entropies and the update with given experts, as by `router_replay.mode=R3` |
| saved | log-probs after an update: of a checkpoint that another engine loads, and of the exported folder |
| 2 processes | the update with `strategy=fsdp2` and `strategy=fsdp` |
| Ulysses | the update with `ulysses_sequence_parallel_size=2` |
| hf, vLLM | the samplers' log-probs, and greedy tokens against whole forwards; vLLM on CPU in fp32 |

*Rejected*: rlx stops before the run starts and gives the reason, which [models.json](models.json) has, too. *Padded*: the sequences
cannot be packed, so rlx pads them and logs why. Mixtures of experts are rejected with vLLM on the CPU alone. *Eager*: the model has no `sdpa`, so it ran with `attn_implementation=eager`.
"""


def read_results(path: Path) -> tuple[dict[str, dict[str, CheckResult]], str]:
    """Return the outcomes by row and feature that `write_results` wrote, and the versions; none if there is no file."""
    found = json.loads(path.read_text()) if path.exists() else {}
    versions = found.pop("versions", "")
    return {
        row: {
            name: CheckResult(*each) if isinstance(each, list) else CheckResult("right", each)
            for name, each in of_row.items()
        }
        for row, of_row in found.items()
    }, versions


def write_results(path: Path, results: Mapping[str, Mapping[str, CheckResult]], versions: str) -> None:
    """Write outcomes, a line per row of the table: an error, or [status, error, note]."""
    lines = [f'"versions": {json.dumps(versions)}']
    for row in sorted(results):
        short = {
            name: rounded(each.error)
            if each.status == "right" and not each.note
            else [each.status, rounded(each.error), each.note]
            for name, each in results[row].items()
        }
        lines.append(f"{json.dumps(row)}: {json.dumps(short)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def rounded(error: float | None) -> float | None:
    """Return an error with one digit."""
    return None if error is None else float(f"{error:.0e}")


def summary(of_row: Mapping[str, CheckResult]) -> tuple[str, str, str]:
    """Return the largest error of a row with its notes, the rejected columns, and the wrong ones."""
    right = [each for each in of_row.values() if each.status == "right"]
    errors = [each.error for each in right if each.error is not None]
    notes = sorted({note for each in right for note in each.note.split(", ") if note in ("padded", "eager")})
    columns = {
        status: [
            column for column, names in COLUMNS.items() if any(of_row[n].status == status for n in names if n in of_row)
        ]
        for status in ("refused", "wrong")
    }
    rejected = "all" if len(columns["refused"]) >= len(COLUMNS) - 1 else ", ".join(columns["refused"])
    return ", ".join([*([f"{max(errors):.0e}"] if errors else []), *notes]), rejected, ", ".join(columns["wrong"])


def page(results: Mapping[str, Mapping[str, CheckResult]], versions: str) -> str:
    """Return the page.

    Args:
        results: outcomes by row and feature.
        versions: of the libraries that the sweep ran with.
    """
    unmakeable = {
        row for row, of_row in results.items() if any(each.status == "not makeable" for each in of_row.values())
    }
    found = {row: summary(of_row) for row, of_row in results.items() if row not in unmakeable}
    compared = [
        each
        for of_row in results.values()
        for each in of_row.values()
        if each.status != "right" or each.error is not None
    ]
    counts = {status: sum(each.status == status for each in compared) for status in ("right", "refused", "wrong")}
    families = [
        f"| {family}: `{row}` | {found[row][0]} | {found[row][1]} |"
        for family, rows in FAMILIES.items()
        for row in rows
    ]
    named = {row for rows in FAMILIES.values() for row in rows}
    groups: dict[str, list[str]] = {}
    for row in sorted(found.keys() - named):
        groups.setdefault(found[row][1] or "nothing", []).append(f"`{row}`")
    others = [
        f"| {rejected} | {', '.join(rows)} |" for rejected, rows in sorted(groups.items(), key=lambda g: -len(g[1]))
    ]
    lines = [
        TITLE.format(tolerance=TOLERANCE),
        f"The last sweep, with {versions}: {len(found)} rows, {counts['right']} outcomes right, "
        f"{counts['refused']} rejected, {counts['wrong']} wrong.\n",
        *(f"**Wrong**: `{row}`: {wrong}\n" for row, (_, _, wrong) in found.items() if wrong),
        "## The families that are trained most\n",
        "| | largest error | rejected |\n|---|---|---|",
        *families,
        "\n## All other types\n",
        "| rejected | types |\n|---|---|",
        *others,
        f"\nThe sweep can make no tiny model of {', '.join(f'`{row}`' for row in sorted(unmakeable))}.",
    ]
    return "\n".join(lines) + "\n"


def joined(files: Iterable[Path]) -> tuple[dict[str, dict[str, CheckResult]], str]:
    """Return the results of several files, and their versions. Later files replace cells of earlier ones.

    Raises:
        ValueError: the results are of different versions.
    """
    results: dict[str, dict[str, CheckResult]] = {}
    found: dict[str, Path] = {}
    for file in files:
        part, versions = read_results(file)
        found.setdefault(versions, file)
        for row, of_row in part.items():
            results.setdefault(row, {}).update(of_row)
    if len(found) != 1:
        told = "; ".join(f"{file} is of {versions}" for versions, file in found.items())
        raise ValueError(f"results of different versions cannot be joined: {told}. Run the sweep anew with one")
    return results, next(iter(found))


def main() -> None:
    """Print the page of the results in docs/models.json, with those of the files in the command added."""
    if parts := [Path(name) for name in sys.argv[1:]]:
        write_results(RESULTS, *joined([*filter(Path.exists, [RESULTS]), *parts]))
    print(page(*read_results(RESULTS)), end="")


if __name__ == "__main__":
    main()
