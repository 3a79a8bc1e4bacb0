"""Inputs and settings of the runs, their table, and whole runs."""

from argparse import Namespace

import torch

from benchmarks.race.inputs import settings, write_inputs
from rlx.config.check.validate import check
from rlx.config.compose.command_line import compose
from rlx.config.machine import inspect_machine
from rlx.data.prompts import load_prompts
from rlx.models.loading import load_tokenizer

KEY = "actor_rollout_ref.model.use_shared_prefix"


def test_prompts_have_all_the_tokens_that_were_asked_for_and_the_settings_are_valid(tmp_path):
    options = Namespace(shape="tiny", prompts=2, samples=4, prompt=40, response=8, steps=3, updates=1, micro_batch=8)
    inputs = write_inputs(tmp_path, options, torch.device("cpu"))
    composed = compose([*settings(options), *inputs, "actor_rollout_ref.rollout.name=hf", f"{KEY}=True"])
    assert not check(composed, inspect_machine()).faults
    config = composed.config
    prompts = load_prompts(config.data, load_tokenizer(config.actor_rollout_ref.model.path, False), "train")
    mask = prompts.batch(range(6))["prompt_mask"]
    assert len(prompts) == 6 and mask.shape == (6, 40) and mask.all()
