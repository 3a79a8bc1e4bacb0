"""The columns of the table: ways in which rlx runs a model."""

from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.sweep.replay import replay_error
from benchmarks.sweep.samplers import hf_error, vllm_error
from benchmarks.sweep.trainer import TinyModel, saved_error, update_error
from rlx.config.schema import ActivationOffloadConfig


class Feature(NamedTuple):
    """A column of the table.

    Args:
        check: returns an error, None if the model has nothing to compare, and a note.
        processes: of the group in which it runs.
        fresh: whether these start anew, without what others have imported.
    """

    check: Callable[[TinyModel], tuple[float | None, str]]
    processes: int = 1
    fresh: bool = False


def _offloaded(**options: Any) -> Callable[[TinyModel], tuple[float, str]]:
    def check(made: TinyModel) -> tuple[float, str]:
        with TemporaryDirectory() as folder:
            chosen = {name: folder if name == "directory" else value for name, value in options.items()}
            save = options.get("save")
            return update_error(
                made,
                figures=False,
                enable_gradient_checkpointing=save != "all",
                enable_activation_offload=True,
                activation_offload=ActivationOffloadConfig(min_bytes=0, **chosen),
            )

    return check


def _trained(**options: Any) -> Callable[[TinyModel], tuple[float, str]]:
    return lambda made: update_error(made, **options)


DISK = {"tier": "disk", "directory": ""}
FEATURES = {
    "packed": Feature(_trained()),
    "padded": Feature(_trained(use_remove_padding=False)),
    "value": Feature(_trained(head="value")),
    "recomputed": Feature(_trained(figures=False, enable_gradient_checkpointing=True)),
    "tiled": Feature(_trained(tiled_mlp=4)),
    "boundary": Feature(_offloaded(save="boundary")),
    "attention": Feature(_offloaded(save="attention")),
    "auto": Feature(_offloaded(save="auto")),
    "all": Feature(_offloaded(save="all")),
    "disk": Feature(_offloaded(save="boundary", **DISK)),
    "all, disk": Feature(_offloaded(save="all", **DISK)),
    "lora": Feature(_trained(lora_rank=4)),
    "replay": Feature(replay_error),
    "saved": Feature(saved_error),
    "hf sampler": Feature(hf_error),
    "vllm sampler": Feature(vllm_error, fresh=True),
    "fsdp2": Feature(_trained(), processes=2),
    "fsdp1": Feature(_trained(strategy="fsdp"), processes=2),
    "ulysses": Feature(_trained(together=2), processes=2),
}
