"""Causal attention over packed sequences, which follow one another in one row without padding, or begin with common tokens.

`PACKED` is its name among transformers' attention implementations. A model that uses it gets the starts of the segments in
the keyword arguments of transformers' variable-length kernels (`cu_seq_lens_q`, `max_length_q`), and their tree as
`sequence_tree`. Sequences with nothing in common are a tree of roots.

Sequence parallelism exchanges heads for tokens (Ulysses, arXiv:2309.14509, section 3): outside attention each of P processes holds a
part of a row's tokens, inside attention all tokens of a part of the heads.

Shape letters: H heads, N tokens of all sequences, D width of a head, S sequences, P processes of a group.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from rlx.models.prefix_tree import Tree
from rlx.models.tree_attention import ROUND, has_flash, tree_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def heads_for_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send heads to the other processes of the group in exchange for their tokens; all processes call it together.

    `x` is (1, H, N / P, D), the result (1, H' / P, N, D) with H' = lcm(H, P): if P does not divide H, as with keys that several query
    heads share, each head is repeated. The processes hold neighbouring parts of the row, in the order of their ranks.
    """
    size = dist.get_world_size(group)
    heads = math.lcm(x.shape[1], size)
    x = x.repeat_interleave(heads // x.shape[1], dim=1)
    parts = x.unflatten(1, (size, -1)).transpose(0, 1)  # (P, 1, H'/P, N/P, D): one for each process
    return _ToEach.apply(parts, group).permute(1, 2, 0, 3, 4).flatten(2, 3)


def tokens_for_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reverse the exchange: turn (1, N, H / P, D), all tokens of some heads, into (1, N / P, H, D), all heads of own tokens."""
    parts = x.unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1)  # (P, 1, N/P, H/P, D)
    return _ToEach.apply(parts, group).permute(1, 2, 0, 3, 4).flatten(2, 3)


class _ToEach(torch.autograd.Function):
    """Sends part p of dimension 0 to process p, and receives that process's part in its place; backward does the same."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, sent = group, parts.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _ToEach.apply(grad, ctx.group), None


PACKED, TRIAL = "rlx_packed", "rlx_packed_trial"
CAUSAL_LAYERS = {"full_attention", "sliding_attention"}
# From this mean length on, one call per sequence is faster than the variable-length kernel, FlashAttention 2, because torch has
# cuDNN's kernels for single sequences on newer devices. cuDNN plans for each new length, which takes 0.1 s, so lengths that are no
# multiples of `ROUND` must be longer.
LONG_TOKENS, LONG_RAGGED_TOKENS = 2048, 16384
# Features of some models that packed attention lacks, by the names of transformers' arguments.
UNKNOWN = {"softcap": "caps its scores", "s_aux": "has sinks", "position_bias": "adds a bias to its scores"}


def why_not_packed(model: "PreTrainedModel", attention: str) -> str | None:
    """Return why the parts of a freshly loaded model forbid packing, or None; `use_packed_attention` tries the rest.

    Only attention may carry information between tokens, and it must accept other implementations.
    """
    if attention != "sdpa" and not attention.startswith("flash_attention"):
        return f"attn_implementation={attention} has no kernel for it"
    if not model.is_backend_compatible():
        return "its attention is not open to other implementations"
    if other := set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - CAUSAL_LAYERS:
        return f"it has layers of type {', '.join(sorted(other))}"
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        return "it has convolutions over the sequence"
    return None


def use_packed_attention(model: "PreTrainedModel", attention: str, run: Callable[[], Any]) -> str | None:
    """Give a model the attention of this file, if that supports everything the model asks of attention.

    `run` calls the model with some packed sequences; several processes may call it together. Returns None if the model now has
    packed attention, else a feature that packed attention lacks; the model then keeps `attention`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    trial = _Trial()
    AttentionInterface.register(TRIAL, trial.attention)
    AttentionMaskInterface.register(TRIAL, trial.mask)
    AttentionInterface.register(PACKED, _attention)
    model.set_attn_implementation(TRIAL)
    run()
    reason = trial.reason()
    model.set_attn_implementation(PACKED if reason is None else attention)
    return reason


class _Trial:
    """Replaces attention and its masks while a model runs, and records the model's requests to them."""

    def __init__(self) -> None:
        self._lacking: list[str] = []
        self._windows: set[int | None] = set()  # passed to attention
        self._masked: set[int | None] = set()  # passed to masks
        self._calls = 0

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
    ) -> tuple[Tensor, None]:
        self._calls += 1
        self._windows.add(given.get("sliding_window"))
        self._lacking += _lacking(module, attention_mask, given)
        if given.get("cu_seq_lens_q") is None:
            self._lacking.append("is not told where sequences begin")
        return _sequence(query, key, value, given.get("scaling"), None, 0.0).transpose(1, 2), None

    def mask(self, *, local_size: int | None = None, use_vmap: bool = False, **given: Any) -> None:
        """Run in place of a mask function; `use_vmap` is true for a mask that the model has changed."""
        self._masked.add(local_size)
        if use_vmap or "allow_is_bidirectional_skip" in given:
            self._lacking.append("has masks of its own")

    def reason(self) -> str | None:
        """Return what differs from packed attention, or None."""
        if not self._calls:
            return "its attention is its own"
        if self._masked - self._windows - {None}:
            return "its attention has a window in its masks alone"
        return f"its attention {self._lacking[0]}" if self._lacking else None


def _lacking(module: nn.Module, attention_mask: Tensor | None, given: dict[str, Any]) -> list[str]:
    found = [what for name, what in UNKNOWN.items() if given.get(name) is not None]
    if attention_mask is not None:
        found.append("masks tokens")
    causal = given.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        found.append("is not causal")
    return found


@torch.compiler.disable  # opaque to a compiler: the loop depends on lengths, and the kernel is compiled already
def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    tree: Tree,
    scaling: float | None = None,
    window: int | None = None,
    dropout: float = 0.0,
    exact: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Return causal attention (1, N, H, D of value): each token attends to itself and the earlier tokens of its sequences.

    On CUDA in bf16 and fp16, torch's variable-length kernel computes several sequences that are shorter than `LONG_TOKENS` (of
    uneven lengths `LONG_RAGGED_TOKENS`) on average, and sequences longer than their window; others come one at a time. A mask has
    at most window x 2 window elements. `tree_attention` computes sequences with common tokens.

    `query` is (1, H, N, D); `key` and `value` are (1, H or a divisor of it, N, D), where D of value may differ. `starts` (S + 1,) int32
    has the first token of each of the tree's S segments, and N. `window` counts the token itself. `exact` computes whole sequences
    in place of the kernels above, see `rlx.models.exact`.
    """
    tensors = (query, key, value)
    # Observers of torch functions then see one function, whichever kernel it uses.
    if has_torch_function(tensors):
        rest = (starts, tree, scaling, window, dropout, exact)
        return handle_torch_function(packed_attention, tensors, *tensors, *rest)
    if exact is not None:
        return exact(query, key, value, tree, scaling)
    longest = max(tree.lengths)
    has_window = window is not None and window < longest
    if not tree.is_flat:
        return tree_attention(query, key, value, tree, scaling, window, dropout)
    long_tokens = LONG_RAGGED_TOKENS if any(tokens % ROUND for tokens in tree.lengths) else LONG_TOKENS
    is_short = len(tree.lengths) > 1 and query.shape[2] < long_tokens * len(tree.lengths)
    has_kernel = dropout == 0 and has_flash(query.device, query.dtype, query.shape[-1], value.shape[-1])
    if has_kernel and (has_window or is_short):
        return _by_kernel(query, key, value, starts, longest, scaling, window)
    if len(tree.lengths) == 1:
        return _sequence(query, key, value, scaling, window, dropout).transpose(1, 2)
    # One split, so that backward joins the pieces once; each slice would fill a gradient of the whole.
    pieces = zip(*(x.split(tree.lengths, dim=2) for x in tensors), strict=True)
    return torch.cat([_sequence(*piece, scaling, window, dropout).transpose(1, 2) for piece in pieces], dim=1)


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
    if torch.__version__ >= "2.12.0a0":  # before, it was always enabled
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    rows = (x[0].transpose(0, 1) for x in (query, key, value))
    result: Tensor = varlen_attn(*rows, starts, starts, longest, longest, **options)
    return result.unsqueeze(0)


def _sequence(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, dropout: float
) -> Tensor:
    """Return causal attention within each row (B, H, T, D), in blocks if rows are longer than the window."""
    length = query.shape[2]
    options: dict[str, Any] = {"scale": scaling, "dropout_p": dropout, "enable_gqa": query.shape[1] != key.shape[1]}
    if window is None or length <= window:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    place = torch.arange(length, device=query.device)
    blocks = []
    for first in range(0, length, window):
        own, seen = slice(first, first + window), slice(max(0, first - window + 1), first + window)
        behind = place[own, None] - place[seen]
        mask = (behind >= 0) & (behind < window)
        q, k, v = query[:, :, own], key[:, :, seen], value[:, :, seen]
        blocks.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options))
    return torch.cat(blocks, dim=2)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    sequence_tree: Tree | None = None,
    sequence_group: dist.ProcessGroup | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Run for transformers. Without a tree each row is one sequence. The processes of a group hold parts of one row."""
    if lacking := _lacking(module, attention_mask, more):
        raise ValueError(
            f"{type(module).__name__} {', '.join(lacking)}, which packed attention does not support; set "
            "model.use_remove_padding=False"
        )
    # Contiguous results, as transformers' own kernels give them: some models look at them as (B, T, H * D).
    if cu_seq_lens_q is None:
        return _sequence(query, key, value, scaling, sliding_window, dropout).transpose(1, 2).contiguous(), None
    assert sequence_tree is not None
    exact = getattr(module, "exact_attention", None)
    options = (cu_seq_lens_q, sequence_tree, scaling, sliding_window, dropout, exact)
    if sequence_group is None:
        return packed_attention(query, key, value, *options).contiguous(), None
    query, key, value = (heads_for_tokens(x, sequence_group) for x in (query, key, value))
    return tokens_for_heads(packed_attention(query, key, value, *options), sequence_group).contiguous(), None
