"""Compare rlx's engine with a reference: one function for each kind of check, run in each process of a group."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.sweep.reference import (
    GRAD_CLIP,
    OPTIM,
    PROMPTS,
    TEMPERATURE,
    Expected,
    expected,
    figures_of,
    largest_difference,
    lora_change,
    policy_objective,
    step_of,
    sweep_batch,
    value_objective,
)
from rlx.config.schema import FSDPConfig, MixedPrecisionConfig, ModelConfig
from rlx.data.batch import Batch
from rlx.engine.engine import Engine
from rlx.engine.experts import ExpertOptions
from rlx.engine.fsdp_units import whole
from rlx.engine.micro_batches import MicroBatchRule
from rlx.engine.objectives import PolicyObjective, ValueObjective
from rlx.models.loading import Head, load_model
from rlx.models.preflight import faults_of
from rlx.rollout.protocol import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MICRO = MicroBatchRule(rows=3)
UNTOUCHED = {"enable_gradient_checkpointing": False}


class Refused(Exception):
    """rlx refuses the model with this feature before anything starts; the message is rlx's own."""


@dataclass(frozen=True)
class TinyModel:
    """A tiny model in a folder.

    Args:
        folder: of the model.
        dtype: in which the model runs: fp64, or fp32 if it cannot.
        attention: its kernel: sdpa, or eager if rlx refuses sdpa.
    """

    folder: Path
    dtype: torch.dtype
    attention: str

    @cached_property
    def batch(self) -> Batch:
        """The rows of the sweep."""
        return sweep_batch(self.model("lm").config.get_text_config().vocab_size)

    @cached_property
    def policy(self) -> Expected:
        """Figures and gradients of the policy."""
        return expected(self.model("lm"), self.batch, policy_objective())

    @cached_property
    def value(self) -> Expected:
        """Figures and gradients of the value model."""
        return expected(self.model("value"), self.batch, value_objective())

    def model(self, head: Head, folder: Path | None = None) -> "PreTrainedModel":
        """Return the plain model; eager attention is the one that applies every argument."""
        config = ModelConfig(path=str(folder or self.folder), attn_implementation="eager")
        return load_model(config, head, self.dtype)


@contextmanager
def refusals() -> Iterator[None]:
    """Turn errors with which rlx refuses a configuration into Refused."""
    try:
        yield
    except (ValueError, EngineError) as error:
        raise Refused(str(error)) from error


def engine(
    made: TinyModel,
    head: Head = "lm",
    strategy: str = "fsdp2",
    together: int = 1,
    experts: ExpertOptions | None = None,
    **changes: Any,
) -> Engine:
    """Return an engine for a tiny model, after the checks that come before workers start.

    Raises:
        Refused: as the message says.
    """
    model = ModelConfig(path=str(made.folder), attn_implementation=made.attention, **{**UNTOUCHED, **changes})
    name = "fp64" if made.dtype == torch.float64 else "fp32"
    fsdp = FSDPConfig(model_dtype=name, mixed_precision=MixedPrecisionConfig(reduce_dtype=name))
    if faults := faults_of(model, head, (together,), dist.get_world_size()):
        raise Refused("; ".join(faults))
    with refusals():
        return Engine(
            model,
            fsdp,
            strategy=strategy,
            device=torch.device("cpu"),
            head=head,
            optim=OPTIM,
            total_steps=10,
            grad_clip=GRAD_CLIP,
            sequence_parallel=together,
            experts=experts,
        )


def own_share(batch: Batch, together: int) -> range:
    """Return this process's rows."""
    shares, number = dist.get_world_size() // together, dist.get_rank() // together
    return range(number * len(PROMPTS) // shares, (number + 1) * len(PROMPTS) // shares)


def update_error(made: TinyModel, head: Head = "lm", figures: bool = True, **options: Any) -> tuple[float, str]:
    """Return the largest error of figures and updated weights of an engine, and a note."""
    trained, rows = engine(made, head, **options), own_share(made.batch, options.get("together", 1))
    if head == "lm":
        return compared(trained, made.batch, made.policy, policy_objective(), rows, figures)
    return compared(trained, made.batch, made.value, value_objective(), rows, figures)


def compared(
    trained: Engine,
    batch: Batch,
    wanted: Expected,
    objective: PolicyObjective | ValueObjective,
    rows: range = range(len(PROMPTS)),
    figures: bool = True,
) -> tuple[float, str]:
    """Return the largest error of an engine's figures and of its weights after an update, and a note.

    Args:
        batch: of all processes.
        rows: those of this process.
        figures: whether to compare figures.
    """
    own, errors = batch.rows(rows), [0.0]
    if figures:
        is_policy = objective.distribution is not None
        found = trained.log_probs(own, MICRO, TEMPERATURE) if is_policy else {"values": trained.values(own, MICRO)}
        errors += [float((found[name] - x[rows.start : rows.stop]).abs().max()) for name, x in wanted.figures.items()]
    before = {name: x.clone() for name, x in trained.weights.full()}
    adapters = {}
    if trained.weights.adapted:
        for name, adapter in trained.weights.adapted.items():
            a = trained.root.get_submodule(name).lora_A.default.weight
            adapters[f"{name}.weight"] = (full(a), adapter.scale, adapter.transposed)
    trained.update(own, MICRO, objective)
    changes = {name: x - before[name] for name, x in trained.weights.full()}
    errors.append(largest_difference(changes, wanted_changes(wanted, adapters)))
    note = "" if trained._forward.packs or not trained.weights.model.use_remove_padding else "padded"
    return float(torch.tensor(errors).max()), note


def full(parameter: Tensor) -> Tensor:
    """Return a copy of a parameter that FSDP2 may have sharded."""
    return whole(parameter) if isinstance(parameter, DTensor) else parameter.detach().clone()


def wanted_changes(wanted: Expected, adapters: Mapping[str, tuple[Tensor, float, bool]]) -> dict[str, Tensor]:
    """Return the change of each weight in one step; with adapters only those of adapted weights are not 0."""
    if not adapters:
        return {name: step_of(gradient) for name, gradient in wanted.gradients.items()}
    return {
        name: lora_change(gradient, *adapters[name]) if name in adapters else torch.zeros_like(gradient)
        for name, gradient in wanted.gradients.items()
    }


def saved_error(made: TinyModel) -> tuple[float, str]:
    """Return how much log-probs differ after an update: of a checkpoint that another engine loads, and of exported weights."""
    trained = engine(made)
    trained.update(made.batch, MICRO, policy_objective())
    now = trained.log_probs(made.batch, MICRO, TEMPERATURE)
    with TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        trained.weights.save(checkpoint, ("model", "optimizer", "extra", "hf_model"))
        loaded = engine(made)
        loaded.weights.load(checkpoint)
        again = loaded.log_probs(made.batch, MICRO, TEMPERATURE)
        with torch.no_grad():
            exported = figures_of(made.model("lm", checkpoint / "hf_model"), made.batch)
    return float(
        torch.stack([(other[name] - x).abs().max() for other in (again, exported) for name, x in now.items()]).max()
    ), ""
