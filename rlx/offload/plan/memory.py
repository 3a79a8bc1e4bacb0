"""The memory of a decoder's training step by formulas, for the planner and for the forecast before a run.

Letters: T tokens of a micro-batch on one process, h width of the model, a = heads x head width, c = key/value heads x head width, f
width of the MLP, k experts per token, V vocabulary, e bytes per element of activations. The terms:

*Saved* by autograd. A norm: (4 + 2 e) h, for a copy in fp32 and the results before and after the weight; norms of q and k do not
save the result after it. The log-sum-exp: 4 per head. The MLP: 4 e f, for gate, its activation, up and their product. Experts also
save the sorted input and down's result, 2 e h each time.
*Working set* of a layer's backward: the saved tensors; the input, the residual and the gradient from above, 3 e h; and 2 e f while
the backward of the product makes three gradients from one. The second half of backward begins with the MLP's 4 e f freed.
*Tiles* of t < T tokens: MLP and norms save their inputs and the norms' results; norms are tiled for longer sequences only. The MLP's
backward needs the gradient of its input, six tensors of a tile, and fp32 sums of the weights' gradients. After it, backward needs the
gradients of q, k, v and of attention's result, and the fp32 sum of q's gradient. Experts are not tiled.
*Shared sequences*: with u processes T is the part of one. If u exceeds the number of key heads, k and v are repeated to u heads.
*Head*, for log-probs with logits in chunks: a chunk of logits, which their gradient replaces; hidden states and their gradient; the
gradient of the weight, or with several chunks its fp32 sum.
*Without backward* a layer holds its input, the residual and a norm's result, and 3 f of the MLP. Experts hold k (3 f + 2 h), or 4 k h
while their results are put back in order. While attention runs, rotary embedding holds 4 a.
*Optimizer's step*: AdamW's fused kernel allocates no tensor. States on the host are moved in pieces (`STEP_BYTES`).
"""

from __future__ import annotations

from typing import NamedTuple

from rlx.offload.plan.decoder import Decoder

# Elements of a tile's widest intermediate result. Smaller tiles take more time: each passes over the weights' gradients once.
TILE_ELEMENTS = 1 << 28
TILE_INTERMEDIATES = 8  # so many of a tile's widest intermediate results are at least as large as the whole input
HEAD_CHUNK_BYTES, HEAD_ALIGNED = 3 << 30, 256  # of rlx.models.log_probs
ADAPTER_BYTES = 4  # of a parameter of adapters on weights that are not wider
NF4_BYTES = 9 / 16  # of a weight: 4 bits, and an fp32 scale for each 64 weights
STEP_BYTES = 3.5 * (1 << 30)  # of rlx.engine.optimizer_state: 3.5 pieces of 1 GiB on the device
_TILE_STEP = 256


class LayerBytes(NamedTuple):
    """Memory of one layer [bytes]: inputs, tensors that autograd saves, peak of backward, and peak after the MLP's backward."""

    inputs: int
    saved: int
    working: int
    late: int


class StateBytes(NamedTuple):
    """Memory of a model on one accelerator, activations aside [bytes]."""

    weights: float  # of its shard, as the next two
    gradients: float
    optimizer: float  # two states (Adam)
    gathered: float  # by FSDP: weights outside the layers and of two layers, and one layer's gradient as it is summed


def tile_tokens(tokens: int, width: int, widest: int) -> int:
    """Return the tokens of a tile if the user does not choose; `widest` is the width of the widest intermediate result."""
    widest = max(widest, width)
    number = max(1, round(tokens * widest / TILE_ELEMENTS))
    wanted = max(-(-tokens // number), tokens * width // (TILE_INTERMEDIATES * widest))
    return -(-wanted // _TILE_STEP) * _TILE_STEP


def _in_tiles(positions: int, width: int, tile: int) -> bool:
    return positions > (tile or tile_tokens(positions, width, width))


def layer_bytes(
    decoder: Decoder, layer: int, tokens: int, element: int = 2, tile: int | None = None, shared_by: int = 1
) -> LayerBytes:
    """Return the memory of a layer for `tokens` on one accelerator, by the formulas above.

    `element` is the size of an element of activations [bytes]; `tile` the tokens per tile of MLPs and norms (None: no tiles; 0:
    `tile_tokens`); `shared_by` the number of accelerators that share each sequence.
    """
    h, e, f = decoder.width, element, decoder.mlp_width
    a, c = decoder.heads * decoder.head_width, max(decoder.kv_heads, shared_by) * decoder.head_width
    at_once = tokens if tile is None else tile or tile_tokens(tokens, h, f)
    attention = 2 * e * (a + c) + 4 * decoder.heads
    if at_once < tokens and not decoder.sparse[layer]:
        assert tile is not None
        saved = (_norms(decoder, tokens, e, tile, max(decoder.kv_heads, shared_by)) + attention) * tokens
        late = saved + (3 * e * h + 2 * e * (a + c) + 4 * a) * tokens
        mlp = saved + 4 * e * h * tokens + 6 * e * f * at_once + 12 * h * f
        return LayerBytes(e * h * tokens, saved, max(mlp, late), late)
    mlp, apart = _mlp(decoder, layer, e)
    saved = 2 * (4 + 2 * e) * h + attention + (4 + e) * (a + c) * decoder.qk_norm + mlp
    working = saved + 3 * e * h + apart
    return LayerBytes(e * h * tokens, saved * tokens, working * tokens, (working - mlp) * tokens)


def _norms(decoder: Decoder, tokens: int, e: int, tile: int, kv_heads: int) -> int:
    saved = (3 * e if _in_tiles(tokens, decoder.width, tile) else 2 * (4 + 2 * e)) * decoder.width
    if decoder.qk_norm:
        for heads in (decoder.heads, kv_heads):
            in_tiles = _in_tiles(tokens * heads, decoder.head_width, tile)
            saved += (e if in_tiles else 4 + e) * heads * decoder.head_width
    return saved


def _mlp(decoder: Decoder, layer: int, e: int) -> tuple[int, int]:
    """Return the bytes per token that an MLP saves, and the additional bytes per token of the backward of its product."""
    h, f, k = decoder.width, decoder.expert_width, decoder.active_experts
    dense = decoder.shared_width if decoder.sparse[layer] else decoder.mlp_width
    saved, apart = 4 * e * dense, 2 * e * dense
    if decoder.sparse[layer]:
        saved, apart = saved + k * (4 * e * f + 2 * e * h), max(apart, k * (2 * e * f + e * h))
    return saved, apart


def forward_bytes(decoder: Decoder, layer: int, tokens: int, element: int = 2, tile: int | None = None) -> int:
    """Return the peak memory of a layer without backward; arguments as for `layer_bytes`."""
    h, e, k = decoder.width, element, decoder.active_experts
    a, c = decoder.heads * decoder.head_width, decoder.kv_heads * decoder.head_width
    attention = e * (2 * h + 4 * a + 2 * c) * tokens
    if decoder.sparse[layer]:
        mlp = e * max(3 * decoder.shared_width, k * max(3 * decoder.expert_width + 2 * h, 4 * h)) * tokens
    else:
        at_once = tokens if tile is None else min(tokens, tile or tile_tokens(tokens, h, decoder.mlp_width))
        mlp = 3 * e * decoder.mlp_width * at_once
    return max(attention, 3 * e * h * tokens + mlp)


def head_bytes(decoder: Decoder, tokens: int, element: int = 2, is_trained: bool = True) -> int:
    """Return the head's working set in forward and backward; a head that is not trained has no gradient."""
    logits = min(tokens, head_chunk(decoder, element)) * decoder.vocabulary * _logit_bytes(element)
    weight = decoder.width * decoder.vocabulary
    held = logits
    if is_trained and tokens <= head_chunk(decoder, element):
        held = logits + element * weight
    elif is_trained:
        # The gradients of several chunks are summed in fp32. The sum is cast to the gradient after the logits are freed.
        held = 4 * weight + max(logits, element * weight if element < 4 else 0)
    return held + 2 * element * decoder.width * tokens


def head_forward_bytes(decoder: Decoder, tokens: int, element: int = 2) -> int:
    """Return the head's working set for log-probs and entropies without backward."""
    logits = min(tokens, head_chunk(decoder, element)) * decoder.vocabulary * max(4, element)
    return logits + element * decoder.width * tokens


def head_chunk(decoder: Decoder, element: int = 2) -> int:
    """Return the largest number of tokens whose logits exist at once."""
    most = max(1, HEAD_CHUNK_BYTES // (_logit_bytes(element) * decoder.vocabulary))
    return most - most % HEAD_ALIGNED if most > HEAD_ALIGNED else most


def _logit_bytes(element: int) -> int:
    """Return the bytes of a logit, which is in fp32 at least, and of its gradient, for which fp32 needs none of its own."""
    return 4 + element if element < 4 else element


def step_bytes(states: StateBytes, optimizer_on_host: bool) -> float:
    return min(STEP_BYTES, states.optimizer) if optimizer_on_host else states.optimizer
