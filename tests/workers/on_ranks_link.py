"""What the tests of weights on their way to a sampler of its own let each rank do."""

import torch
import torch.distributed as dist

from rlx.rollout import wire
from rlx.workers.weight_link import WeightLink


def weights(transfer):
    torch.manual_seed(transfer)
    return {
        "long": torch.randn(5, 9),  # over three buckets
        "scalar": torch.randn((), dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "bytes": torch.randint(0, 255, (64,), dtype=torch.uint8),
    }


def transfer_twice():
    """Rank 0 sends, and rank 1 says whether it has got what was sent, in order."""
    whole, wire.BUCKET_BYTES = wire.BUCKET_BYTES, 64
    link, same = WeightLink(torch.device("cpu"), dist.get_rank(), dist.get_world_size(), 60.0), []
    for transfer in range(2):
        if dist.get_rank() == 0:
            link.send(weights(transfer).items())
        else:
            got, expected = dict(link.received()), weights(transfer)
            same.append(list(got) == list(expected) and all(torch.equal(got[name], expected[name]) for name in got))
            same.append([each.dtype for each in got.values()] == [each.dtype for each in expected.values()])
        dist.barrier()  # as the driver waits for all processes
    wire.BUCKET_BYTES = whole
    return same
