"""Forms of AdamW side by side, in a process of the tests."""

import torch

from benchmarks.updates import MODELS, train


def forms(names, lr, steps):
    return {name: train(name, MODELS["small"], lr, steps, torch.device("cpu"), 8, 64) for name in names}
