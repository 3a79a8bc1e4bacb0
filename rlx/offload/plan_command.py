"""Plan which activations to keep, offload and recompute, with time and memory, for any model and machine.

Times and sizes come from formulas (docs/planning.md). Communication between accelerators is assumed to be hidden behind
compute. The head is assumed to compute log-probs in chunks of 3 GiB of logits; whole logits need more. Rows are values of
`OffloadOptions.save`, plus plain training and transformers' gradient checkpointing. Examples:

    python -m rlx.offload.plan --model qwen2-7b --tokens 32768 --hardware h100 --weight-bytes 2 --lora-rank 16
    python -m rlx.offload.plan --model qwen2-7b --tokens 32768 --gpus 8
    python -m rlx.offload.plan --model llama3-70b --tokens 32768 --gpus 64 --hardware h100 --longest
    python -m rlx.offload.plan --model ./my_model --tokens 8192 --hardware rtx4090 --states-gb 16 --weight-bytes 2 --host-gb 48
    python -m rlx.offload.plan --model qwen2-7b --tokens 32768 --measure
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rlx.offload.plan.decoder import read_decoder
from rlx.offload.plan.explain import explain
from rlx.offload.plan.hardware import PROFILES
from rlx.offload.plan.planner import Plan
from rlx.offload.plan.run_memory import PLANNED_MODES, STEP_TOKENS, ModelMemory, Scenario
from rlx.offload.plan.shapes import SHAPES
from rlx.offload.plan.text_table import GB, aligned

if TYPE_CHECKING:
    from rlx.offload.layer_costs import MeasuredCosts  # loads torch

ANSWER_S = 5.0  # for the hub to answer


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 1 if not even the plan of auto fits."""
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        scenario = _scenario(given)
        if given.measure:
            _check_measurable(given)
        if given.tokens is None:
            given.longest = True
            given.tokens = scenario.longest("auto")
            if not given.tokens:
                raise ValueError(
                    f"not even {STEP_TOKENS} tokens of {given.model} fit on {given.gpus} x {given.hardware}; {_remedies(given)}"
                )
        measured = _measured(given, scenario) if given.measure else None
    except (ImportError, MemoryError, OSError, ValueError) as error:
        parser.error(str(error))
    plans = {mode: scenario.plan(mode, given.tokens) for mode in PLANNED_MODES}
    longest = {mode: scenario.longest(mode) for mode in PLANNED_MODES} if given.longest else {}
    at_longest = {mode: scenario.plan(mode, tokens) for mode, tokens in longest.items() if tokens}
    print(_text(given, scenario, plans))
    final = plans["auto"]
    if measured is not None:
        final, text = measured.plan(scenario, given.tokens, uses_link=given.link_gb_per_s is None)
        print("\n" + text)
    if given.longest:
        print("\n" + _longest(longest, at_longest))
    if given.out is not None:
        figures = _figures(given, scenario, plans)
        figures["longest_tokens"] = longest
        figures["longest_steps_s"] = {mode: plan.prediction.step_s for mode, plan in at_longest.items()}
        if measured is not None:
            figures["measured"] = {**measured.figures, "plan": final.prediction._asdict()}
        try:
            given.out.write_text(json.dumps(figures, indent=2) + "\n")
        except OSError as error:
            parser.error(f"--out: {given.out} cannot be written: {error.strerror}; name another file")
    return int(not scenario.fits(final))


def _called_as() -> str:
    """Return the user's name of this command, which `rlx.cli` sets in the environment."""
    called = os.environ.get("RLX_CALLED_AS")
    return f"{called.rpartition(' ')[0]} plan" if called else "python -m rlx.offload.plan"


class _Parser(argparse.ArgumentParser):
    """A parser that reports all wrong values at once, without the usage, which is longer."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._faults: list[str] = []

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            self._faults.append(str(error))
            return action.default

    def parse_known_args(self, *arguments: Any) -> tuple[argparse.Namespace, list[str]]:  # type: ignore[override]  # one of its forms
        given, unknown = super().parse_known_args(*arguments)
        if unknown:
            self._faults.append(f"unrecognized arguments: {' '.join(unknown)}")
        if self._faults:
            self.error(self._faults.pop())
        return given, unknown

    def error(self, message: str) -> NoReturn:
        faults = [*self._faults, message]
        self.exit(2, "".join(f"{self.prog}: error: {fault}\n" for fault in faults))


def _parser() -> argparse.ArgumentParser:
    description = (__doc__ or "").replace("python -m rlx.offload.plan", _called_as())
    parser = _Parser(prog=_called_as(), description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help=f"{', '.join(SHAPES)}, or the path or hub name of a model of transformers")
    tokens = "tokens of a micro-batch on one GPU, or on all that share it; default: the longest that fits"
    add("--tokens", type=positive, help=tokens)
    add("--sequences", type=positive, default=1, help="sequences in the micro-batch, of equal length; default 1")
    add("--logit-tokens", type=_count, help="tokens for which log-probs are computed; default all, 0: no output head")
    add("--layers", type=positive, help="number of layers instead of the model's own")
    weights = "bytes of a stored weight, gradient and optimizer state; default 4"
    add("--weight-bytes", type=int, choices=(2, 4), default=4, help=weights)
    add("--tile", type=_tile, help="tokens per tile of MLPs and norms, or auto (model.tiled_mlp); default: no tiles")
    lora = "rank of adapters on all linear maps; only they are trained; default 0: none"
    add("--lora-rank", type=_count, default=0, help=lora)
    _add_machine(parser)
    add("--longest", action="store_true", help="also print the longest context that fits, as without --tokens")
    measure = "also measure a few layers on this machine, and plan with their costs; needs --tokens"
    add("--measure", action="store_true", help=measure)
    add("--out", type=Path, metavar="FILE", help="write everything to a file as JSON")
    return parser


def _add_machine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gpus", type=positive, default=1, help="GPUs that FSDP shards the model over; default 1")
    add("--shared-by", type=positive, default=1, help="GPUs that share each sequence (Ulysses); default 1")
    on_host = "optimizer state is in host memory except during the step (optimizer_offload)"
    add("--optimizer-on-host", action="store_true", help=on_host)
    states = "size of weights, gradients and optimizer state on a GPU, if some are frozen or on the host [10^9 bytes]"
    add("--states-gb", type=_number, help=states)
    add("--hardware", type=_card, choices=PROFILES, default="h200", help="default h200")
    add("--device-gb", type=_number, help="memory of a GPU instead of the profile's [10^9 bytes]")
    add("--host-gb", type=_number, help="host memory for each GPU's activations instead of the profile's")
    add("--link-gb-per-s", type=_number, help="rate between device and host, each way, instead of the profile's")
    disk = "rate of a disk for bytes that the host has no room for; default none"
    add("--disk-gb-per-s", type=_number, default=0.0, help=disk)


def _card(name: str) -> str:
    """Return the name of a card. Raises ArgumentTypeError for names that only `rlx check --on` takes, such as `8xh100` and `24gb`."""
    count, card = re.fullmatch(r"(?:(\d+)x)?(.*)", name.lower()).groups()  # type: ignore[union-attr]  # it always matches
    if size := re.fullmatch(r"(\d+)gb", card):
        expected = f"one of {', '.join(PROFILES)}, because a plan needs a card's rates"
        raise argparse.ArgumentTypeError(
            f"got {name}, expected {expected}; name one like yours and --device-gb {size[1]}"
        )
    if count:
        raise argparse.ArgumentTypeError(f"got {name}, expected a card's name; write --hardware {card} --gpus {count}")
    return card


def _unchecked_scenario(given: argparse.Namespace) -> Scenario:
    named = {"device_bytes": given.device_gb, "host_bytes": given.host_gb, "link_bytes_per_s": given.link_gb_per_s}
    hardware = replace(PROFILES[given.hardware], **{k: v * GB for k, v in named.items() if v is not None})
    decoder = read_decoder(_config(given.model), given.layers)
    shared = {"adapter_rank": given.lora_rank, "tile": given.tile, "shared_by": given.shared_by}
    return Scenario(
        ModelMemory(decoder, given.gpus, given.weight_bytes, **shared),
        hardware,
        given.sequences,
        given.logit_tokens,
        states=None if given.states_gb is None else given.states_gb * GB,
        disk_bytes_per_s=given.disk_gb_per_s * GB,
        optimizer_on_host=given.optimizer_on_host,
    )


def _scenario(given: argparse.Namespace) -> Scenario:
    scenario = _unchecked_scenario(given)
    if scenario.memory_parts["activations"] <= 0:
        parts = ", ".join(f"{name} {nbytes / GB:.1f}" for name, nbytes in scenario.memory_parts.items())
        raise ValueError(
            f"{given.model} leaves no room for activations on {given.gpus} x {given.hardware} of "
            f"{scenario.hardware.device_bytes / GB:.1f} GB each ({parts} GB); {_remedies(given)}"
        )
    return scenario


Changes = dict[str, int | bool]  # arguments to set
# Changes that make room, from those that cost least.
_ROOM: tuple[Changes, ...] = (
    {"optimizer_on_host": True},
    {"weight_bytes": 2},
    {"lora_rank": 16},
    {"lora_rank": 16, "weight_bytes": 2},
    *({"gpus": 2**power} for power in range(1, 13)),
)


def _remedies(given: argparse.Namespace) -> str:
    """Return in words the smallest changes of arguments with which the step fits in boundary mode."""
    if given.states_gb is not None:
        return "lower --states-gb, or take --hardware with more memory"
    tokens = given.tokens or STEP_TOKENS
    found: list[Changes] = []
    for changes in _ROOM:
        is_change = all(getattr(given, name) != value for name, value in changes.items())
        is_enough = any(other.keys() <= changes.keys() for other in found)
        if is_change and not is_enough and _fits_with(given, tokens, changes):
            found.append(changes)
    if not found:
        return (
            "neither 16-bit weights nor adapters nor more GPUs help; use fewer --tokens, or --hardware with more memory"
        )
    texts = [" ".join(_flag(name, value) for name, value in changes.items()) for changes in found]
    return f"{tokens} tokens fit with {' or '.join(texts)}"


def _fits_with(given: argparse.Namespace, tokens: int, changes: Changes) -> bool:
    scenario = _unchecked_scenario(argparse.Namespace(**{**vars(given), **changes}))
    return scenario.memory_parts["activations"] > 0 and scenario.fits(scenario.plan("boundary", tokens))


def _flag(name: str, value: int | bool) -> str:
    flag = "--" + name.replace("_", "-")
    return flag if value is True else f"{flag} {value}"


def _check_measurable(given: argparse.Namespace) -> None:
    """Reject options that measuring a few layers on one device cannot cover."""
    if given.tokens is None:
        raise ValueError("--measure: got no --tokens, expected the number to measure with; add --tokens")
    wrong = ["--shared-by"] * (given.shared_by > 1) + ["--lora-rank"] * (given.lora_rank > 0)
    if wrong:
        got = ", ".join(wrong)
        raise ValueError(f"--measure: got {got}, which only the formulas cover; leave out --measure or these")


def _measured(given: argparse.Namespace, scenario: Scenario) -> MeasuredCosts:
    from rlx.offload.layer_costs import measure_layers  # loads torch

    config = _config(given.model)
    shape = config if isinstance(config, dict) else config.to_dict()
    return measure_layers(shape, scenario.decoder, given.tokens, given.sequences, given.tile)


def _config(model: str) -> Any:
    if model in SHAPES:
        return SHAPES[model]
    if problem := _why_no_model(model):
        near = get_close_matches(model, SHAPES, n=1)
        remedy = f"; did you mean {near[0]}?" if near else ""
        expected = f"one of {', '.join(SHAPES)}, a folder with config.json, or a name of the hub"
        raise ValueError(f"--model: got {model}, {problem}; expected {expected}{remedy}")
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model).get_text_config()


def _why_no_model(model: str) -> str | None:
    """Return why no config.json can be had for a model; None if it can. transformers alone would try for half a minute."""
    folder = Path(model).expanduser()
    if folder.exists():
        return None if (folder / "config.json").is_file() else "which has no config.json"
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", model):
        return "which does not exist"
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return None
    try:
        get_hf_file_metadata(hf_hub_url(model, "config.json"), timeout=ANSWER_S)
    except Exception as error:  # the hub's client raises those of its HTTP library, which is another in each version
        return (
            f"which the hub did not give within {ANSWER_S:g} s ({' '.join(str(error).split()) or type(error).__name__})"
        )
    return None


def _text(given: argparse.Namespace, scenario: Scenario, plans: dict[str, Plan]) -> str:
    hardware, costs = scenario.hardware, scenario.costs(given.tokens)
    parts = scenario.memory_parts
    peak = plans["auto"].prediction.peak_bytes
    rows: list[tuple[str, ...]] = [("mode", "fits", "step s", "x plain", "tokens/s", "activations GB", "host GB")]
    for mode, plan in plans.items():
        step_s, _, peak_bytes, host_bytes, *_ = plan.prediction
        ratio = step_s / plans["plain"].prediction.step_s
        figures = (f"{step_s:.3f}", f"{ratio:.3f}", f"{given.tokens / step_s:.0f}", *map(_gb, (peak_bytes, host_bytes)))
        rows.append((mode, "yes" if scenario.fits(plan) else "no", *figures))
    head = f"; layer {len(costs) - 1} is the output head" if len(costs) > len(scenario.decoder.windows) else ""
    return "\n".join(
        [
            f"{given.model}, {scenario.decoder.parameters / 1e9:.2f} billion weights, {len(scenario.decoder.windows)} layers, "
            f"{given.tokens} tokens a GPU and step, {given.gpus} x {hardware.name}",
            f"{hardware.name}: {hardware.peak_flops / 1e12:.0f} TFLOP/s, memory {_gb(hardware.device_bytes)} GB at "
            f"{hardware.memory_bytes_per_s / 1e12:.2f} TB/s, host {_gb(hardware.host_bytes)} GB at "
            f"{hardware.link_bytes_per_s / GB:.1f} GB/s each way ({hardware.link_both_bytes_per_s / GB:.1f} both at once)",
            "memory, GB: " + ", ".join(f"{name} {_gb(nbytes)}" for name, nbytes in parts.items()) + " at most "
            f"({_gb(peak)} used)",
            "",
            *aligned(rows, texts=2),
            "",
            *aligned(_phases(scenario, plans), texts=1),
            "",
            f"auto, by layers from 0{head}:",
            explain(costs, plans["auto"], scenario.budget),
        ]
    )


def _phases(scenario: Scenario, plans: dict[str, Plan]) -> list[tuple[str, ...]]:
    found = {mode: scenario.phases(plan) for mode, plan in plans.items()}
    head = ("peak of all on the device, GB", "forward", "head", "backward", "optimizer step")
    return [head, *((mode, *map(_gb, phases)) for mode, phases in found.items())]


def _longest(longest: dict[str, int], plans: dict[str, Plan]) -> str:
    rows: list[tuple[str, ...]] = [("longest context that fits", "tokens", "step s", "tokens/s")]
    for mode, tokens in longest.items():
        figures = ("-", "-")
        if tokens:
            step_s = plans[mode].prediction.step_s
            figures = (f"{step_s:.2f}", f"{tokens / step_s:.0f}")
        rows.append((mode, str(tokens), *figures))
    return "\n".join(aligned(rows, texts=1))


def _figures(given: argparse.Namespace, scenario: Scenario, plans: dict[str, Plan]) -> dict[str, Any]:
    layers = []
    for cost, layer in zip(scenario.costs(given.tokens), plans["auto"].layers, strict=True):
        by_place = {"on_device": layer.on_device, "off_device": layer.off_device}
        names = {place: [cost.operations[i].name for i in sorted(ops)] for place, ops in by_place.items()}
        layers.append({**vars(layer), **names})
    return {
        "arguments": {name: value for name, value in vars(given).items() if name != "out"},
        "hardware": asdict(scenario.hardware),
        "decoder": asdict(scenario.decoder),
        "memory_bytes": scenario.memory_parts,
        "modes": {
            mode: {**plan.prediction._asdict(), "peaks": scenario.phases(plan)._asdict(), "fits": scenario.fits(plan)}
            for mode, plan in plans.items()
        },
        "fetches": plans["auto"].fetches,
        "layers": layers,
    }


def _gb(nbytes: float) -> str:
    return f"{nbytes / GB:.2f}"


def positive(text: str, least: int = 1) -> int:
    """Read a whole number of at least `least` from a command line."""
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least {least}")
    return int(text)


def _tile(text: str) -> int:
    return 0 if text == "auto" else positive(text)


def _count(text: str) -> int:
    return positive(text, least=0)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of at least 0")
    return number
