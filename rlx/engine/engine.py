"""The training engine of every role: one FSDP-sharded model, with an optimizer or without.

Shape letters as in `rlx/data/batch.py`: B rows, R response tokens.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from rlx.checkpoint.manifest import CheckpointError
from rlx.checkpoint.role import Description, write_extra_files
from rlx.config.schema import FSDPConfig, ModelConfig, OptimConfig
from rlx.data.batch import SAMPLE_TOKENS, SEQUENCE, Batch
from rlx.engine import optimizer as adamw
from rlx.engine.build import build_model, require_finite
from rlx.engine.experts import ExpertOptions
from rlx.engine.forward import Distribution, Forward, Head, sequence_scores
from rlx.engine.fsdp_units import local
from rlx.engine.host_offload import TensorOffload
from rlx.engine.micro_batches import MicroBatch, MicroBatcher, MicroBatchRule, SequenceGroup, shifted, token_counts
from rlx.engine.objectives import Objective, Totals, over_processes, totals_of
from rlx.engine.optimizer_state import OptimizerStateOnHost
from rlx.engine.saving import CheckpointWriter, parts_of, read
from rlx.engine.sharded import precision_of
from rlx.engine.sharding import shard, stream_frozen
from rlx.models.hf_folder import FolderParts
from rlx.models.loading import ModelError, load_config
from rlx.models.lora import adapter_weights, base_weights, merged_weights, refuse_idle_adapters
from rlx.models.packed_attention import packed_attention
from rlx.models.prefix_tree import NEVER
from rlx.offload import OffloadOptions, OffloadStats, enable_activation_offloading, host_arena, register_attention
from rlx.offload.streaming.nf4 import in_full

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Metrics = dict[str, float]


class Engine:
    """A model sharded over all processes, used for actor, critic and reference alike.

    torch.distributed must be initialised (gloo on CPU, nccl on CUDA), with any number of processes. All processes call each
    method together, each with its own share of the rows; shares may differ in size and be empty.

    Args:
        model: the weights to load and how to run them.
        fsdp: sharding and precision.
        strategy: `fsdp2` or `fsdp`.
        device: of this process.
        head: `lm` for log-probs, `value` for values, `score` for one score of the whole sequence.
        optim: None for a model that is never trained.
        total_steps: optimizer steps of the whole run, for the learning-rate schedule.
        grad_clip: largest gradient norm.
        compile_layers: compile each transformer layer.
        tokenizer: saved with the weights in checkpoints.
        seed: of a fresh value head.
        name: of the role, in messages and accounts of host memory.
        sequence_parallel: number of neighbouring processes that share each sequence and get the same rows.
        experts: what to do with the experts of a mixture of experts; None: nothing.

    Raises:
        ValueError: the options do not fit together, or do not fit the model or the number of processes.
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
    ):
        self.model_config, self.fsdp, self.device, self.head = model, fsdp, device, head
        self.optim, self.total_steps, self.grad_clip = optim, total_steps, grad_clip
        precision = precision_of(fsdp, device)
        self._stored = precision.stored
        plain, layers, self.adapters = build_model(model, head, precision.stored, seed, optim is not None, device)
        self.folder_parts = FolderParts.of(plain, head, tokenizer, load_config(model).dtype)
        for layer in layers if compile_layers else ():
            layer.compile()
        streams = model.layer_offload and (optim is None or self.adapters)
        weights_in = model.layer_offload_directory
        self.streaming = stream_frozen(plain, layers, strategy, precision, device, weights_in) if streams else None
        self.sharded = shard(plain, strategy, fsdp, precision, device, self.streaming)
        self.root = self.sharded.root
        require_finite(f"model.path={model.path}", self.root.named_parameters())
        sequences = SequenceGroup(sequence_parallel, plain.config.get_text_config()) if sequence_parallel > 1 else None
        attention = model.attn_implementation if model.use_remove_padding and head != "score" else None
        self._forward = Forward(self.root, plain, device, attention, sequences and sequences.processes)
        self.offload, self._reported = None, OffloadStats()
        if model.enable_activation_offload:
            register_attention(packed_attention)
            options = OffloadOptions(**vars(model.activation_offload))
            self.offload = enable_activation_offloading(self.root, model.enable_gradient_checkpointing, options, layers)
        self.optimizer = None if optim is None else adamw.build_optimizer(self.root.parameters(), optim)
        self.updates = self.steps = 0
        self._prepare_memory(name)
        if head != "score":
            self._try_model(plain, experts, sequence_parallel)
        # `shares_prefixes` warns of a model that cannot, which is no fault if nobody asked for it.
        gain = model.least_gain if model.least_gain < NEVER and self._forward.shares_prefixes else NEVER
        self.batcher = MicroBatcher(self._forward.packs, gain, sequences, device)
        self.sharded.reshard()

    def _prepare_memory(self, name: str) -> None:
        """Prepare the moves of parameters and states, and the saves."""
        model, fsdp, device = self.model_config, self.fsdp, self.device
        # The arena of offloaded activations, if there are any. It is pinned unless its owner disables that.
        pinned = model.activation_offload.pin_memory or not model.enable_activation_offload
        arena = host_arena(pinned=pinned and device.type != "cpu")
        self._offloaded_parameters = TensorOffload(arena, f"{name}_parameters")
        self.checkpoint_writer = CheckpointWriter(arena, name, device)
        self._state_on_host = None
        if self.optimizer is not None and fsdp.device_state_bytes < math.inf:
            account, stays = f"{name}_optimizer_state", fsdp.device_state_bytes
            self._state_on_host = OptimizerStateOnHost(self.optimizer, arena, account, device, device_bytes=stays)

    def _try_model(self, plain: "PreTrainedModel", experts: ExpertOptions | None, sequence_parallel: int) -> None:
        """Run the model on a few tokens, to refuse one that the engine would get wrong."""
        self._forward.require_causal()
        self._forward.find_experts(experts)
        if self.adapters:
            refuse_idle_adapters(plain, self._forward.try_training)
        if sequence_parallel > 1:
            self._forward.require_packing(sequence_parallel)

    # Outputs of the model -----------------------------------------------------------------------------------------

    def log_probs(
        self, batch: Batch, micro: MicroBatchRule, temperature: float, with_entropy: bool = True
    ) -> dict[str, Tensor]:
        """Return the log-probs of the response tokens, and the entropies of the distributions they were drawn from.

        Args:
            batch: this process's rows; reads input_ids, attention_mask, response_mask, and routed_experts if it has them.
            micro: size of a forward.
            temperature: of the distribution.
            with_entropy: whether to compute the entropies.

        Returns:
            log_probs and, if asked for, entropy and differing_experts*: (B, R) on CPU, 0 on padding; fp32 or the engine's fp64.
        """
        return self._per_token(batch, micro, Distribution(temperature, with_entropy))

    def values(self, batch: Batch, micro: MicroBatchRule) -> Tensor:
        """Return the values of the states in which the response tokens are chosen, in the form of log_probs."""
        return self._per_token(batch, micro, None)["values"]

    @torch.no_grad()
    def scores(self, batch: Batch, micro: MicroBatchRule) -> Tensor:
        """Return the scores (B,) of whole sequences, prompt and response, on CPU in fp32 or wider. Needs head `score`.

        Args:
            batch: this process's rows; reads input_ids, attention_mask, response_mask.
            micro: size of a forward.
        """
        self.to_device(optimizer=False)
        self.root.eval()
        pad, found_B = self.folder_parts.config.get_text_config().pad_token_id, torch.zeros(len(batch))
        for part in self.batcher.micro_batches(batch.select(*SEQUENCE), micro):
            scores = sequence_scores(self.root, part.batch["input_ids"], part.batch["attention_mask"], pad).cpu()
            found_B = found_B.to(scores.dtype)
            if part.rows:
                found_B[part.rows] = scores
        self.sharded.reshard()
        return found_B

    @torch.no_grad()
    def _per_token(self, batch: Batch, micro: MicroBatchRule, distribution: Distribution | None) -> dict[str, Tensor]:
        self.to_device(optimizer=False)
        self.root.eval()
        sequences = batch.select(*self._forward.columns(batch))
        found = []
        for part in self.batcher.micro_batches(sequences, micro):
            # The host does not wait for the figures, so the next micro-batch's kernels are queued meanwhile.
            figures = {name: x.to("cpu", non_blocking=True) for name, x in self._forward(part, distribution).items()}
            found.append((part.rows, part.lead, figures))
        self.sharded.reshard()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        columns: dict[str, Tensor] = {}
        padding_BR = ~batch["attention_mask"][:, -batch.response_length :]
        for rows, lead, figures in found:
            for name, x in figures.items():
                column = columns.setdefault(name, torch.zeros(padding_BR.shape, dtype=x.dtype))
                if rows:
                    own = shifted(x, lead, batch.response_length)
                    column[rows] = own.masked_fill(padding_BR[rows], 0)
        return columns

    # Learning -----------------------------------------------------------------------------------------------------

    def update(self, batch: Batch, micro: MicroBatchRule, objective: Objective) -> Metrics:
        """Take one optimizer step over one mini-batch, of which `batch` is this process's share.

        The result does not depend on the division into micro-batches or processes, except for rounding. If the gradient's norm
        is not finite, all processes skip the step; it still counts for the schedule.

        Args:
            batch: this process's rows; reads input_ids, attention_mask, response_mask and the objective's columns.
            micro: size of a forward and backward.
            objective: the loss to minimise.

        Returns:
            Metrics of the whole mini-batch: loss, grad_norm (before clipping), lr (of this step), skipped (0 or 1),
            update_share and update_length (see `update_metrics`), tokens_saved (the share of tokens that shared prompts save, if
            the model can share them), and the objective's metrics.
        """
        assert self.optimizer is not None and self.optim is not None, "an engine without optimizer cannot be updated"
        self.to_device(optimizer=False)
        if self._state_on_host is not None:
            self._state_on_host.to_host()
        self.root.train()
        batch = batch.select(*SEQUENCE, *objective.columns, *([SAMPLE_TOKENS] if SAMPLE_TOKENS in batch else []))
        totals = totals_of(batch, objective, self.batcher.copies, self.device)
        parts = list(self.batcher.micro_batches(batch, micro))
        if self.offload is not None:
            self.offload.agree(reserve_bytes=self._missing_state_bytes(self.optimizer))
        with self._forward.balancing(parts, objective.distribution):
            sums, maxima = self._passes(parts, objective, totals)
        counts = token_counts(batch, parts) if self.batcher.shares_prompts else {}
        sums |= {name: torch.tensor(count, device=self.device) for name, count in counts.items()}
        sums = {name: figure / self.batcher.copies for name, figure in sums.items()}
        probe = adamw.UpdateProbe(p for group in self.optimizer.param_groups for p in group["params"])
        # Reading metrics waits for the device, so the step's kernels are queued before.
        of_step = self._step(self.optimizer, self.optim)
        metrics = over_processes(sums, dist.ReduceOp.SUM) | over_processes(maxima, dist.ReduceOp.MAX)
        moved = over_processes(probe.sums(self.device), dist.ReduceOp.SUM)
        if counts:
            metrics["tokens_saved"] = 1 - metrics.pop("tokens_computed") / max(1.0, metrics.pop("tokens"))
        return metrics | of_step | adamw.update_metrics(moved)

    def _passes(
        self, parts: list[MicroBatch], objective: Objective, totals: Totals
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Run forward and backward of the micro-batches; return this process's metrics: those to sum, those to take maxima of."""
        sums: dict[str, Tensor] = {}
        maxima: dict[str, Tensor] = {}
        for number, part in enumerate(parts, start=1):
            with self.sharded.accumulating(last=number == len(parts)):
                share = objective.share(self._forward(part, objective.distribution), part.batch, totals)
                share = share.plus("router_aux_loss", *self._forward.balance())
                # FSDP averages gradients over the processes, but the loss needs their sum.
                (share.loss * dist.get_world_size()).backward()
            for name, figure in {**share.metrics, "loss": share.loss.detach()}.items():
                sums[name] = sums.get(name, 0.0) + figure.double()
            for name, figure in share.maxima.items():
                maxima[name] = torch.maximum(maxima.get(name, figure), figure)
        return sums, maxima

    def _missing_state_bytes(self, optimizer: AdamW) -> int:
        """Return the bytes of state that the optimizer's first step will allocate on the device; 0 after that step."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self._state_on_host is not None:
            parameters = self._state_on_host.staying
        missing = (p for p in parameters if not optimizer.state.get(p))
        return sum(adamw.state_bytes(optimizer, p) for p in missing if local(p).device.type != "cpu")

    def _step(self, optimizer: AdamW, optim: OptimConfig) -> Metrics:
        lr = optim.lr * adamw.learning_rate_factor(self.updates, self.total_steps, optim)
        adamw.configure(optimizer, optim, lr)
        norm = adamw.clip_gradients(optimizer, self.grad_clip, self.sharded.replicas, self.device)
        if finite := math.isfinite(norm):
            self.checkpoint_writer.before_step()
            if self._state_on_host is None:
                adamw.step_in_parts(optimizer)
            else:
                self._state_on_host.step()
            self.steps += 1
        self.sharded.drop_gradients(optimizer)
        self.updates += 1
        return {"grad_norm": norm, "lr": lr, "skipped": float(not finite)}

    # Weights and checkpoints --------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight's name in the model's own state_dict and its full tensor on the device; a tied weight once.

        Adapters are merged in, quantised weights dequantised. All processes iterate to the end. The receiver may keep the tensors.
        """
        return self._gathered(merged_weights)

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the model with its adapters off, as `weights` does."""
        return self._gathered(base_weights)

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of the adapters alone, as `weights` does."""
        return self._gathered(adapter_weights)

    @torch.no_grad()
    def _gathered(self, chosen: Callable[..., Iterator[tuple[str, Tensor]]]) -> Iterator[tuple[str, Tensor]]:
        self.to_device(optimizer=False)
        in_type = in_full if self.model_config.quantization is not None else lambda tensor, dtype: tensor
        for unit in self.sharded.units:
            with self.sharded.gathering(unit) as gather:
                yield from chosen(unit.tensors(), self.adapters, lambda t, get=gather: in_type(get(t), self._stored))

    def save(self, folder: str | Path, contents: tuple[str, ...]) -> None:
        """Write a checkpoint, which replaces the folder when it is complete; see `begin_save`."""
        self.begin_save(folder, contents)
        self.checkpoint_writer.finish()

    def begin_save(self, folder: str | Path, contents: tuple[str, ...], in_background: bool = False) -> None:
        """Start to write a checkpoint to a folder that all processes share; it appears at the end of `saves.finish`.

        Args:
            contents: as CheckpointConfig.save_contents.
            in_background: return before the tensors are on the disk; the engine can be used meanwhile.
        """
        self.sharded.reshard()  # after an exception parameters may be left gathered
        if not (in_place := self.saves_in_place(contents)):
            self.to_device(optimizer=not self.sharded.state_dict_shares_storages)
        if self.streaming is not None:
            self.streaming.release()
        frozen = {p.untyped_storage() for p in (self.streaming.parameters if self.streaming else ())}
        own = self.updates, self.steps, self.adapters, self.model_config.quantization, self.model_config.path
        description = Description(self.head, tuple(contents), *own)
        parts = parts_of(description, self.sharded, self.optimizer)
        offloads = [self._offloaded_parameters, *(self._state_on_host.offloads if self._state_on_host else ())]
        partial = self.checkpoint_writer.begin(Path(folder), parts, offloads, in_background, frozen)
        streamed = self.weights() if "hf_model" in contents else ()
        weights = {name: tensor.cpu() for name, tensor in streamed if dist.get_rank() == 0}
        if dist.get_rank() == 0:
            extra = partial, description, self.folder_parts, weights, self.model_config.trust_remote_code
            self.checkpoint_writer.write_extra_files(lambda: write_extra_files(*extra))
        if not in_place:
            self.to_host(parameters=False)

    def saves_in_place(self, contents: tuple[str, ...]) -> bool:
        """Whether `begin_save` reads the state where it is and needs no device memory."""
        return self.sharded.state_dict_shares_storages and "hf_model" not in contents

    def load(self, folder: str | Path) -> None:
        """Continue from a checkpoint of any number of processes and either strategy. Raises CheckpointError if it cannot.

        Args:
            folder: as `save` wrote it; its digests are not checked.
        """
        self.checkpoint_writer.finish()
        self.sharded.reshard()
        on_host = self._state_on_host if self.sharded.state_dict_shares_storages else None
        self.to_device(optimizer=on_host is None)
        if self.streaming is not None:
            self.streaming.release()
        own = self.head, self.sharded, self.optimizer, self.adapters
        description = read(Path(folder), *own, *([on_host.replace] if on_host else []))
        try:
            require_finite(str(folder), self.root.named_parameters())
        except ModelError as error:
            raise CheckpointError(str(error)) from None
        self.updates, self.steps = description.updates, description.steps
        self.to_host(parameters=False)

    # Memory -------------------------------------------------------------------------------------------------------

    def to_host(self, parameters: bool = True) -> None:
        """Offload the tensors that fsdp.param_offload and fsdp.optimizer_state name to the arena of activations.

        Free device memory goes back to the system, so that a sampler with its own allocator can take it.

        Args:
            parameters: whether to offload parameters too.

        Raises:
            HandOverError: the host has no room.
        """
        self.sharded.reshard()
        if self.streaming is not None:
            self.streaming.release()
        if parameters and self.fsdp.param_offload and not self._offloaded_parameters.is_offloaded:
            here = (p for p in self.root.parameters() if local(p).device.type == self.device.type)
            self._offloaded_parameters.offload(here)
        if self._state_on_host is not None:
            self._state_on_host.to_host()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    def to_device(self, optimizer: bool = True) -> None:
        """Fetch all offloaded tensors from host memory. Every other method fetches the tensors it needs by itself.

        Args:
            optimizer: whether to fetch the optimizer's state too.

        Raises:
            HandOverError: the device has no room.
        """
        self._offloaded_parameters.fetch()
        if optimizer and self._state_on_host is not None:
            self._state_on_host.to_device()

    def offload_stats(self) -> Metrics:
        """Return the figures of activation offloading since the last call, named as in OffloadStats.

        held_bytes and reserved_bytes are the current ones. The result is empty without backward or offloading.
        """
        if self.offload is None or self.optimizer is None:
            return {}
        total = self.offload.stats()
        stats, self._reported = total.since(self._reported), total
        names = (*vars(stats), "copy_gb_per_s", "disk_gb_per_s", "overlap")
        return {name: float(getattr(stats, name)) for name in names if name != "layers"}
