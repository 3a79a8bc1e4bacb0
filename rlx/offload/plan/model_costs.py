"""What the layers of a decoder cost on a machine, by formulas, for machines and models that one does not have at hand.

Letters: T tokens, S the tokens of one sequence, h width, a = heads x head width, c = key/value heads x head width, f width of
the MLP, k experts a token goes to, V vocabulary, e bytes of an element of activations. A layer in T tokens:

*Linear maps*: 2 T x inputs x outputs operations, twice as many in backward. q: h a, k and v: h c each, o: a h, gate and up:
h f each, down: f h; with experts gate with up, and down, k times each, and whatever is shared by all tokens as dense ones.
*Attention*, causal: 4 T a operations for each key that a query sees: S / 2 on average, with a window of w < S tokens
w - w^2 / (2 S). Backward: 2.5 times, five products in place of two (FlashAttention-2, arXiv:2307.08691).
*Elementwise* kernels move bytes: a norm in transformers' own form, which goes through fp32, (28 + 4 e) h, rotary embedding
10 e (a + c), a sum 3 e h, SwiGLU 5 e f, sorting tokens by expert and back 6 e h k. Backward is taken for 1.5 times as much.
*Recomputation* ends before down, or with experts before their results are summed.
*Saved* by autograd: of a norm (4 + 2 e) h (a copy in fp32, the result before and after the weight; of norms of q and k the
last is not), q and attention's result e a each, k and v e c each, its log-sum-exp 4 bytes a head, of the MLP 4 e f (gate, its
activation, up, their product); of experts k (4 e f + 2 e h) (the sorted input and down's result on top).
*Working* set of a layer's backward: what is saved, the input, the residual and the gradient from above 3 e h, and where the
product is taken apart 2 e f more (three gradients for one result); the MLP's 4 e f are gone in the second half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlx.offload.plan.hardware import Hardware
from rlx.offload.plan.step import LayerCost, Operation

ATTENTION_BACKWARD = 2.5
ELEMENTWISE_BACKWARD = 1.5
E = 2  # bytes of an element: bf16


@dataclass(frozen=True)
class Decoder:
    """What of a decoder counts for time and memory; widths in elements.

    Args:
        width, heads, kv_heads, head_width: of attention.
        mlp_width: of a dense MLP.
        vocabulary: tokens of it.
        tied: head and embedding are one.
        qk_norm: q and k go through norms.
        experts, active_experts, expert_width: how many, how many a token goes to, and how wide.
        shared_width: of the MLP that all tokens go through beside the experts; 0: there is none.
        windows: of each layer, tokens that a query sees, None for all.
        sparse: of each layer, whether it has experts.
    """

    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    vocabulary: int
    tied: bool
    qk_norm: bool
    experts: int
    active_experts: int
    expert_width: int
    shared_width: int
    windows: tuple[int | None, ...]
    sparse: tuple[bool, ...]

    def layer_parameters(self, layer: int) -> int:
        """Weights of a layer."""
        attention = 2 * self.width * (self.heads + self.kv_heads) * self.head_width
        dense = self.shared_width if self.sparse[layer] else self.mlp_width
        routed = self.experts * (3 * self.expert_width + 1) if self.sparse[layer] else 0
        return attention + self.width * (3 * dense + routed + 2)

    @property
    def root_parameters(self) -> int:
        """Weights outside the layers: embedding, head and the last norm."""
        return self.width * (self.vocabulary * (1 if self.tied else 2) + 1)

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.root_parameters + sum(map(self.layer_parameters, range(len(self.windows))))


def read_decoder(config: Any, layers: int | None = None) -> Decoder:
    """The decoder that a configuration in transformers' terms describes.

    Args:
        config: a mapping, or an object with attributes.
        layers: as many of them instead; kinds that follow each other are repeated.

    Raises:
        ValueError: for one that the formulas do not cover.
    """

    def get(name: str, default: Any = None) -> Any:
        found = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        return default if found is None else found

    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    kind, types = str(get("model_type", "")), get("layer_types", [])
    faults = [f"no {name}" for name in needed if get(name) is None]
    faults += sorted(set(types) - {"full_attention", "sliding_attention"})
    faults += ["latent attention"] if get("kv_lora_rank") else []
    faults += ["norms of its own"] if kind.startswith("gemma") else []
    if faults:
        raise ValueError(
            f"the configuration of a {kind or 'model'} has {', '.join(faults)}, which the formulas do not cover: they are for "
            "decoders like Llama, Qwen and Mistral with attention, full or sliding, and gated MLPs or experts"
        )
    count, window = get("num_hidden_layers"), get("sliding_window") if get("use_sliding_window", True) else None
    if not types:
        types = ["sliding_attention" if window else "full_attention"] * count
    experts = get("num_experts") or get("num_local_experts") or get("n_routed_experts") or 0
    every, dense = get("decoder_sparse_step", 1), set(get("mlp_only_layers", ()))
    sparse = [
        bool(experts) and i >= get("first_k_dense_replace", 0) and i not in dense and (i + 1) % every == 0
        for i in range(count)
    ]
    order = range(count) if layers is None else [i % count for i in range(layers)]
    expert_width = get("moe_intermediate_size", get("intermediate_size"))
    return Decoder(
        width=get("hidden_size"),
        heads=get("num_attention_heads"),
        kv_heads=get("num_key_value_heads", get("num_attention_heads")),
        head_width=get("head_dim", get("hidden_size") // get("num_attention_heads")),
        mlp_width=get("intermediate_size"),
        vocabulary=get("vocab_size"),
        tied=bool(get("tie_word_embeddings", False)),
        qk_norm=kind.startswith("qwen3"),
        experts=experts,
        active_experts=get("num_experts_per_tok", 0),
        expert_width=expert_width,
        shared_width=get("shared_expert_intermediate_size", get("n_shared_experts", 0) * expert_width),
        windows=tuple(window if types[i] == "sliding_attention" else None for i in order),
        sparse=tuple(sparse[i] for i in order),
    )


class _Step(NamedTuple):
    """A piece of a layer's forward: an operation if it has a name; `again`: recomputation goes through it."""

    forward_s: float
    backward_s: float
    name: str = ""
    nbytes: int = 0
    again: bool = True


class _Kernels(NamedTuple):
    """How long kernels take in so many tokens."""

    tokens: int
    hardware: Hardware

    def linear(self, name: str, inputs: int, outputs: int, times: int = 1, again: bool = True) -> _Step:
        seconds = 2 * self.tokens * times * inputs * outputs / self.hardware.matmul_flops
        return _Step(seconds, 2 * seconds, name, E * self.tokens * times * outputs, again)

    def moved(self, nbytes_per_token: float, again: bool = True) -> _Step:
        seconds = nbytes_per_token * self.tokens / self.hardware.elementwise_bytes_per_s
        return _Step(seconds, ELEMENTWISE_BACKWARD * seconds, again=again)

    def attention(self, heads: int, head_width: int, seen: float) -> _Step:
        flops = 4 * self.tokens * heads * head_width * seen
        return _Step(
            flops / self.hardware.attention_flops,
            ATTENTION_BACKWARD * flops / self.hardware.attention_backward_flops,
            "attention",
            self.tokens * heads * (E * head_width + 4),
        )


def layer_cost(decoder: Decoder, layer: int, tokens: int, hardware: Hardware, sequences: int = 1) -> LayerCost:
    """The cost of a layer, by the formulas above.

    Args:
        decoder, layer: which.
        tokens: of a micro-batch on one accelerator.
        hardware: where.
        sequences: of equal length in the micro-batch.
    """
    h, a, c = decoder.width, decoder.heads * decoder.head_width, decoder.kv_heads * decoder.head_width
    saved = 2 * (4 + 2 * E) * h + 2 * E * (a + c) + 4 * decoder.heads + (4 + E) * (a + c) * decoder.qk_norm
    mlp, mlp_saved, apart = _mlp(decoder, layer, kernels := _Kernels(tokens, hardware))
    steps = [
        kernels.moved((28 + 4 * E) * h),
        kernels.linear("q", h, a),
        kernels.linear("k", h, c),
        kernels.linear("v", h, c),
        kernels.moved((10 * E + (28 + 4 * E) * decoder.qk_norm) * (a + c)),
        kernels.attention(decoder.heads, decoder.head_width, _seen(tokens / sequences, decoder.windows[layer])),
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
    working = saved + mlp_saved + 3 * E * h + apart
    return LayerCost(
        forward_s=forward_s,
        backward_s=sum(step.backward_s for step in steps),
        recompute_s=sum(step.forward_s for step in steps if step.again),
        boundary_bytes=E * h * tokens,
        saved_bytes=(saved + mlp_saved) * tokens,
        working_bytes=working * tokens,
        late_bytes=(working - mlp_saved) * tokens,
        operations=tuple(operations),
    )


def _seen(length: float, window: int | None) -> float:
    """Keys that a query sees on average."""
    return length / 2 if window is None or window >= length else window - window**2 / (2 * length)


def _mlp(decoder: Decoder, layer: int, kernels: _Kernels) -> tuple[list[_Step], int, int]:
    """What an MLP runs, and bytes per token: what it saves, and what is needed more where its product is taken apart."""
    h, f, k = decoder.width, decoder.expert_width, decoder.active_experts
    is_sparse = decoder.sparse[layer]
    steps, saved, apart = [], 0, 0
    if dense := decoder.shared_width if is_sparse else decoder.mlp_width:
        steps += [kernels.linear("gate", h, dense), kernels.linear("up", h, dense), kernels.moved(5 * E * dense)]
        steps.append(kernels.linear("down", dense, h, again=is_sparse))
        saved, apart = 4 * E * dense, 2 * E * dense
    if is_sparse:
        steps += [kernels.linear("experts' gate and up", h, 2 * f, k), kernels.moved((5 * E * f + 3 * E * h) * k)]
        steps += [kernels.linear("experts' down", f, h, k), kernels.moved(3 * E * h * k, again=False)]
        saved, apart = saved + k * (4 * E * f + 2 * E * h), max(apart, k * (2 * E * f + E * h))
    return steps, saved, apart


def head_cost(decoder: Decoder, tokens: int, hardware: Hardware) -> LayerCost:
    """The output head as a last layer of which nothing is planned: logits of so many tokens, and their gradient as large."""
    step = _Kernels(tokens, hardware).linear("", decoder.width, decoder.vocabulary)
    moved = _Kernels(tokens, hardware).moved(3 * E * decoder.vocabulary)  # written, and read twice for the log-probs
    logits = E * decoder.vocabulary * tokens
    seconds = (step.forward_s + moved.forward_s, step.backward_s + moved.backward_s)
    return LayerCost(*seconds, 0.0, 0, logits, working_bytes=2 * logits, late_bytes=2 * logits)


class StateBytes(NamedTuple):
    """What one accelerator holds of a model beside activations [bytes].

    Args:
        weights, gradients, optimizer: its shard, and two states of Adam.
        gathered: of FSDP: weights outside the layers, of two layers, and the gradient of one, as they compute.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int


def state_bytes(decoder: Decoder, gpus: int, weight_bytes: int = 4) -> StateBytes:
    """Weights n b / N, gradients the same, optimizer twice the same, for n weights of b bytes over N accelerators."""
    shard = decoder.parameters * weight_bytes // gpus
    largest = max(map(decoder.layer_parameters, range(len(decoder.windows))))
    is_gathered = gpus > 1 or weight_bytes != E
    return StateBytes(shard, shard, 2 * shard, is_gathered * E * (decoder.root_parameters + 3 * largest))
