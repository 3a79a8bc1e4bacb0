"""Measure the cost of a model's layers on this machine: build a few of them and profile them as `save="auto"` does."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch

from rlx.offload.api import enable_activation_offloading
from rlx.offload.autotune.pass_profile import planned
from rlx.offload.autotune.profile_cache import to_json
from rlx.offload.benchmark.device import clock, name_of
from rlx.offload.benchmark.measured_plan import MeasuredCosts
from rlx.offload.benchmark.models import VOCABULARY, Case, build
from rlx.offload.plan.decoder import Decoder
from rlx.offload.runtime.options import OffloadOptions
from rlx.offload.storage.stats import measured_rate
from rlx.offload.tiling.tiling import enable_tiling

_PASSES = 10  # at most: one warms up, mostly one is measured, and the next finds the result


def measure_layers(
    shape: Mapping[str, Any], decoder: Decoder, tokens: int, sequences: int = 1, tile: int | None = None
) -> MeasuredCosts:
    """Measure layers in bf16 on the accelerator of this machine, or on its CPU.

    Args:
        shape: configuration of the model, as transformers names things.
        decoder: read from `shape`; gives the kinds of the layers.
        tokens: number of tokens of all sequences together.
        sequences: number of sequences, of equal length.
        tile: tokens per tile of MLPs and norms; 0: as `enable_tiling` chooses; None: no tiles.

    Raises:
        ValueError: the tokens cannot be divided into that many sequences.
        MemoryError: the device has no room for these layers.
    """
    try:
        return _measure(shape, decoder, tokens, sequences, tile)
    except torch.OutOfMemoryError as error:
        raise MemoryError(
            f"layers of {tokens} tokens do not fit on this machine ({error}); use fewer tokens"
        ) from error


def _measure(
    shape: Mapping[str, Any], decoder: Decoder, tokens: int, sequences: int, tile: int | None
) -> MeasuredCosts:
    if tokens % sequences:
        raise ValueError(f"{tokens} tokens cannot be cut into {sequences} sequences of equal length")
    found = torch.accelerator.current_accelerator(check_available=True)
    device = found or torch.device("cpu")
    kinds = list(zip(decoder.windows, decoder.sparse, strict=True))
    count = layers_to_build(kinds)
    small = {**shape, "vocab_size": VOCABULARY, "pad_token_id": None}
    model = build(small, Case(tokens // sequences, count), device, torch.bfloat16)
    if tile is not None:
        enable_tiling(model, tile or None)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # as in a run after its first step
    # No cache directory: profiles of a model without head and loss are of no use to a training run.
    options = OffloadOptions(save="auto", max_device_bytes=0, cache_directory=None)
    handle = enable_activation_offloading(model, True, options)
    ids = torch.randint(0, VOCABULARY, (sequences, tokens // sequences), generator=torch.Generator().manual_seed(1))
    ids = ids.to(device)
    for _ in range(_PASSES):
        output = model(input_ids=ids).last_hidden_state
        if handle.measurement() is not None:
            break
        output.backward(torch.ones_like(output))
        clock(device)
    measurement, stats = handle.measurement(), handle.stats()
    assert measurement is not None
    handle.disable()
    output = None
    gc.collect()
    of_layer = {index: planned(kind).cost for kind in measurement.kinds for index in kind.members}
    of_kind = {kinds[index]: of_layer[index] for index in range(count)}  # the last one of each
    link = measured_rate(stats.copied_bytes, stats.copy_ms)
    figures = {
        "device": name_of(device),
        "layers": count,
        "link_bytes_per_s": link,
        "measurement": to_json(measurement),
    }
    return MeasuredCosts(name_of(device), count, tuple(of_kind[kind] for kind in kinds), link, figures)


def layers_to_build(kinds: list[tuple[int | None, bool]]) -> int:
    """Return how many layers to build, so that each kind occurs among them after the first, whose backward has no measured end."""
    firsts = [kinds.index(kind, 1) if kind in kinds[1:] else 0 for kind in set(kinds)]
    return min(len(kinds), max(2, *firsts) + 1)
