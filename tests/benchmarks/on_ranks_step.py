"""The steps of the benchmark, in a process of the tests."""

import argparse

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from benchmarks.optimizer_step import measure

TOKENS = 64


def _options(**changed):
    fixed = {"save": "boundary", "optimizer_state": ["device"], "micro_batches": 1, "lossy": True}
    return argparse.Namespace(**fixed | {"rounds": 3, "directory": None, "max_host_gb": None} | changed)


def steps(folder, modes):
    options = _options(first_tokens=None)
    return [measure(folder, mode, TOKENS, options, torch.device("cpu")) for mode in modes]


def tokens_by_step(folder, mode, first_tokens):
    """How many token ids the embedding gets in each of three steps, the last two measured."""
    seen = []

    def count(module, inputs):
        if isinstance(module, nn.Embedding):
            seen.append(inputs[0].numel())

    hook = register_module_forward_pre_hook(count)
    try:
        measure(folder, mode, TOKENS, _options(first_tokens=first_tokens, rounds=2), torch.device("cpu"))
    finally:
        hook.remove()
    return seen[-3:]  # before them an engine tries its model on a few tokens
