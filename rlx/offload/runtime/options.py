"""The options of activation offloading, and the one place that checks them. Imports no torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import InitVar, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from rlx.offload.storage.ranges import MIN_STAGING_BYTES, chunk_bytes, staging_bytes

logger = logging.getLogger("rlx.offload")


class SaveMode(NamedTuple):
    """The properties of a value of `save`."""

    recomputes: bool  # layers are recomputed
    copying_calls: (
        int  # a copy to the host may take so many layer calls; tensors offloaded at a layer's end need the next one's
    )


SAVE_MODES = {
    "boundary": SaveMode(True, 1),
    "attention": SaveMode(True, 1),
    "all": SaveMode(False, 2),
    "auto": SaveMode(True, 2),
}
DEFAULT_SAVE = {True: "boundary", False: "all"}  # what `save=None` means with and without recomputation
_COUNT = {"minimum": 0}
# The values of each option, in addition to its type. `words` are accepted instead of a number.
LIMITS: dict[str, dict[str, Any]] = {
    "save": {"choices": (None, *SAVE_MODES)},
    "tier": {"choices": ("cpu", "disk")},
    **dict.fromkeys(("prefetch_layers", "max_inflight_bytes", "min_bytes", "max_host_bytes"), _COUNT),
    "max_device_bytes": {**_COUNT, "words": ("auto",)},
}


class OptionFault(NamedTuple):
    """A combination of options that cannot work; options and values as the caller of `OffloadOptions.faults` writes them."""

    what: str  # the reason
    got: str
    expected: str
    remedy: str
    options: tuple[str, ...]  # that are involved; the first is the one to change

    def __str__(self) -> str:
        return f"{self.what}: got {self.got}, expected {self.expected}; {self.remedy}"


def folder_problem(directory: str | os.PathLike[str]) -> str | None:
    folder = Path(directory).expanduser()
    if folder.is_dir():
        return None if os.access(folder, os.W_OK | os.X_OK) else "is not writable"
    return "is not a folder" if folder.exists() else "does not exist"


def _assignment(option: str, value: Any) -> str:
    return f"{option}={value!r}"


@dataclass(frozen=True)
class OffloadOptions:
    """The options of one model or region: which tensors to offload, to which tier, and how to copy them.

    Args:
        save: `"boundary"`: the inputs of each layer; the rest is recomputed. `"attention"`: also the results of attention and its
            projections, which are then not recomputed. `"auto"`: a plan made from profiles decides what is kept on the device,
            offloaded or recomputed. `"all"`: every tensor that autograd saves. None: `"boundary"` or, without recomputation, `"all"`.
        tier: `"cpu"`, host memory, or `"disk"`, a file without a name in `directory`.
        directory: folder of that file; it must exist, be writable and have room on the machine that offloads. On the cpu
            tier it takes the bytes that exceed `max_host_bytes`, and has no effect if that is None.
        prefetch_layers: number of layers that backward fetches ahead. None: one, in boundary mode only once half of the
            current layer's saved tensors have been used; 0: each layer fetches its own tensors on demand.
        max_inflight_bytes: device bytes whose copy to the host may be unfinished before forward waits [bytes].
            None: the bytes of the current layer and, with `save="all"`, of the one before it.
        min_bytes: smaller tensors are not offloaded [bytes].
        pin_memory: page-locked host memory, without which copies do not overlap compute.
        use_streams: copy on separate streams instead of on the compute stream.
        max_host_bytes: hard cap of the host memory that this model or region takes, buffers for the disk included [bytes].
            Other tensors stay on the device, or go to disk if `directory` is set. None: no cap; disk buffers take 384 MiB.
        max_device_bytes: limit of the memory that `save="auto"` holds on the device at once during a step [bytes]. A layer's
            working set, head, loss, and what FSDP2 gathers and reduces layer by layer count; gradients do not, nor does memory
            that exists before the layers begin, such as weights and optimizer states. `"auto"`: 95 % of the device, less these
            two; without an accelerator only what does not raise the peak.
    """

    save: str | None = None
    tier: str = "cpu"
    directory: str | os.PathLike[str] | None = None
    prefetch_layers: int | None = None
    max_inflight_bytes: int | None = None
    min_bytes: int = 1 << 20
    pin_memory: bool = True
    use_streams: bool = True
    max_host_bytes: int | None = None
    max_device_bytes: int | str = "auto"
    cache_directory: InitVar[str | os.PathLike[str] | None] = None  # of older versions, which cached profiles

    def __post_init__(self, cache_directory: str | os.PathLike[str] | None) -> None:
        if cache_directory is not None:
            logger.warning("cache_directory has no effect: profiles are no longer cached; remove it")
        for option in fields(self):
            value, limits = getattr(self, option.name), LIMITS.get(option.name, {})
            if "choices" in limits:
                is_right, expected = value in limits["choices"], f"one of {limits['choices']}"
            elif isinstance(option.default, bool):
                is_right, expected = isinstance(value, bool), "True or False"
            elif "minimum" in limits:
                words = limits.get("words", () if option.default is not None else (None,))
                is_right = value in words or (type(value) is int and value >= limits["minimum"])
                expected = f"an integer >= {limits['minimum']}" + "".join(f" or {word!r}" for word in words)
            else:
                is_right = value is None or isinstance(value, (str, os.PathLike))
                expected = "the path of a folder or None"
            if not is_right:
                raise ValueError(f"OffloadOptions.{option.name}: got {value!r}, expected {expected}")
        if faults := self.faults():
            raise ValueError("\n".join(f"OffloadOptions: {fault}" for fault in faults))

    @classmethod
    def unchecked(cls, **values: Any) -> OffloadOptions:
        """Return options without checking them. `values` has every option, of the right type; the caller checks `faults`."""
        options = object.__new__(cls)
        vars(options).update(values)
        return options

    @property
    def uses_disk(self) -> bool:
        return self.tier == "disk" or (self.directory is not None and self.max_host_bytes is not None)

    @property
    def staging_chunk_bytes(self) -> int:
        """Size of each buffer between device and disk; on the cpu tier all of them take at most a quarter of the cap."""
        return chunk_bytes(None if self.max_host_bytes is None else self.max_host_bytes // self._staging_divisor)

    @property
    def _staging_divisor(self) -> int:
        return 1 if self.tier == "disk" else 4

    @property
    def host_bytes(self) -> int | None:
        """Limit of offloaded bytes in host memory, without buffers for the disk; None: no limit."""
        if self.tier == "disk":
            return 0
        if self.max_host_bytes is None or not self.uses_disk:
            return self.max_host_bytes
        return self.max_host_bytes - staging_bytes(self.staging_chunk_bytes)

    def resolve_save(self, enable_ckpt: bool) -> str:
        if faults := self.faults(enable_ckpt):
            raise ValueError(str(faults[0]))
        return self.save or DEFAULT_SAVE[enable_ckpt]

    def faults(
        self,
        enable_ckpt: bool | None = None,
        checks_folder: bool = False,
        assignment: Callable[[str, Any], str] = _assignment,
    ) -> list[OptionFault]:
        """Return every combination of these options, and of `enable_ckpt` if that is known, that cannot work.

        `checks_folder`: also if this machine cannot write to `directory`. `assignment` formats an option as the user writes it.
        """
        found = []
        mode = SAVE_MODES.get(self.save or "")
        if mode is not None and enable_ckpt is not None and mode.recomputes != enable_ckpt:
            found.append(
                OptionFault(
                    "boundary, attention and auto recompute layers, all recomputes nothing",
                    f"{assignment('save', self.save)}, {assignment('enable_ckpt', enable_ckpt)}",
                    "both to agree",
                    f"set {assignment('enable_ckpt', not enable_ckpt)}, or {assignment('save', DEFAULT_SAVE[enable_ckpt])}",
                    ("save", "enable_ckpt"),
                )
            )
        problem = folder_problem(self.directory) if checks_folder and self.directory is not None else None
        if self.uses_disk and (self.directory is None or problem is not None):
            folder = assignment("directory", self.directory)
            to_host = assignment("tier", "cpu")
            to_device = f"{assignment('directory', None)} to keep the rest on the device"
            found.append(
                OptionFault(
                    "activations that go to disk have no usable folder",
                    f"{folder}, which {problem}" if problem else folder,
                    "a writable folder that exists",
                    f"make a folder and set {assignment('directory', '/fast/disk')}, or {to_host if self.tier == 'disk' else to_device}",
                    ("directory", "tier", "max_host_bytes"),
                )
            )
        if self.uses_disk and self.staging_chunk_bytes == 0:
            found.append(
                OptionFault(
                    "too little host memory for the buffers between device and disk",
                    assignment("max_host_bytes", self.max_host_bytes),
                    f"at least {self._staging_divisor * MIN_STAGING_BYTES} bytes",
                    f"set {assignment('max_host_bytes', 1 << 30)}, say, or {assignment('max_host_bytes', None)}",
                    ("max_host_bytes", "tier", "directory"),
                )
            )
        return found

    def log_without_effect(self, on_accelerator: bool) -> None:
        """Log in one line the options that differ from their default and have no effect on this machine."""
        unread = [name for each in UNREAD_OPTIONS if each.when(self, on_accelerator) for name in each.options]
        if names := [name for name in unread if getattr(self, name) != getattr(OffloadOptions, name)]:
            where = "" if on_accelerator else " (no accelerator: copies are synchronous)"
            logger.warning("activation offloading: without effect here: %s%s", ", ".join(names), where)


def options_of(given: object) -> OffloadOptions:
    if not isinstance(given, OffloadOptions | None):
        raise TypeError(
            f"options: got {given!r}, expected None or OffloadOptions, as in options=OffloadOptions(save=...)"
        )
    return given or OffloadOptions()


class UnreadOptions(NamedTuple):
    """Options that nothing reads when `when(options, on_accelerator)` holds."""

    options: tuple[str, ...]
    when: Callable[[OffloadOptions, bool], bool]
    why: str


UNREAD_OPTIONS = (
    UnreadOptions(
        ("directory",),
        lambda options, _: not options.uses_disk,
        "tier is cpu, and without max_host_bytes nothing exceeds it",
    ),
    UnreadOptions(("max_device_bytes",), lambda options, _: options.save != "auto", "save is not auto"),
    UnreadOptions(
        ("pin_memory", "use_streams", "max_inflight_bytes"),
        lambda _, on_accelerator: not on_accelerator,
        "copies are synchronous",
    ),
)
