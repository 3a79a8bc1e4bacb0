"""AdamW of torchao, an optional package: stochastic rounding of bf16 weights, and moments in 8 bits.

Stochastic rounding takes one of the two bf16 neighbours of the exact result, the nearer one more often, so that the mean of many
results is exact. Updates below the distance of neighbours thus move some weights, without masters. Moments in 8 bits have a scale
for each 256 numbers (Dettmers et al. 2021, arXiv:2110.02861); tensors below 4,096 numbers keep theirs in the weights' type.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer


def build_torchao(name: str, parameters: Iterable[nn.Parameter], **options: Any) -> Optimizer:
    """Return torchao's optimizer of this name; bf16 parameters are rounded stochastically.

    Args:
        name: as `optim.optimizer`: `_AdamW` or `AdamW8bit`.
        parameters: bf16 or wider.
        options: of AdamW: lr, betas, eps, weight_decay.

    Raises:
        ImportError: torchao is not installed.
    """
    try:
        import torchao.optim
    except ImportError as error:
        text = f"optim.optimizer={name}: needs the package torchao; pip install 'torchao>=0.18', or set it to AdamW"
        raise ImportError(text) from error
    kind: type[Optimizer] = getattr(torchao.optim, name)
    made: Optimizer = kind(parameters, bf16_stochastic_round=True, **options)  # type: ignore[call-arg]
    return made
