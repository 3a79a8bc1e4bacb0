"""One step of the benchmark, in a process of the tests."""

import argparse

import torch

from rlx.engine.step_benchmark import measure


def steps(folder, modes):
    options = argparse.Namespace(save="boundary", optimizer_offload=False, steps=2, first_tokens=16)
    return [measure(folder, mode, 64, options, torch.device("cpu")) for mode in modes]
