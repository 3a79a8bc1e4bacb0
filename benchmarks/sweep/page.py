"""Render docs/models.md from the sweep's results: python -m benchmarks.sweep.page [part.json ...] > docs/models.md.

Results in files that are named are first added to docs/models.json.
"""

import json
import re
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
CLASS_NAMES = re.compile(r"\b(?:FSDP)?[A-Za-z]\w*(?:For[A-Z]\w+|LMHead|Decoder|[a-z0-9]Model)\b")
TITLE = """# Models

Which models does rlx run, and how exactly? `python -m benchmarks.sweep` makes a tiny model of each causal language model type
of transformers, with large random weights, and compares rlx with transformers alone: one unpadded forward per sequence in fp64
(in fp32 where a model cannot run in fp64), eager attention, and one step of AdamW by formula.

A number is the largest error in a column: of log-probs and entropies [nat], of the change of a weight as a share of its tensor's
largest change, or of a sampler's log-probs against the trainer's [nat]. fp64 models reach 1e-13 unless transformers computes a
part in fp32. An error above {tolerance:g} counts as **wrong**.

| column | what is compared |
|---|---|
| packed, padded | log-probs, entropies, and the weights after a policy update; with and without `use_remove_padding` |
| critic | values, and the weights after a value update |
| recomputed, tiled | the update with `enable_gradient_checkpointing`, and with `tiled_mlp` |
| offloaded | the update with `activation_offload.save` boundary, attention, auto and all in host memory; boundary and all on disk |
| LoRA | the update of adapters on all linear layers, merged into the weights |
| replay | log-probs, entropies and the update with experts that the routers would not choose, given as by `router_replay.mode=R3`; where K is below E, they must change log-probs by more than {tolerance:g} |
| saved | log-probs after an update: of a checkpoint that another engine loads, and of the exported folder |
| 2 processes | the update with `strategy=fsdp2` and `strategy=fsdp` |
| Ulysses | the update with `ulysses_sequence_parallel_size=2` |
| hf, vLLM | the samplers' log-probs, and greedy tokens against whole forwards; vLLM on CPU in fp32 |

`padded` in a cell: the sequences cannot be packed, so rlx pads them and logs why. `eager`: the model has no `sdpa`, so it ran with
`attn_implementation=eager`. `refused`: rlx stops before anything starts, with the message of that number [below](#refusals).
`-`: not run.

A sweep may be run in parts. The offloaded cells of the families below and of a drawn tenth of all rows are the newest; the others are
of an earlier state of `activation_offload`.
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


class Refusals:
    """Numbers the messages of refusals; messages that differ by the model's name only have one number."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def number(self, message: str) -> int:
        """Return the number of a message, from 1."""
        text = CLASS_NAMES.sub("MODEL", message)
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text) + 1


def cell(outcomes: Iterable[CheckResult | None], refusals: Refusals) -> str:
    """Return a cell that joins the outcomes of several features: wrong ones first, then refusals, then the largest error."""
    found = [outcome for outcome in outcomes if outcome is not None]
    if not found:
        return "-"
    parts = []
    if wrong := [each for each in found if each.status == "wrong"]:
        largest = max(each.error or 0.0 for each in wrong)
        parts.append(f"**wrong** {largest:.0e}" if largest else f"**raises**: {wrong[0].note[:80]}")
    refused = {refusals.number(each.note) for each in found if each.status == "refused"}
    parts += [f"refused {number}" for number in sorted(refused)]
    if right := [each for each in found if each.status == "right"]:
        if errors := [each.error for each in right if each.error is not None]:
            parts.append(f"{max(errors):.0e}")
        parts += sorted({note for each in right for note in each.note.split(", ") if note})
    return ", ".join(parts).replace("|", "\\|")


def table(
    rows: Iterable[tuple[str, str]], results: Mapping[str, Mapping[str, CheckResult]], refusals: Refusals
) -> list[str]:
    """Return the lines of a table whose rows have a title and a key in the results."""
    lines = ["| | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for title, row in rows:
        of_row = results.get(row, {})
        cells = [cell((of_row.get(name) for name in names), refusals) for names in COLUMNS.values()]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return lines


def page(results: Mapping[str, Mapping[str, CheckResult]], versions: str) -> str:
    """Return the page.

    Args:
        results: outcomes by row and feature.
        versions: of the libraries that the sweep ran with.
    """
    refusals = Refusals()
    unmakeable = {
        row: next(iter(of_row.values())).note
        for row, of_row in results.items()
        if any(each.status == "not makeable" for each in of_row.values())
    }
    families = [(f"{family}: `{row}`", row) for family, members in FAMILIES.items() for row in members]
    named = {row for _, row in families}
    others = [(f"`{row}`", row) for row in sorted(results) if row not in named and row not in unmakeable]
    every = [each for of_row in results.values() for each in of_row.values()]
    compared = [each for each in every if each.status != "right" or each.error is not None]
    counts = {status: sum(each.status == status for each in compared) for status in ("right", "refused", "wrong")}
    lines = [
        TITLE.format(tolerance=TOLERANCE),
        f"The last sweep, with {versions}: {len(results) - len(unmakeable)} rows, {counts['right']} outcomes right, "
        f"{counts['refused']} refused, {counts['wrong']} wrong.",
        "\n## The families that are trained most\n",
        *table(families, results, refusals),
        "\n## All other types\n",
        *table(others, results, refusals),
        "\n## Refusals\n",
        *(f"{number}. {text}" for number, text in enumerate(refusals.texts, start=1)),
        "\n## Types of which no tiny model could be made\n",
        "| type | why |\n|---|---|",
        *(f"| `{row}` | {note.replace('|', ' ')[:200]} |" for row, note in sorted(unmakeable.items())),
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
