"""Run one micro-batch through a model and return the figures of its response tokens.

Shape letters: B rows, W columns of the window that holds the responses, K response tokens in it.
"""

import contextlib
import inspect
import logging
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlx.data.batch import EXPERTS, SEQUENCE, Batch
from rlx.engine.experts import ExpertOptions, Experts
from rlx.engine.micro_batches import MicroBatch
from rlx.heartbeat import beat
from rlx.models.experts import ExpertRouting
from rlx.models.loading import ModelError
from rlx.models.log_probs import head_replaced, token_log_probs
from rlx.models.packed_attention import use_packed_attention, why_not_packed
from rlx.models.prefix_tree import Tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_ROUNDING = 2.0**-8  # share of the largest logit: the rounding of bf16; kernels differ less for equal inputs


def sequence_scores(model: nn.Module, ids_BT: Tensor, mask_BT: Tensor, pad_token_id: int) -> Tensor:
    """Return the score (B,) that a sequence classifier with one label gives each row, in fp32 or wider.

    It reads the score at the last token that is not `pad_token_id`. `mask_BT` is true for tokens that are not padding.
    """
    input_ids = ids_BT.masked_fill(~mask_BT, pad_token_id)
    scores: Tensor = model(input_ids=input_ids, attention_mask=mask_BT.long()).logits[:, 0]
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


class Distribution(NamedTuple):
    """The temperature of next-token distributions, whether to compute their entropy, and whether a loss reads it."""

    temperature: float
    with_entropy: bool
    entropy_in_loss: bool = True


class Forward:
    """The forward pass of a model over one micro-batch: of the model `plain`, called as `root`, sharded or not.

    `attention` is for packed sequences, as transformers names it; None to pad the rows. The processes of `sequence_group` share
    each packed row; `MicroBatch.packed` then holds a part of it.
    """

    def __init__(
        self,
        root: nn.Module,
        plain: "PreTrainedModel",
        device: torch.device,
        attention: str | None,
        sequence_group: dist.ProcessGroup | None = None,
    ):
        self._root, self._plain, self._device, self._attention = root, plain, device, attention
        self._sequence_group = sequence_group
        self.experts: Experts | None = None  # of a mixture of experts, if they are recorded, replayed or balanced
        self._name = type(plain).__name__.removeprefix("FSDP")
        # Until `packs` is asked for.
        self.why_padded: str | None = f"use_remove_padding=False or attn_implementation={attention}"

    def __call__(self, part: MicroBatch, distribution: Distribution | None) -> dict[str, Tensor]:
        """Return the model's figures at the positions that predict the tokens of the window, (B, W) each in fp32 or wider.

        They are log_probs of the window's tokens and, if asked for, entropy; of a value model (without distribution) values. If the
        rows bring experts, also what `Experts.differing` compares.
        """
        beat()
        if self.experts is None:
            return self._of_response(part, distribution)
        self.experts.begin(part)
        return self._of_response(part, distribution) | self._differing(part, self.experts.differing())

    def _of_response(self, part: MicroBatch, distribution: Distribution | None) -> dict[str, Tensor]:
        if part.packed is None:
            # The last token predicts nothing, so the model does not read it.
            inputs, window = {"input_ids": part.batch["input_ids"][:, :-1]}, part.batch.response_length
            return self._figures(inputs, window, slice(-window, None), part.batch.responses(), distribution)
        predicting, places = part.packed.predicting, part.packed.places
        inputs = self._inputs(*part.packed[:4], self._sequence_group)
        figures = self._figures(inputs, predicting, predicting, part.packed.targets, distribution)
        return {name: self._placed(x[0], places, part.batch["response_mask"].shape) for name, x in figures.items()}

    def _differing(self, part: MicroBatch, figures_N: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the figures of the tokens that predict those of the window."""
        shape = part.batch["response_mask"].shape
        if part.packed is None:
            return {name: x.view(shape[0], -1)[:, -shape[1] :] for name, x in figures_N.items()}
        predicting, places = part.packed.predicting, part.packed.places
        return {name: self._placed(x[predicting], places, shape) for name, x in figures_N.items()}

    @contextlib.contextmanager
    def balancing(self, parts: Sequence[MicroBatch], distribution: Distribution | None) -> Iterator[None]:
        """Know the load of the experts in a mini-batch while its micro-batches run forward and backward."""
        if self.experts is not None:
            self.experts.weigh(parts, lambda part: self(part, distribution))
        yield
        if self.experts is not None:
            self.experts.end()

    def balance(self) -> tuple[Tensor | None, float]:
        """Return the last forward's share of the load-balancing loss, with its graph, and its weight; None: there is none."""
        return (None, 0.0) if self.experts is None else (self.experts.balance(), self.experts.options.balance)

    def columns(self, batch: Batch) -> tuple[str, ...]:
        return (*SEQUENCE, EXPERTS) if self.experts is not None and EXPERTS in batch else SEQUENCE

    def find_experts(self, options: ExpertOptions | None) -> None:
        """Find the routers of a mixture of experts, and from now on treat its experts as the options say.

        Raises RoutingError if the model has no experts, or chooses them in a way that cannot be watched.
        """
        if options is None:
            return
        inputs = {"input_ids": self._tokens([[0, 1, 0, 1, 1]])}
        routing = ExpertRouting(self._plain, lambda: self._try(inputs), tokens=5)
        self.experts = Experts(routing, options, self._device)

    def require_causal(self) -> None:
        """Raise ModelError if an output depends on later tokens, or the forward of a few tokens fails."""
        try:
            causal = self._looks_back_only()
        except Exception as error:
            raise ModelError(
                f"{self._name}: its forward fails on four tokens ({type(error).__name__}: {error}), expected a model that this "
                "version of transformers can run; set model.path to a model of another type"
            ) from error
        if not causal:
            raise ModelError(
                f"{self._name}: its output at a token depends on later tokens, expected a causal model; if it can be one, set "
                "is_decoder=true in its config.json"
            )

    def require_packing(self, processes: int) -> None:
        """Raise ValueError if the model's rows cannot be packed with `sdpa`, which processes that share rows need."""
        if self._attention != "sdpa" or not self.packs:
            raise ValueError(
                f"ulysses_sequence_parallel_size={processes}: got a {self._name} that is padded because {self.why_padded}, "
                "expected use_remove_padding=True, attn_implementation=sdpa and a model whose sequences can be packed; set "
                "ulysses_sequence_parallel_size=1"
            )

    def try_training(self) -> None:
        self._try({"input_ids": self._tokens([[0, 1]])}, training=True)

    def differs_in_training(self) -> bool:
        """Whether the model computes other numbers in training, as with dropout. Logs it."""
        inputs = {"input_ids": self._tokens([[0, 1] * 16])}
        differs = not torch.equal(self._try(inputs).nan_to_num(), self._try(inputs, training=True).nan_to_num())
        if differs:
            self._tell("old log-probs take a pass of their own", "it computes other numbers in training")
        return differs

    def _placed(self, figures_K: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
        """Write figures into the window, beside those of processes that share the row; 0 elsewhere.

        These processes all continue with the same computation, so each has the gradients of its own figures.
        """
        own, window = figures_K[: len(places)], figures_K.new_zeros(shape.numel())
        if self._sequence_group is not None:
            window.index_copy_(0, places, own.detach())
            dist.all_reduce(window, group=self._sequence_group)
        return window.index_copy(0, places, own).view(shape)

    def _figures(
        self,
        inputs: dict[str, Any],
        logits_to_keep: int | Tensor,
        kept: slice | Tensor,
        ids: Tensor,
        distribution: Distribution | None,
    ) -> dict[str, Tensor]:
        """Return the figures at the kept positions, which predict `ids`."""
        if distribution is None:
            values = self._call(inputs)[:, kept, 0]
            return {"values": values.to(torch.promote_types(values.dtype, torch.float32))}
        if not self._chooses_positions:
            figures = token_log_probs(self._call(inputs)[:, kept], ids, *distribution[:2])
        elif self._head_ends_it:
            with head_replaced(self._plain.get_output_embeddings(), ids, *distribution):
                figures = self._call(inputs | {"logits_to_keep": logits_to_keep}).unbind(dim=-1)
        else:
            figures = token_log_probs(self._call(inputs | {"logits_to_keep": logits_to_keep}), ids, *distribution[:2])
        return {name: x for name, x in zip(("log_probs", "entropy"), figures, strict=False) if x is not None}

    def _call(self, inputs: dict[str, Any]) -> Tensor:
        return self._root(**inputs, use_cache=False).logits

    def _inputs(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        starts: Tensor,
        tree: Tree,
        sequence_group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Name packed sequences as transformers' variable-length kernels do, and add the arguments of our own kernel."""
        own = {"sequence_tree": tree} if self._attention == "sdpa" else {}
        return {
            **own,
            **({} if sequence_group is None else {"sequence_group": sequence_group}),
            "input_ids": input_ids,
            "position_ids": position_ids,
            "cu_seq_lens_q": starts,
            "cu_seq_lens_k": starts,
            "max_length_q": max(tree.lengths),
            "max_length_k": max(tree.lengths),
        }

    # The model's abilities: all processes together find each out once, with a few tokens ------------------------

    @cached_property
    def packs(self) -> bool:
        """Whether the model takes packed sequences."""
        if self._attention is None:
            return False
        reason = why_not_packed(self._plain, self._attention)
        if reason is None and not self._counts_from_zero():
            reason = "its positions do not begin at 0"
        if reason is None and self._attention == "sdpa":
            reason = use_packed_attention(self._plain, self._attention, self._try_two_sequences)
        if reason is not None:
            self._tell("its rows are padded", reason)
        self.why_padded = reason
        return reason is None

    @cached_property
    def shares_prefixes(self) -> bool:
        """Whether packed sequences may begin with common tokens."""
        if self.packs and self._attention != "sdpa":
            self._tell("prompts are computed with each response", f"{self._attention} attends to whole sequences only")
        return self.packs and self._attention == "sdpa"

    def _counts_from_zero(self) -> bool:
        """Whether positions start at 0 by default, as in packed sequences; those of RoBERTa start after the padding index."""
        ids = self._tokens([[0, 1, 1]])
        with _Lookups() as own_lookups:
            own = self._try({"input_ids": ids})
        with _Lookups() as given_lookups:
            given = self._try({"input_ids": ids, "position_ids": torch.arange(3, device=self._device)[None]})
        # Weights may give positions little influence on the output, so the rows of embeddings are compared too.
        return _are_near(own, given) and own_lookups.indices == given_lookups.indices

    def _looks_back_only(self) -> bool:
        """Whether the outputs at earlier tokens stay the same when the last token changes, and when it is missing."""
        rows = [[0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 1]]
        one, *others = (self._try({"input_ids": self._tokens([row])})[0, :3] for row in rows)
        return all(_are_near(one, other) for other in others)

    def _tokens(self, ids: list[list[int]]) -> Tensor:
        """Replace 0 and 1 by two tokens other than padding, which may have a position of its own."""
        padding = getattr(self._plain.config.get_text_config(), "pad_token_id", None)  # CodeGen and RWKV have none
        two = torch.tensor([token for token in range(3) if token != padding], device=self._device)
        return two[torch.tensor(ids, device=self._device)]

    @cached_property
    def _chooses_positions(self) -> bool:
        can = "logits_to_keep" in inspect.signature(self._plain.forward).parameters
        if not can:
            self._tell("log-probs are computed from logits", "it computes the logits of all tokens")
        return can

    def _try_two_sequences(self) -> None:
        ids, positions = torch.zeros(2, 1, 3, dtype=torch.int64, device=self._device)
        starts = torch.tensor([0, 1, 3], dtype=torch.int32, device=self._device)
        positions[0, 2] = 1
        self._try(self._inputs(ids, positions, starts, Tree([1, 2])))

    @cached_property
    def _head_ends_it(self) -> bool:
        """Whether the head is a plain linear map whose result the model returns unchanged; log-probs can then replace it."""
        head = self._plain.get_output_embeddings()
        if type(head) is not nn.Linear or head.bias is not None:
            what = "has a bias" if type(head) is nn.Linear else f"is a {type(head).__name__}"
            self._tell("log-probs are computed from logits", f"its head {what}")
            return False
        given: list[Tensor] = []  # copies of the head's results, which in-place operations do not reach
        hook = head.register_forward_hook(lambda module, inputs, output: given.append(output.clone()))
        returned = self._try({"input_ids": self._tokens([[0, 1]])})
        hook.remove()
        # Some models return their logits in fp32, as log-probs are.
        is_wide = len(given) == 1 and returned.dtype == torch.promote_types(returned.dtype, given[0].dtype)
        is_last = is_wide and torch.equal(returned.nan_to_num(), given[0].to(returned.dtype).nan_to_num())
        if not is_last:
            self._tell("log-probs are computed from logits", "it changes the result of its head")
        return is_last

    @torch.no_grad()
    def _try(self, inputs: dict[str, Any], training: bool = False) -> Tensor:
        """Run without the randomness of training, such as dropout; other random operations draw the same numbers each time."""
        was_training = self._root.training
        devices = [] if self._device.type == "cpu" else [self._device]
        self._root.train(training)
        try:
            with (
                contextlib.nullcontext() if self.experts is None else self.experts.routing.left_alone(),
                torch.random.fork_rng(devices, device_type=self._device.type),
                torch.compiler.set_stance("force_eager"),
            ):
                torch.manual_seed(0)
                return self._call(inputs)
        finally:
            self._root.train(was_training)

    def _tell(self, what: str, reason: str) -> None:
        if dist.get_rank() == 0:
            logger.warning("%s: %s because %s", self._name, what, reason)


class _Lookups(TorchFunctionMode):
    """Notes the rows that embeddings look up."""

    def __init__(self) -> None:
        super().__init__()
        self.indices: list[list[Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding:
            self.indices.append(args[0].tolist())
        return func(*args, **(kwargs or {}))


def _are_near(one: Tensor, other: Tensor) -> bool:
    """Whether two results are equal up to rounding. Entries that are NaN count as equal."""
    return not bool((one - other).abs().max() > _ROUNDING * one.abs().max())
