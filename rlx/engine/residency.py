"""Letting tensors wait in host memory while another role works on the device."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from rlx.engine.optimizer import local


class Parked(NamedTuple):
    """A storage whose bytes lie in `host` while its own memory is given back."""

    storage: torch.UntypedStorage
    host: torch.UntypedStorage


class Parking:
    """Takes the memory behind tensors away and gives it back, without the tensors being replaced.

    Only the bytes move: parameters, their views, FSDP's references and the optimizer's state all stay the objects they
    are, so this needs to know nothing of either kind of FSDP. Between `park` and `unpark` nobody may touch them.
    """

    def __init__(self) -> None:
        self._parked: list[Parked] = []

    @property
    def occupied(self) -> bool:
        """Whether something is parked."""
        return bool(self._parked)

    def park(self, tensors: Iterable[Tensor]) -> None:
        """Moves the bytes behind these tensors (of a DTensor its shard) to the host; a storage they share moves once."""
        storages = {s.data_ptr(): s for s in (local(t).untyped_storage() for t in tensors) if s.nbytes()}
        for storage in storages.values():
            host = torch.UntypedStorage(storage.nbytes())
            host.copy_(storage)
            storage.resize_(0)
            self._parked.append(Parked(storage, host))

    def unpark(self) -> None:
        """Brings everything back."""
        for storage, host in self._parked:
            storage.resize_(host.nbytes())
            storage.copy_(host)
        self._parked.clear()
