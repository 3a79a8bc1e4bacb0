"""Measure the cost of a model's layers on this machine: build a few of them and profile them as `save="auto"` does."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from rlx.offload.api import enable_activation_offloading
from rlx.offload.autotune.measure import planned
from rlx.offload.plan.costs import LayerCost
from rlx.offload.plan.decoder import Decoder
from rlx.offload.plan.explain import explain
from rlx.offload.plan.planner import Plan, make_plan
from rlx.offload.plan.run_memory import Scenario
from rlx.offload.plan.text_table import GB, aligned
from rlx.offload.runtime.options import OffloadOptions
from rlx.offload.storage.stats import measured_rate
from rlx.offload.tiling.tiling import enable_tiling

VOCABULARY = 1024  # small, for embedding and head are not measured
_PASSES = 10  # at most: one warms up, mostly one is measured, and the next finds the result


class Case(NamedTuple):
    """The size of a measurement: one sequence of `tokens` through `layers` layers."""

    tokens: int
    layers: int

    def __str__(self) -> str:
        return f"{self.tokens} tokens x {self.layers} layers"


class MeasuredCosts(NamedTuple):
    """Costs of layers as measured on a device."""

    device: str
    layers: int  # number of layers that were built
    costs: tuple[LayerCost, ...]  # of each layer of the whole model
    link_bytes_per_s: float | None  # between device and host; None: too few bytes were copied to know it
    figures: Mapping[str, Any]  # everything as JSON can hold it

    def plan(self, scenario: Scenario, tokens: int, uses_link: bool) -> tuple[Plan, str]:
        """Return a plan, at the measured rate of the link if `uses_link`, and as text the costs, measured and computed, and the plan."""
        computed, budget, link = scenario.costs(tokens), scenario.budget, self.link_bytes_per_s
        costs = [*self.costs, *computed[len(self.costs) :]]
        if uses_link and link is not None:
            budget = replace(budget, out_bytes_per_s=link, in_bytes_per_s=link)
        plan = make_plan(costs, budget)
        names = ("forward ms", "backward ms", "recomputed ms", "saved MB", "working MB")
        rows: list[tuple[str, ...]] = [("layer", "", *names)]
        for index in sorted({costs.index(cost) for cost in self.costs}):
            rows += [_row(index, "measured", costs[index]), _row(index, "computed", computed[index])]
        rate = "" if link is None else f", copies to and from the host at {link / GB:.1f} GB/s"
        headline = f"measured: {self.layers} layers in bf16 on {self.device}{rate}"
        found = ["auto, from what was measured:", explain(costs, plan, budget)]
        return plan, "\n".join([headline, "", *aligned(rows, texts=2), "", *found])


def _row(index: int, source: str, cost: LayerCost) -> tuple[str, ...]:
    times = (f"{seconds * 1e3:.3f}" for seconds in (cost.forward_s, cost.backward_s, cost.recompute_s))
    return (str(index), source, *times, f"{cost.saved_bytes / 1e6:.1f}", f"{cost.working_bytes / 1e6:.1f}")


def measure_layers(
    shape: Mapping[str, Any], decoder: Decoder, tokens: int, sequences: int = 1, tile: int | None = None
) -> MeasuredCosts:
    """Measure layers in bf16 on this machine; MemoryError if it has no room. `decoder` was read of `shape`, a configuration.

    `tokens` are those of all sequences together. For `tile` see `layer_bytes`.
    """
    if tokens % sequences:
        raise ValueError(f"{tokens} tokens cannot be cut into {sequences} sequences of equal length")
    try:
        return _measure(shape, decoder, sequences, tokens // sequences, tile)
    except torch.OutOfMemoryError as error:
        text = f"layers of {tokens} tokens do not fit on this machine ({error}); use fewer tokens"
        raise MemoryError(text) from error


def _measure(
    shape: Mapping[str, Any], decoder: Decoder, sequences: int, length: int, tile: int | None
) -> MeasuredCosts:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    kinds = list(zip(decoder.windows, decoder.sparse, strict=True))
    count = layers_to_build(kinds)
    small = {**shape, "vocab_size": VOCABULARY, "pad_token_id": None}
    model = build(small, Case(length, count), device, torch.bfloat16)
    if tile is not None:
        enable_tiling(model, tile or None)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # as in a run after its first step
    options = OffloadOptions(save="auto", max_device_bytes=0)
    handle = enable_activation_offloading(model, True, options)
    ids = torch.randint(0, VOCABULARY, (sequences, length), generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(_PASSES):
        output = model(input_ids=ids).last_hidden_state
        if handle.measurement() is not None:
            break
        output.backward(torch.ones_like(output))
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    profile, stats = handle.measurement(), handle.stats()
    assert profile is not None
    handle.disable()
    output = None
    gc.collect()
    of_layer = {index: planned(kind).cost for kind in profile.kinds for index in kind.members}
    of_kind = {kinds[index]: of_layer[index] for index in range(count)}  # the last one of each
    name, link = device_name(device), measured_rate(stats.copied_bytes, stats.copy_ms)
    figures = {"device": name, "layers": count, "link_bytes_per_s": link, "measurement": to_json(profile)}
    return MeasuredCosts(name, count, tuple(of_kind[kind] for kind in kinds), link, figures)


def layers_to_build(kinds: list[tuple[int | None, bool]]) -> int:
    """Return how many layers to build, so that each kind occurs among them after the first, whose backward has no measured end."""
    firsts = [kinds.index(kind, 1) if kind in kinds[1:] else 0 for kind in set(kinds)]
    return min(len(kinds), max(2, *firsts) + 1)


def build(shape: dict[str, Any], case: Case, device: torch.device, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModel

    torch.manual_seed(0)
    with device:
        model: nn.Module = AutoModel.from_config(config_of(shape, case), dtype=dtype, attn_implementation="sdpa")
    return model.train()


def config_of(shape: dict[str, Any], case: Case) -> Any:
    from transformers import AutoConfig

    name = AutoConfig.for_model(**shape).attribute_map.get("num_hidden_layers", "num_hidden_layers")
    shape = {**shape, name: case.layers}
    if isinstance(types := shape.get("layer_types"), list):  # one for each layer, so it is cut or repeated
        shape["layer_types"] = (types * (case.layers // len(types) + 1))[: case.layers]
    config = AutoConfig.for_model(**shape)
    config.use_cache = False
    if (getattr(config, "max_position_embeddings", None) or case.tokens) < case.tokens:
        config.max_position_embeddings = case.tokens
    return config


def device_name(device: torch.device) -> str:
    return "CPU" if device.type == "cpu" else str(torch.get_device_module(device.type).get_device_name(device))


def to_json(value: Any) -> Any:
    value = vars(value) if is_dataclass(value) else value._asdict() if hasattr(value, "_asdict") else value
    if isinstance(value, dict):
        return {name: to_json(item) for name, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, tuple) else value
