"""The cost of a decoder's layers on a machine, by formulas; `memory.py` names the letters and has the memory.
*Linear maps* take 2 T x inputs x outputs floating-point operations, and twice as many in backward. With experts, gate, up and down
run k times each; the shared expert counts as dense.
*Attention*, causal, takes 4 T a operations per key that a query attends to: on average S / 2 keys of a sequence of S tokens, or
w - w^2 / (2 S) with a window of w < S tokens. Backward takes 2.5 times as many: five products instead of two (FlashAttention-2,
arXiv:2307.08691).
*Elementwise* kernels move bytes: a norm in transformers' own form, which goes through fp32, (28 + 4 e) h; rotary embedding
10 e (a + c); a sum 3 e h; SwiGLU 5 e f; sorting tokens by expert and back 6 e h k. Backward is assumed to take 1.5 times as long.
*Recomputation* ends before down or, with experts, before their results are summed. A tiled MLP is recomputed in its own backward.
*Shared sequences*: each process computes T / u tokens, whose queries attend to all keys. Compute is assumed to hide the exchanges.
*Head*: 2 T h V operations, twice as many in backward, and forward once more for all chunks but the last.
"""

from __future__ import annotations

from typing import NamedTuple

from rlx.offload.plan.costs import LayerCost, Operation
from rlx.offload.plan.decoder import Decoder
from rlx.offload.plan.hardware import ATTENTION_BACKWARD_SHARE, ATTENTION_SHARE, MATMUL_SHARE, MEMORY_SHARE, Hardware
from rlx.offload.plan.memory import head_bytes, head_chunk, layer_bytes

ATTENTION_BACKWARD = 2.5
ELEMENTWISE_BACKWARD = 1.5
E = 2  # bytes of an element: bf16


class _Step(NamedTuple):
    """A step of a layer's forward; with a name, its result can be saved. `again`: recomputation runs it."""

    forward_s: float
    backward_s: float
    name: str = ""
    nbytes: int = 0
    again: bool = True


class _Kernels(NamedTuple):
    """Times of kernels for a number of tokens."""

    tokens: int
    hardware: Hardware
    element: int

    def linear(self, name: str, inputs: int, outputs: int, times: int = 1, again: bool = True) -> _Step:
        seconds = 2 * self.tokens * times * inputs * outputs / (self.hardware.peak_flops * MATMUL_SHARE)
        return _Step(seconds, 2 * seconds, name, self.element * self.tokens * times * outputs, again)

    def moved(self, nbytes_per_token: float, again: bool = True) -> _Step:
        seconds = nbytes_per_token * self.tokens / (self.hardware.memory_bytes_per_s * MEMORY_SHARE)
        return _Step(seconds, ELEMENTWISE_BACKWARD * seconds, again=again)

    def attention(self, heads: int, head_width: int, keys: float) -> _Step:
        flops = 4 * self.tokens * heads * head_width * keys
        return _Step(
            flops / (self.hardware.peak_flops * ATTENTION_SHARE),
            ATTENTION_BACKWARD * flops / (self.hardware.peak_flops * ATTENTION_BACKWARD_SHARE),
            "attention",
            self.tokens * heads * (self.element * head_width + 4),
        )


def layer_cost(
    decoder: Decoder,
    layer: int,
    tokens: int,
    hardware: Hardware,
    sequences: int = 1,
    *,
    tile: int | None = None,
    shared_by: int = 1,
    element: int = E,
) -> LayerCost:
    """Return the cost of a layer, by the formulas above.

    `tokens` are those of a micro-batch of `sequences` of equal length, on all accelerators that share it. For `tile`, `shared_by` and
    `element` see `layer_bytes`; times are those of bf16.
    """
    h, a, c = decoder.width, decoder.heads * decoder.head_width, decoder.kv_heads * decoder.head_width
    own = -(-tokens // shared_by)
    memory = layer_bytes(decoder, layer, own, element, tile, shared_by)
    kernels = _Kernels(own, hardware, element)
    mlp = _mlp(decoder, layer, kernels)
    tiled_s = 0.0
    if memory.saved < layer_bytes(decoder, layer, own, element, None, shared_by).saved:
        tiled_s = sum(step.forward_s for step in mlp if step.again)
        mlp = [step._replace(again=False) for step in mlp]
    steps = [
        kernels.moved((28 + 4 * E) * h),
        kernels.linear("q", h, a),
        kernels.linear("k", h, c),
        kernels.linear("v", h, c),
        kernels.moved((10 * E + (28 + 4 * E) * decoder.qk_norm) * (a + c)),
        kernels.attention(decoder.heads, decoder.head_width, _mean_keys(tokens / sequences, decoder.windows[layer])),
        kernels.linear("o", a, h),
        kernels.moved((28 + 4 * E) * h + 3 * E * h),
        *mlp,
        kernels.moved(3 * E * h, again=False),
    ]
    forward_s = sum(step.forward_s for step in steps)
    operations, now = [], 0.0
    for step in steps:
        now += step.forward_s
        if step.name and step.again:
            operations.append(Operation(step.name, now / forward_s, step.forward_s, step.nbytes))
    return LayerCost(
        forward_s=forward_s,
        backward_s=sum(step.backward_s for step in steps) + tiled_s,
        recompute_s=sum(step.forward_s for step in steps if step.again),
        boundary_bytes=memory.inputs,
        saved_bytes=memory.saved,
        working_bytes=memory.working,
        late_bytes=memory.late,
        operations=tuple(operations),
    )


def _mean_keys(length: float, window: int | None) -> float:
    return length / 2 if window is None or window >= length else window - window**2 / (2 * length)


def _mlp(decoder: Decoder, layer: int, kernels: _Kernels) -> list[_Step]:
    h, f, k = decoder.width, decoder.expert_width, decoder.active_experts
    is_sparse = decoder.sparse[layer]
    steps = []
    if dense := decoder.shared_width if is_sparse else decoder.mlp_width:
        steps += [kernels.linear("gate", h, dense), kernels.linear("up", h, dense), kernels.moved(5 * E * dense)]
        steps.append(kernels.linear("down", dense, h, again=is_sparse))
    if is_sparse:
        steps += [kernels.linear("experts' gate and up", h, 2 * f, k), kernels.moved((5 * E * f + 3 * E * h) * k)]
        steps += [kernels.linear("experts' down", f, h, k), kernels.moved(3 * E * h * k, again=False)]
    return steps


def head_cost(
    decoder: Decoder, tokens: int, hardware: Hardware, element: int = E, is_trained: bool = True
) -> LayerCost:
    """Return the cost of the output head as a last layer without choices: log-probs of `tokens`, with logits in chunks."""
    kernels = _Kernels(tokens, hardware, element)
    step = kernels.linear("", decoder.width, decoder.vocabulary)
    moved = kernels.moved(3 * 4 * decoder.vocabulary)  # fp32: written, and read twice for the log-probs
    again = max(0.0, 1 - head_chunk(decoder, element) / tokens)
    memory = head_bytes(decoder, tokens, element, is_trained)
    return LayerCost(
        forward_s=step.forward_s + moved.forward_s,
        backward_s=step.backward_s + moved.backward_s + again * step.forward_s,
        recompute_s=0.0,
        boundary_bytes=0,
        saved_bytes=memory,
        working_bytes=memory,
        late_bytes=memory,
    )
