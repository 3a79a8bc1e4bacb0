"""What a step of a decoder holds, by formulas: for the planner, for its command, and for what a run says when it starts.

Letters: T tokens of a micro-batch on one process, h width, a = heads x head width, c = key/value heads x head width, f width of
the MLP, k experts a token goes to, V vocabulary, e bytes of an element of activations. Of a layer in T tokens:

*Saved* by autograd: of a norm (4 + 2 e) h (a copy in fp32, the result before and after the weight; of norms of q and k the
last is not), q and attention's result e a each, k and v e c each, its log-sum-exp 4 bytes a head, of the MLP 4 e f (gate, its
activation, up, their product); of experts k (4 e f + 2 e h) (the sorted input and down's result on top).
*Working* set of a layer's backward: what is saved, the input, the residual and the gradient from above 3 e h, and where the
product is taken apart 2 e f more (three gradients for one result); the MLP's 4 e f are gone in the second half.
*In tiles* of t < T tokens MLP and norms save their inputs: with norms' results 3 e h, of norms of q and k e (a + c); a norm is
whole up to longer sequences than the MLP, and then saves what it does without tiles. While the MLP's backward runs there are on
top the gradient of its input e h, six tensors of a tile 6 e f t, and the sums of the weights' gradients in fp32, 12 h f; after it
the gradients of q, k, v and of attention's result e (2 a + 2 c), and of q its sum in fp32, 4 a. Experts are not tiled.
*Sequences shared* by u processes: T is a process's own part; where u exceeds the key heads, k and v are repeated to u heads.
*Head*, log-probs without logits: a chunk of 3 GiB of logits, or all of them, whose gradient takes their place; hidden states and
their gradient 2 e h T; the gradient of the weight e h V, of several chunks its sum in fp32, 4 h V.
*Without backward* a layer holds three results of width h (its input, the residual, a norm's) and of the MLP 3 f (with experts
k (3 f + 2 h), or k 4 h where their results are put back in order); while attention is at work 2 h, 4 a (rotary embedding) and
2 c. The head: e for each logit of a chunk, and e h.
*Adapters* of rank r (LoRA) on all linear maps: they alone have gradients and optimizer states, and the head has no gradient.
*Optimizer's step*: AdamW's fused kernel makes no tensor of its own; a state on the host comes in pieces of 1 GiB, 3.5 at once.
"""

from __future__ import annotations

from typing import NamedTuple

from rlx.offload.plan.decoder import Decoder

# Elements of a tile's widest intermediate result. Smaller tiles cost time: each is a pass over the sums of the weights' gradients, and a norm in tiles runs once more.
TILE_ELEMENTS = 1 << 28
TILE_INTERMEDIATES = 8  # so many intermediate results of a tile take as much as the whole input
HEAD_CHUNK_BYTES, HEAD_ALIGNED = 3 << 30, 256  # of rlx.models.head_log_probs
STEP_BYTES = 3.5 * (1 << 30)  # of rlx.engine.optimizer_state: pieces on the device, times a piece
_TILE_STEP = 256


class LayerBytes(NamedTuple):
    """What one layer holds, see above: its inputs, what autograd saves, and what backward needs at most, first and then [bytes]."""

    inputs: int
    saved: int
    working: int
    late: int


class StateBytes(NamedTuple):
    """What one accelerator holds of a model beside activations [bytes].

    Args:
        weights, gradients, optimizer: its shard, and two states of Adam.
        gathered: of FSDP: weights outside the layers and of two layers, as they compute, and the gradient of one, as it is summed.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float


def tile_tokens(tokens: int, width: int, widest: int) -> int:
    """Tokens of a tile where nothing else is asked for; not fewer than there are where tiles would gain little.

    Args:
        tokens: of the input.
        width: of the input.
        widest: width of the widest intermediate result.
    """
    widest = max(widest, width)
    number = max(1, round(tokens * widest / TILE_ELEMENTS))
    wanted = max(-(-tokens // number), tokens * width // (TILE_INTERMEDIATES * widest))
    return -(-wanted // _TILE_STEP) * _TILE_STEP


def _in_tiles(positions: int, width: int, tile: int) -> bool:
    """Whether a norm of so many positions is; `tile` as in `layer_bytes`."""
    return positions > (tile or tile_tokens(positions, width, width))


def layer_bytes(
    decoder: Decoder, layer: int, tokens: int, element: int = 2, tile: int | None = None, shared_by: int = 1
) -> LayerBytes:
    """Memory of a layer, by the formulas above.

    Args:
        decoder, layer: which.
        tokens: on one accelerator.
        element: bytes of one of activations.
        tile: tokens of a tile of MLPs and norms; None: they are not tiled; 0: `tile_tokens`.
        shared_by: accelerators that share each sequence.
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
    """Bytes per token of what a layer's norms save beside an MLP in tiles."""
    saved = (3 * e if _in_tiles(tokens, decoder.width, tile) else 2 * (4 + 2 * e)) * decoder.width
    if decoder.qk_norm:
        for heads in (decoder.heads, kv_heads):
            in_tiles = _in_tiles(tokens * heads, decoder.head_width, tile)
            saved += (e if in_tiles else 4 + e) * heads * decoder.head_width
    return saved


def _mlp(decoder: Decoder, layer: int, e: int) -> tuple[int, int]:
    """Bytes per token of what an MLP saves, and of what is needed more where its product is taken apart."""
    h, f, k = decoder.width, decoder.expert_width, decoder.active_experts
    dense = decoder.shared_width if decoder.sparse[layer] else decoder.mlp_width
    saved, apart = 4 * e * dense, 2 * e * dense
    if decoder.sparse[layer]:
        saved, apart = saved + k * (4 * e * f + 2 * e * h), max(apart, k * (2 * e * f + e * h))
    return saved, apart


def forward_bytes(decoder: Decoder, layer: int, tokens: int, element: int = 2, tile: int | None = None) -> int:
    """What a layer without a backward holds at most; arguments as of `layer_bytes`."""
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
    """The head's working set for so many tokens, forward and backward; one that is not trained has no gradient."""
    logits = min(tokens, head_chunk(decoder, element)) * decoder.vocabulary * element
    weight = decoder.width * decoder.vocabulary
    held = logits
    if is_trained and tokens <= head_chunk(decoder, element):
        held = logits + element * weight
    elif (
        is_trained
    ):  # the products of several chunks are summed in fp32; the gradient is made of it when the logits have gone
        held = 4 * weight + max(logits, element * weight if element < 4 else 0)
    return held + 2 * element * decoder.width * tokens


def head_forward_bytes(decoder: Decoder, tokens: int, element: int = 2) -> int:
    """The head's working set for log-probs and entropies of so many tokens without a backward."""
    return element * (min(tokens, head_chunk(decoder, element)) * decoder.vocabulary + decoder.width * tokens)


def head_chunk(decoder: Decoder, element: int = 2) -> int:
    """The most tokens whose logits exist at once."""
    most = max(1, HEAD_CHUNK_BYTES // (element * decoder.vocabulary))
    return most - most % HEAD_ALIGNED if most > HEAD_ALIGNED else most


def state_bytes(
    decoder: Decoder,
    gpus: int,
    weight_bytes: int = 4,
    element: int = 2,
    *,
    is_trained: bool = True,
    adapter_rank: int = 0,
    summed_in: int | None = None,
    is_resharded: bool = True,
) -> StateBytes:
    """Weights n b / N, gradients the same, optimizer twice the same, for n weights of b bytes over N accelerators.

    Args:
        decoder, gpus, weight_bytes: n, N and b.
        element: bytes of a weight as it computes.
        is_trained: there are gradients and states.
        adapter_rank: of LoRA, whose weights alone are trained then; 0: there are no adapters.
        summed_in: bytes of an element of gradients as they are summed over accelerators; None: as they are computed.
        is_resharded: gathered layers are given back after forward; else all of them stay.
    """
    adapters, layers = decoder.adapters(adapter_rank), len(decoder.windows)
    shard = weight_bytes / gpus
    trained = is_trained * (adapters if adapter_rank else decoder.parameters)
    largest = max(map(decoder.layer_parameters, range(layers)))
    of_adapters = adapters // layers
    with_gradient = is_trained * (of_adapters if adapter_rank else largest)
    at_once = 2 if is_resharded else layers
    is_gathered, summed_in = gpus > 1 or weight_bytes != element, summed_in or element
    gathered = is_gathered * element * (decoder.root_parameters + at_once * (largest + of_adapters))
    gathered += (is_gathered or summed_in != element) * summed_in * with_gradient
    return StateBytes((decoder.parameters + adapters) * shard, trained * shard, 2 * trained * shard, gathered)


def step_bytes(states: StateBytes, optimizer_on_host: bool) -> float:
    """What the optimizer's step holds beside weights and gradients: AdamW's fused kernel needs nothing of its own."""
    return min(STEP_BYTES, states.optimizer) if optimizer_on_host else states.optimizer
