"""`rollout.exact` on a GPU: an update finds the sampler's log-probs to the bit, with activations that leave the device."""

import socket
from dataclasses import replace

import pytest
import torch

from rlx.config.schema import RolloutConfig, TinyModelConfig
from rlx.data.batch import SEQUENCE
from rlx.models.tiny import make_tiny
from rlx.workers.worker import Worker

pytestmark = [pytest.mark.gpu]


def test_log_probs_are_equal_before_and_after_updates(config, environment, monkeypatch, tmp_path, prompts):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    model, tokenizer = make_tiny(TinyModelConfig(**wide, num_key_value_heads=2))
    model.resize_token_embeddings(320)  # which 64 divides
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    rollout = RolloutConfig(name="vllm", exact=True, ignore_eos=True, gpu_memory_utilization=0.1, max_num_seqs=16)
    model = replace(config.actor_rollout_ref.model, path=str(tmp_path))
    changed = replace(
        config,
        actor_rollout_ref=replace(config.actor_rollout_ref, model=model, rollout=rollout),
        data=replace(config.data, max_response_length=256),  # beyond a block of keys
        trainer=replace(config.trainer, device="cuda", n_gpus_per_node=1),
    )
    worker = Worker(changed, ["actor", "rollout"])

    def call(role, method, *arguments):
        with worker.at_work(role, method) as function:
            return function(*arguments)

    for version in range(3):
        call("rollout", "sync", version)
        samples = call("rollout", "generate", prompts, "train")
        sampled = samples["rollout_log_probs"]
        columns = {"old_log_probs": sampled, "ref_log_probs": sampled, "advantages": torch.randn(sampled.shape)}
        call("actor", "update_equal", samples.select(*SEQUENCE).with_(**columns))  # raises if a bit differs
    worker.roles["rollout"].sampler.close()
