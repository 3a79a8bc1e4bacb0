"""The steps of the benchmark, in a process of the tests."""

import argparse

import torch

from benchmarks.optimizer_step import measure

TOKENS = 64


def _options(**changed):
    fixed = {"save": "boundary", "ulysses": 1, "optimizer_state": ["device"], "micro_batches": 1, "lossy": True}
    return argparse.Namespace(**fixed | {"rounds": 3, "directory": None, "max_host_gb": None} | changed)


def steps(folder, modes):
    options = _options(first_tokens=None)
    return [measure(folder, mode, TOKENS, options, torch.device("cpu")) for mode in modes]
