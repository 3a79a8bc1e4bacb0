"""The map of the gap between sampler and trainer, of a tiny model on a CPU."""

import json

import pytest
import torch

from benchmarks.mismatch import WAYS, main

SIZES = ["--batches", "1", "3", "--prompt", "6", "--tokens", "4", "--rows", "16", "--rounds", "1"]


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_vllm")
def test_operations_and_forwards_are_compared(tmp_path, capfd):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = Qwen3Config(vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, **heads)
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(tmp_path / "model")
    assert main(["--model", str(tmp_path / "model"), "--json", str(tmp_path / "found.jsonl"), *SIZES]) == 0
    found = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    operations = [each for each in found if each["figure"] == "operation"]
    # vLLM's own operations give the sampler's bits again, in either phase, from the inputs that were recorded.
    own = {(x["operation"], x["phase"]): x["equal"] for x in operations if x["way"] == "sampler"}
    names = {name for name, _ in own}
    assert names >= {
        "embed_tokens",
        "qkv_proj",
        "q_norm",
        "rotary_emb",
        "attn",
        "post_attention_layernorm",
        "act_fn",
        "norm",
    }
    elementwise = ("rotary_emb", "act_fn", "input_layernorm", "post_attention_layernorm", "norm", "q_norm")
    assert all(own[name, phase] == 1 for name in elementwise for phase in ("prefill", "decode"))
    assert min(x["equal"] for x in operations if x["operation"] == "rotary_emb" and x["way"] == "trainer") < 0.99
    # vLLM's head has the type that was asked for.
    errors = {(x["operation"], x["way"]): x["relative_rms"] for x in operations if x["batch"] == 3}
    assert errors["head (fp32)", "fp32"] < 1e-6 < 1e-4 < errors["head (fp32)", "bf16"]
    assert errors["head (bf16)", "bf16"] < errors["head (bf16)", "fp32"]
    gaps = {(x["head"], x["batch"], x["forward"]): x for x in found if x["figure"] == "log-probs"}
    assert all(0 < gaps[head, 3, "trainer"]["mean"] < 0.02 for head in ("bf16", "fp32"))
    assert gaps["fp32", 3, "prompt"]["mean"] < 1e-3 and gaps["fp32", 3, "one ulp at 0"]["mean"] > 0
    assert {f"sampler, {kind}" for kind in (*WAYS, "head")} <= {forward for _, _, forward in gaps}
    assert {x["way"] for x in found if x["figure"] == "cost"} == {way for ways in WAYS.values() for way in ways}
    assert "operation: share of equal elements" in capfd.readouterr().out
