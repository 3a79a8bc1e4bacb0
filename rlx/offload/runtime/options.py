"""What a user may choose about activation offloading."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from rlx.offload.storage.staging import MIN_STAGING_BYTES, chunk_bytes, staging_bytes

logger = logging.getLogger("rlx.offload")

_CHOICES = {"save": (None, "boundary", "attention", "all", "auto"), "tier": ("cpu", "disk")}
_KEPT = {
    "boundary": "the inputs of each layer",
    "attention": "the inputs of each layer and its attention",
    "auto": "what a plan says",
}
_SWITCHES = ("pin_memory", "use_streams")
_COUNTS = ("prefetch_layers", "max_inflight_bytes", "min_bytes", "max_host_bytes", "max_device_bytes")
_WORDS: dict[str, tuple[str, ...]] = {"min_bytes": (), "max_device_bytes": ("auto",)}  # in place of a count; else None


@dataclass(frozen=True)
class OffloadOptions:
    """What leaves the device until backward needs it, where it goes, and how it travels.

    Args:
        save: what is kept for backward outside the device: `"boundary"` (the inputs of each layer; the rest is
            recomputed), `"attention"` (also the results of attention and of its projections, which are not recomputed
            then), `"auto"` (planned from measurements: layers and operations of which results stay, leave or are
            recomputed) or `"all"` (every tensor that autograd saves). None: boundary with recomputation, all without.
        tier: `"cpu"`, host memory, or `"disk"`, a file without a name in `directory`.
        directory: folder of that file; it must exist, be writable and have room where the engine is switched on. On the
            cpu tier it takes what `max_host_bytes` leaves no room for, and has no effect without that.
        prefetch_layers: how many layers ahead backward fetches. None: one, in boundary mode only once half of the
            current layer's saved tensors are used up; 0: each layer fetches its own on demand.
        max_inflight_bytes: device bytes whose copy to the host may be unfinished before forward waits [bytes].
            None: what the current layer and, with `save="all"`, the one before it have sent off.
        min_bytes: smaller tensors stay on the device [bytes].
        pin_memory: page-locked host memory, without which copies do not overlap compute.
        use_streams: copy on streams of their own instead of on the compute stream.
        max_host_bytes: hard cap of the host memory that this use of the engine takes, buffers for the disk included
            [bytes]; what does not fit stays on the device, or goes to disk if a directory is given. None: no cap, and
            384 MiB of buffers for the disk.
        max_device_bytes: what `save="auto"` may hold on the device at once above what is there before the layers begin, the
            working set of the layer at work and what lies beside the layers included [bytes]. `"auto"`: what the device has
            beside weights, gradients, optimizer states and all else that is there before, but for 5 %; without an
            accelerator as little as possible.
        cache_directory: folder in which `save="auto"` keeps what it has measured, for later runs of the same layers: times
            and sizes of calls, with a description of layers, device and versions in words and digests; no weights, no data.
            It is made where it does not exist; one that cannot be used is said once and does no harm. `"auto"`:
            `rlx/measurements` in `$XDG_CACHE_HOME`, or in `~/.cache`. None: nothing is read or kept.

    Raises:
        ValueError: for a value out of range or not available in this version.
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
    cache_directory: str | os.PathLike[str] | None = "auto"

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"OffloadOptions.{name}: got {getattr(self, name)!r}, expected one of {allowed}")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"OffloadOptions.{name}: got {getattr(self, name)!r}, expected True or False")
        for name in _COUNTS:
            value, words = getattr(self, name), _WORDS.get(name, (None,))
            if value not in words and (type(value) is not int or value < 0):
                instead = "".join(f" or {word!r}" for word in words)
                raise ValueError(f"OffloadOptions.{name}: got {value!r}, expected an integer >= 0{instead}")
        self._check_disk()

    @property
    def measurements_folder(self) -> Path | None:
        """Where measurements are kept; None: nowhere."""
        if self.cache_directory is None:
            return None
        if self.cache_directory != "auto":
            return Path(self.cache_directory).expanduser()
        named = os.environ.get("XDG_CACHE_HOME", "")
        # The XDG base directory specification says that relative paths there are to be ignored.
        base = Path(named) if os.path.isabs(named) else Path("~/.cache").expanduser()
        return base / "rlx" / "measurements"

    @property
    def uses_disk(self) -> bool:
        """Whether bytes may go to disk."""
        return self.tier == "disk" or (self.directory is not None and self.max_host_bytes is not None)

    @property
    def staging_chunk_bytes(self) -> int:
        """Size of each buffer between device and disk; on the cpu tier all together take at most a quarter of the cap."""
        share = 1 if self.tier == "disk" else 4
        return chunk_bytes(None if self.max_host_bytes is None else self.max_host_bytes // share)

    @property
    def host_bytes(self) -> int | None:
        """What may wait in host memory, buffers for the disk aside; None: no limit."""
        if self.tier == "disk":
            return 0
        if self.max_host_bytes is None or not self.uses_disk:
            return self.max_host_bytes
        return self.max_host_bytes - staging_bytes(self.staging_chunk_bytes)

    def resolve_save(self, enable_ckpt: bool) -> str:
        """What is kept, given whether layers are recomputed.

        Raises:
            ValueError: where `save` and `enable_ckpt` contradict each other.
        """
        save = self.save or ("boundary" if enable_ckpt else "all")
        if save == "all" and enable_ckpt:
            raise ValueError(
                "save='all' keeps every saved tensor, so that nothing is left to recompute, but enable_ckpt is True; "
                "set enable_ckpt=False, or save='boundary'"
            )
        if save != "all" and not enable_ckpt:
            raise ValueError(
                f"save={save!r} keeps {_KEPT[save]} and recomputes the rest, but enable_ckpt is False; set enable_ckpt=True, or save='all'"
            )
        return save

    def _check_disk(self) -> None:
        for name in ("directory", "cache_directory"):
            path = getattr(self, name)
            if path is not None and not isinstance(path, (str, os.PathLike)):
                raise ValueError(f"OffloadOptions.{name}: got {path!r}, expected the path of a folder or None")
        if self.tier == "disk" and self.directory is None:
            raise ValueError(
                "OffloadOptions.directory: got None with tier='disk', expected the path of a folder with room for what is "
                "offloaded; name one, or use tier='cpu'"
            )
        if self.uses_disk and self.staging_chunk_bytes == 0:
            least = MIN_STAGING_BYTES if self.tier == "disk" else 4 * MIN_STAGING_BYTES
            raise ValueError(
                f"OffloadOptions.max_host_bytes: got {self.max_host_bytes}, expected at least {least} with "
                f"tier={self.tier!r} and a directory: that much goes through buffers to the disk"
            )

    def log_without_effect(self, on_accelerator: bool) -> None:
        """One log line that names the options set to no effect on this machine."""
        defaults = OffloadOptions()
        unused = [
            name
            for name, is_used in (
                ("directory", self.uses_disk),
                ("max_device_bytes", self.save == "auto"),
                ("cache_directory", self.save == "auto"),
            )
            if not is_used
        ]
        without_effect = [name for name in unused if getattr(self, name) != getattr(defaults, name)]
        if not on_accelerator:
            names = ("pin_memory", "use_streams", "max_inflight_bytes")
            without_effect += [name for name in names if getattr(self, name) != getattr(defaults, name)]
        if without_effect:
            where = "" if on_accelerator else " (no accelerator: copies are synchronous)"
            logger.warning("activation offloading: without effect here: %s%s", ", ".join(without_effect), where)
