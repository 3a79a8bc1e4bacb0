"""Where an engine's parameters and optimizer state are: on the device, or in host memory while another role works."""

import torch

from rlx.engine.fsdp_units import local
from rlx.engine.host_offload import TensorOffload
from rlx.engine.optimizer_state import Stepper
from rlx.engine.sharding import Sharded
from rlx.offload import ActivationOffloading, HostArena, LayerOffloading, OffloadStats


class Memory:
    """Moves the tensors of one engine, which fetches what a call needs by itself."""

    def __init__(
        self,
        sharded: Sharded,
        stepper: Stepper | None,
        streaming: LayerOffloading | None,
        activations: ActivationOffloading | None,
        offloads_parameters: bool,
        arena: HostArena,
        name: str,
    ):
        self._sharded, self._stepper, self.streaming, self.activations = sharded, stepper, streaming, activations
        self._parameters = TensorOffload(arena, f"{name}_parameters")
        self._offloads_parameters = offloads_parameters
        self._reported = OffloadStats()

    def to_host(self, parameters: bool = True) -> None:
        """Offload parameters, if asked for, and optimizer state as configured; raise HandOverError if the host has no room.

        Free device memory goes back to the system, so that a sampler with its own allocator can take it.
        """
        self.free_gathered()
        if parameters and self._offloads_parameters and not self._parameters.is_offloaded:
            device = self._sharded.device
            self._parameters.offload(p for p in self._sharded.root.parameters() if local(p).device.type == device.type)
        if self._stepper is not None and self._stepper.on_host is not None:
            self._stepper.on_host.to_host()
        if self._sharded.device.type != "cpu":
            torch.accelerator.empty_cache()

    def to_device(self, optimizer: bool = True) -> None:
        """Fetch parameters and, if asked for, optimizer state; raise HandOverError if the device has no room."""
        self._parameters.fetch()
        if optimizer and self._stepper is not None and self._stepper.on_host is not None:
            self._stepper.on_host.to_device()

    def prepare_update(self) -> None:
        """Leave the device to parameters, gradients and activations until the optimizer steps."""
        self.to_device(optimizer=False)
        if self._stepper is not None and self._stepper.on_host is not None:
            self._stepper.on_host.to_host()

    def agree(self) -> None:
        """Let all processes plan the offloading of an update's activations alike."""
        if self.activations is not None and self._stepper is not None:
            self.activations.agree(reserve_bytes=self._stepper.missing_bytes())

    def free_gathered(self) -> None:
        """Free copies of parameters: gathered ones, which an exception may have left, and streamed ones."""
        self._sharded.reshard()
        if self.streaming is not None:
            self.streaming.release()

    @property
    def offloads(self) -> list[TensorOffload]:
        on_host = self._stepper.on_host if self._stepper is not None else None
        return [self._parameters, *(on_host.offloads if on_host is not None else ())]

    @property
    def frozen(self) -> set[torch.UntypedStorage]:
        return {p.untyped_storage() for p in (self.streaming.parameters if self.streaming is not None else ())}

    def stats(self) -> dict[str, float]:
        """Return the figures of activation offloading since the last call, named as in OffloadStats.

        held_bytes and reserved_bytes are the current ones. The result is empty without backward or offloading.
        """
        if self.activations is None or self._stepper is None:
            return {}
        total = self.activations.stats()
        stats, self._reported = total.since(self._reported), total
        names = (*vars(stats), "copy_gb_per_s", "disk_gb_per_s", "overlap")
        return {name: float(getattr(stats, name)) for name in names if name != "layers"}
