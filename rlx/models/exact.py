"""Compute a language model with the sampler's operations, so that trainer and sampler give a token the same log-prob, to the bit.

Note [what decides the bits]
Two kernels that add in another order differ in the last bits, and in bf16 any such difference grows to the rounding of a logit. So
both sides run the same kernels, and each of these gives a row the same bits whatever other rows there are. `Kernels` has one of
each kind that adds or rounds more than once. Everything else in these families (embedding, residual sums, biases, activation) rounds
the same inputs once, on both sides. Only forward is the sampler's; backward has torch's own formulas, from saved tensors alone.

Shape letters: N tokens, K and M widths of a product's input and output, H heads, D width of a head, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlx.errors import ExplainedError
from rlx.models.loading import ModelError
from rlx.models.prefix_tree import Tree
from rlx.models.tree_attention import Call, kernels_for

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class Kernels(NamedTuple):
    """Forward operations that sampler and trainer share."""

    # (x_NK, weight_MK, out_NM) writes x @ weight.T, added up in fp32, and returns `out`, which may be wider than both
    product: Callable[[Tensor, Tensor, Tensor], Tensor]
    norm: Callable[[Tensor, Tensor, float], Tensor]  # (x_NK, weight_K, epsilon) returns the RMS norm of each row
    # (x_NHD, table_ND) returns heads turned by the angles whose cosines and then sines a row of the table holds
    rotate: Callable[[Tensor, Tensor], Tensor]
    # (query_NHD, key_NHD, value_NHD, call) returns causal attention in packed sequences, and its log-sum-exp
    attention: Callable[[Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor]]
    token_log_probs: Callable[[Tensor, Tensor], Tensor]  # (logits_NV in fp32, ids_N) returns log-probs of the ids


def use_kernels(model: "PreTrainedModel", kernels: Kernels) -> None:
    """Let a Llama, Qwen2 or Qwen3 run its forward with these kernels. Raises ModelError if it has a part that they do not cover."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        kind, place = type(module).__name__, name.rpartition(".")[2]
        if hasattr(module, "inv_freq"):
            module.forward = partial(_angles, module)
        elif kind.endswith("RMSNorm"):
            module.forward = partial(_norm, module, kernels.norm)
        elif place == "self_attn" and all(hasattr(module, each) for each in ("q_proj", "k_proj", "v_proj", "o_proj")):
            module.forward = partial(_attention, module, kernels)
            module.exact_attention = partial(attention, kernels.attention)
        elif type(module) is nn.Linear and module is not head:
            module.forward = partial(_linear, module, kernels.product)
        elif module is head and type(head) is nn.Linear and head.bias is None:
            head.exact_kernels = kernels  # read by rlx.models.log_probs
        elif list(module.parameters(recurse=False)) and not isinstance(module, nn.Embedding):
            raise ModelError(
                f"rollout.exact: got a {kind} ({name}), which has no kernel in common with the sampler, expected linear maps, RMS norms "
                "and a head without bias; set actor_rollout_ref.rollout.exact=False"
            )


class UnequalLogProbs(ExplainedError, RuntimeError):
    """Sampler and trainer do not compute the same, although the configuration promises it."""


def require_equal(found_BR: Tensor, sampled_BR: Tensor, mask_BR: Tensor, ids_BR: Tensor) -> None:
    """Raise UnequalLogProbs, which names the first token of the mask whose log-probs differ in a bit."""
    differs_BR = (found_BR != sampled_BR) & mask_BR  # NaN differs from itself
    if not differs_BR.any():
        return
    row, place = differs_BR.nonzero()[0].tolist()
    found, sampled = found_BR[row, place].item(), sampled_BR[row, place].item()
    raise UnequalLogProbs(
        f"rollout.exact: trainer and sampler differ at {int(differs_BR.sum())} of {int(mask_BR.sum())} tokens, first at token {place} "
        f"(id {int(ids_BR[row, place])}) of response {row} of a process: got log-probs {found!r} and {sampled!r}, expected equal ones; "
        "set actor_rollout_ref.rollout.exact=False and, against the difference, algorithm.rollout_correction.rollout_is=token"
    )


def rotary_table(config: "PreTrainedConfig", positions: int, device: torch.device) -> Tensor:
    """Return cosines and sines (positions, D) in fp32 as the trainer's model computes them; frequencies are computed on the CPU."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    with torch.device("cpu"):
        rotary = LlamaRotaryEmbedding(config)
    places = torch.arange(positions, device=device)
    return _angles(rotary.to(device), torch.empty(0, dtype=torch.float32), places[None])[0][0]


def _linear(module: nn.Linear, product: Any, x: Tensor) -> Tensor:
    result: Tensor = _Product.apply(x.flatten(0, -2), module.weight, product)
    result = result.view(*x.shape[:-1], -1)
    return result if module.bias is None else result + module.bias


def _norm(module: Any, norm: Any, x: Tensor) -> Tensor:
    result: Tensor = _Norm.apply(x.reshape(-1, x.shape[-1]), module.weight, module.variance_epsilon, norm)
    return result.view(x.shape)


def _angles(module: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, None]:
    """Return the cosines, then the sines, of each token's angles, once for all layers; transformers hands on a pair.

    Products of numbers, because a matrix product, which some versions of transformers have here, may round to TF32 in vLLM's process.
    """
    angles = position_ids[..., None].float() * module.inv_freq.float()
    table = torch.cat((angles.cos(), angles.sin()), -1) * module.attention_scaling
    return table.to(x.dtype), None


def _attention(
    module: Any,
    kernels: Kernels,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, None],
    attention_mask: Tensor | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    from transformers import AttentionInterface

    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    q, k, v = (each(hidden_states).view(shape) for each in (module.q_proj, module.k_proj, module.v_proj))
    if hasattr(module, "q_norm"):
        q, k = module.q_norm(q), module.k_norm(k)
    table = position_embeddings[0].expand(*shape[:-2], -1).flatten(0, -2)
    q, k = (_Rotation.apply(x.flatten(0, -3), table, kernels.rotate).view(x.shape) for x in (q, k))
    run: Any = AttentionInterface()[module.config._attn_implementation]
    heads = (x.transpose(1, 2) for x in (q, k, v))
    result, _ = run(module, *heads, attention_mask, scaling=module.scaling, **given)
    return module.o_proj(result.reshape(*shape[:-2], -1)), None


def attention(kernel: Any, query: Tensor, key: Tensor, value: Tensor, tree: Tree, scaling: float) -> Tensor:
    """Return the sampler's attention (1, N, H, D) of packed sequences with nothing in common, from (1, H, N, D)."""
    assert tree.is_flat, "the engine shares no beginnings"
    lengths = tuple(tree.lengths)
    of_tree = (query.device, scaling, "exact")
    call = tree.made(of_tree, lambda: Call(lengths, lengths, True, None, scaling, query.device))
    rows = (x[0].transpose(0, 1) for x in (query, key, value))
    result: Tensor = _Attention.apply(*rows, call, kernel)
    return result[None]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, product: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, x.new_empty(len(x), len(weight)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad[:2]
        return grad @ weight if of_x else None, grad.t() @ x if of_weight else None, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, norm: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return norm(x, weight, epsilon)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            result = F.rms_norm(x, weight.shape, weight, ctx.epsilon)
        return *torch.autograd.grad(result, (x, weight), grad), None, None


class _Rotation(torch.autograd.Function):
    """Backward turns by the opposite angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, rotate: Any) -> Tensor:
        ctx.save_for_backward(table)
        ctx.rotate = rotate
        return rotate(x, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors[0].chunk(2, -1)
        return ctx.rotate(grad.contiguous(), torch.cat((cos, -sin), -1)), None, None


class _Attention(torch.autograd.Function):
    """Backward is that of FlashAttention 2, from the output and the log-sum-exp that forward gave."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call, kernel: Any) -> Tensor:
        output, lse = kernel(query, key, value, call)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.call = call
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        kernel = kernels_for(query, key, value)[0]
        return *kernel.backward(grad.contiguous(), query, key, value, output, lse, ctx.call), None, None


def _rotate(x_NHD: Tensor, table_ND: Tensor) -> Tensor:
    cos, sin = (x[:, None].to(x_NHD.dtype) for x in table_ND.chunk(2, -1))
    one, other = x_NHD.chunk(2, -1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)


TORCH = Kernels(
    product=lambda x, weight, out: out.copy_(F.linear(x, weight)),
    norm=lambda x, weight, epsilon: F.rms_norm(x, weight.shape, weight, epsilon),
    rotate=_rotate,
    attention=lambda query, key, value, call: kernels_for(query, key, value)[0].forward(query, key, value, call),
    token_log_probs=lambda logits, ids: logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0],
)
"""torch's own operations, with which no bits are promised."""
