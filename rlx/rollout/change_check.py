"""Notice a sampler whose weights stay as they are although the policy's change.

A sync compares a sample of the policy's weights and one of the sampler's with those of the sync before. Elements of the two samples
need not correspond, because vLLM fuses, pads and shards weights.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rlx.errors import ExplainedError

PER_TENSOR = 1024
# If so many elements of the sampler's sample should have changed and none did, it is no accident: bf16 hides small updates of most
# elements, so few changes prove nothing.
SURE = 64


class StaleSamplerError(ExplainedError, RuntimeError):
    """The sampler still has its old weights after a sync of new ones."""


def sample_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return evenly spaced elements of each tensor (at most PER_TENSOR) as one fp32 tensor (N,) on the CPU."""
    return _joined([_evenly(tensor) for tensor in tensors])


def _evenly(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, -(-len(flat) // PER_TENSOR))].to(torch.float32, copy=True)


def _joined(samples: list[Tensor]) -> Tensor:
    """Return one tensor on the CPU: one copy from the device, because each waits for it."""
    return torch.cat(samples).cpu() if samples else torch.empty(0)


class ChangeCheck:
    """Compares the samples of one sync with those of the sync before.

    Args:
        dtype: of the sampler's weights; a change of the policy that it rounds away is none.
    """

    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype
        self._sent: list[Tensor] = []
        self._before: tuple[Tensor, Tensor] | None = None

    def watched(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights on their way to the sampler and take samples of them."""
        self._sent = []
        for name, tensor in weights:
            self._sent.append(_evenly(tensor))
            yield name, tensor

    def require_change(self, found: Tensor, version: int) -> None:
        """Compare with the sync before.

        Args:
            found: sample of the weights that the sampler has now, as its `probe` returns it.
            version: of the policy.

        Raises:
            StaleSamplerError: the policy changed and the sampler did not.
        """
        sent = _joined(self._sent).to(self._dtype).float()
        self._sent = []  # they hold device memory
        before, self._before = self._before, (sent, found)
        if before is None or before[0].shape != sent.shape or before[1].shape != found.shape:
            return
        share = (before[0] != sent).double().mean().item() if len(sent) else 0.0
        if share * len(found) >= SURE and torch.equal(before[1], found):
            raise StaleSamplerError(
                f"sync of version {version}: {share:.1%} of the policy's sampled weights changed, but none of {len(found):,} "
                "of the sampler's; expected new weights there. It would go on with old ones. Update vLLM or set "
                "actor_rollout_ref.rollout.name=hf; with adapters, actor_rollout_ref.model.lora.merge=True sends all weights"
            )
