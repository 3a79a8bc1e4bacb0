"""The training engine of every role: one FSDP-sharded model, with an optimizer or without.

Shape letters as in `rlx/data/batch.py`: B rows, R response tokens.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlx.config.schema import FSDPConfig, ModelConfig, OptimConfig
from rlx.data.batch import SAMPLE_TOKENS, SEQUENCE, Batch
from rlx.engine.build import build_model, require_finite, stream_frozen
from rlx.engine.experts import ExpertOptions
from rlx.engine.forward import Distribution, Forward, sequence_scores
from rlx.engine.memory import Memory
from rlx.engine.micro_batches import MicroBatch, MicroBatcher, MicroBatchRule, SequenceGroup, shifted, token_counts
from rlx.engine.objectives import Objective, Totals, over_processes, totals_of
from rlx.engine.optimizer import UpdateProbe, update_metrics
from rlx.engine.optimizer_state import Stepper
from rlx.engine.saving import CheckpointWriter
from rlx.engine.sharding import precision_of, shard
from rlx.engine.weights import Weights
from rlx.models.exact import Kernels, use_kernels
from rlx.models.hf_folder import FolderParts
from rlx.models.loading import Head, load_config
from rlx.models.lora import require_called_adapters
from rlx.models.packed_attention import packed_attention
from rlx.models.prefix_tree import NEVER
from rlx.offload import OffloadOptions, enable_activation_offloading, host_arena, register_attention

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Metrics = dict[str, float]


class Found(NamedTuple):
    """What the forward of a micro-batch computed; see `MicroBatch`."""

    rows: list[int]
    lead: Tensor
    figures: dict[str, Tensor]


class Engine:
    """A model sharded over all processes, used for actor, critic, reference and reward model alike.

    torch.distributed must be initialised (gloo on CPU, nccl on CUDA), with any number of processes. All processes call each
    method together, each with its own share of the rows; shares may differ in size and be empty.

    Args:
        head: `lm` for log-probs, `value` for values, `score` for one score of the whole sequence.
        optim: None for a model that is never trained.
        total_steps: optimizer steps of the whole run, for the learning-rate schedule.
        tokenizer: saved with the weights in checkpoints.
        seed: of a fresh value head and adapters.
        name: of the role, in messages and accounts of host memory.
        sequence_parallel: number of neighbouring processes that share each sequence and get the same rows.
        kernels: of the sampler, which forward then uses, see `rlx.models.exact`.

    The configuration was checked before. Raises ValueError if the model does not fit it.
    """

    def __init__(
        self,
        model: ModelConfig,
        fsdp: FSDPConfig,
        *,
        strategy: str,
        device: torch.device,
        head: Head = "lm",
        optim: OptimConfig | None = None,
        total_steps: int = 1,
        grad_clip: float = 1.0,
        compile_layers: bool = False,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        seed: int = 0,
        name: str = "model",
        sequence_parallel: int = 1,
        experts: ExpertOptions | None = None,
        kernels: Kernels | None = None,
    ):
        precision = precision_of(fsdp, device)
        plain, layers, adapters = build_model(model, head, precision.stored, seed, optim is not None, device)
        folder_parts = FolderParts.of(plain, head, tokenizer, load_config(model).dtype, model.trust_remote_code)
        if kernels is not None:
            use_kernels(plain, kernels)
        for layer in layers if compile_layers else ():
            layer.compile()
        streaming, streamed = None, frozenset[torch.nn.Parameter]()
        if model.layer_offload and (optim is None or adapters):
            streaming = stream_frozen(plain, layers, precision.compute, device, model.layer_offload_directory)
            streamed = streaming.parameters
        self.device = device
        self.sharded = shard(plain, strategy, fsdp, precision, device, streamed)
        self.root = self.sharded.root
        require_finite(f"model.path={model.path}", self.root.named_parameters())
        sequences = SequenceGroup(sequence_parallel, plain.config.get_text_config()) if sequence_parallel > 1 else None
        attention = model.attn_implementation if model.use_remove_padding and head != "score" else None
        self._forward = Forward(self.root, plain, device, attention, sequences and sequences.processes)
        activations = None
        if model.enable_activation_offload:
            register_attention(packed_attention)
            options = OffloadOptions(**vars(model.activation_offload))
            activations = enable_activation_offloading(self.root, model.enable_gradient_checkpointing, options, layers)
        # The arena of offloaded activations, if there are any. It is pinned unless its owner disables that.
        pinned = model.activation_offload.pin_memory or not model.enable_activation_offload
        arena = host_arena(pinned=pinned and device.type != "cpu")
        writer = CheckpointWriter(arena, name, device)
        self.stepper = None
        if optim is not None:
            place_of_state = fsdp.device_state_bytes, arena, name
            self.stepper = Stepper(self.sharded, optim, total_steps, grad_clip, *place_of_state, writer.before_step)
        self.memory = Memory(self.sharded, self.stepper, streaming, activations, fsdp.param_offload, arena, name)
        of_model = adapters, model, precision.stored, folder_parts
        self.weights = Weights(self.sharded, self.memory, self.stepper, *of_model, writer)
        if head != "score":
            # Run the model on a few tokens, to reject one that the engine would get wrong.
            self._forward.require_causal()
            self._forward.find_experts(experts)
            if adapters:
                require_called_adapters(plain, self._forward.try_training)
            if sequence_parallel > 1:
                self._forward.require_packing(sequence_parallel)
        # Asked only if configured, because `shares_prefixes` warns of models that cannot.
        shares = kernels is None and model.least_gain < NEVER and self._forward.shares_prefixes
        gain = model.least_gain if shares else NEVER
        self.batcher = MicroBatcher(self._forward.packs, gain, sequences, device)
        self.sharded.reshard()

    def log_probs(
        self, batch: Batch, micro: MicroBatchRule, temperature: float, with_entropy: bool = True
    ) -> dict[str, Tensor]:
        """Return the log-probs of the response tokens, and the entropies of the distributions they were drawn from.

        Reads input_ids, attention_mask, response_mask, and routed_experts if the rows have them. Returns log_probs and, if asked for,
        entropy and differing_experts*: (B, R) on CPU, 0 on padding; fp32 or the engine's fp64.
        """
        return self._per_token(batch, micro, Distribution(temperature, with_entropy))

    def values(self, batch: Batch, micro: MicroBatchRule) -> Tensor:
        """Return the values of the states in which the response tokens are chosen, in the form of log_probs."""
        return self._per_token(batch, micro, None)["values"]

    @torch.no_grad()
    def scores(self, batch: Batch, micro: MicroBatchRule) -> Tensor:
        """Return the scores (B,) of whole sequences, prompt and response, on CPU in fp32 or wider. Needs head `score`."""
        self.memory.to_device(optimizer=False)
        self.root.eval()
        pad, found_B = self.weights.folder_parts.config.get_text_config().pad_token_id, torch.zeros(len(batch))
        for part in self.batcher.micro_batches(batch.select(*SEQUENCE), micro):
            scores = sequence_scores(self.root, part.batch["input_ids"], part.batch["attention_mask"], pad).cpu()
            found_B = found_B.to(scores.dtype)
            if part.rows:
                found_B[part.rows] = scores
        self.sharded.reshard()
        return found_B

    @torch.no_grad()
    def _per_token(self, batch: Batch, micro: MicroBatchRule, distribution: Distribution | None) -> dict[str, Tensor]:
        self.memory.to_device(optimizer=False)
        self.root.eval()
        sequences = batch.select(*self._forward.columns(batch))
        found = []
        for part in self.batcher.micro_batches(sequences, micro):
            # The host does not wait for the figures, so the next micro-batch's kernels are queued meanwhile.
            figures = {name: x.to("cpu", non_blocking=True) for name, x in self._forward(part, distribution).items()}
            found.append(Found(part.rows, part.lead, figures))
        self.sharded.reshard()
        return self._columns(found, batch)

    def _columns(self, found: list[Found], batch: Batch) -> dict[str, Tensor]:
        """Return the figures of all micro-batches of a batch as columns on CPU, 0 on padding."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        columns: dict[str, Tensor] = {}
        padding_BR = ~batch["attention_mask"][:, -batch.response_length :]
        for rows, lead, figures in found:
            for name, x in figures.items():
                column = columns.setdefault(name, torch.zeros(padding_BR.shape, dtype=x.dtype))
                if rows:
                    own = shifted(x.cpu(), lead, batch.response_length)
                    column[rows] = own.masked_fill(padding_BR[rows], 0)
        return columns

    def differs_in_training(self) -> bool:
        """Return whether the model computes other numbers in an update than in `log_probs`, as with dropout."""
        self.memory.to_device(optimizer=False)
        differs = self._forward.differs_in_training()
        self.sharded.reshard()
        return differs

    def update(self, batch: Batch, micro: MicroBatchRule, objective: Objective) -> Metrics:
        """Take one optimizer step over one mini-batch (`batch` is this process's share) to minimise the objective.

        The result does not depend on the division into micro-batches or processes, except for rounding. If the gradient's norm
        is not finite, all processes skip the step; it still counts for the schedule.

        Returns metrics of the whole mini-batch: loss, grad_norm (before clipping), lr (of this step), skipped (0 or 1),
        update_share and update_length (see `update_metrics`), tokens_saved (the share of tokens that shared prompts save, if
        the model can share them), and the objective's metrics.
        """
        return self._update(batch, micro, objective)[0]

    def update_and_read(
        self, batch: Batch, micro: MicroBatchRule, objective: Objective
    ) -> tuple[Metrics, dict[str, Tensor]]:
        """Do the same, and return also what the forwards computed with the weights before the step, in the form of log_probs."""
        metrics, found = self._update(batch, micro, objective)
        return metrics, self._columns(found, batch)

    def _update(self, batch: Batch, micro: MicroBatchRule, objective: Objective) -> tuple[Metrics, list[Found]]:
        assert self.stepper is not None, "an engine without optimizer cannot be updated"
        self.memory.prepare_update()
        self.root.train()
        batch = batch.select(*SEQUENCE, *objective.columns, *([SAMPLE_TOKENS] if SAMPLE_TOKENS in batch else []))
        totals = totals_of(batch, objective, self.batcher.copies, self.device)
        parts = list(self.batcher.micro_batches(batch, micro))
        self.memory.agree()
        with self._forward.balancing(parts, objective.distribution):
            sums, maxima, found = self._passes(parts, objective, totals)
        counts = token_counts(batch, parts) if self.batcher.shares_prompts else {}
        sums |= {name: torch.tensor(count, device=self.device) for name, count in counts.items()}
        sums = {name: figure / self.batcher.copies for name, figure in sums.items()}
        probe = UpdateProbe(self.stepper.parameters)
        # Reading metrics waits for the device, so the step's kernels are queued before.
        of_step = self.stepper.step()
        metrics = over_processes(sums, dist.ReduceOp.SUM) | over_processes(maxima, dist.ReduceOp.MAX)
        moved = over_processes(probe.sums(self.device), dist.ReduceOp.SUM)
        if counts:
            metrics["tokens_saved"] = 1 - metrics.pop("tokens_computed") / max(1.0, metrics.pop("tokens"))
        return metrics | of_step | update_metrics(moved), found

    def _passes(
        self, parts: list[MicroBatch], objective: Objective, totals: Totals
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Found]]:
        """Run forward and backward of the micro-batches.

        Return this process's metrics, those to sum and those to take maxima of, and the forwards' figures.
        """
        found: list[Found] = []
        sums: dict[str, Tensor] = {}
        maxima: dict[str, Tensor] = {}
        for number, part in enumerate(parts, start=1):
            with self.sharded.accumulating(last=number == len(parts)):
                figures = self._forward(part, objective.distribution)
                found.append(Found(part.rows, part.lead, {name: x.detach() for name, x in figures.items()}))
                share = objective.share(figures, part.batch, totals)
                share = share.plus("router_aux_loss", *self._forward.balance())
                # FSDP averages gradients over the processes, but the loss needs their sum.
                (share.loss * dist.get_world_size()).backward()
            for name, figure in {**share.metrics, "loss": share.loss.detach()}.items():
                sums[name] = sums.get(name, 0.0) + figure.double()
            for name, figure in share.maxima.items():
                maxima[name] = torch.maximum(maxima.get(name, figure), figure)
        return sums, maxima, found
