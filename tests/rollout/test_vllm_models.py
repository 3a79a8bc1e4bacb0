"""What rlx adds to vLLM's engine arguments for a type of model."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="its model classes are looked up in vLLM")
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from rlx.config.vllm_range import CPU_HEAD_WIDTHS
from rlx.rollout.vllm_models import with_needs

LFM2 = SimpleNamespace(model_type="lfm2", hidden_size=64, conv_dim=64)


def test_options_of_the_user_stay_beside_the_operators_of_lfm2():
    given = {"mode": 0, "custom_ops": ["none", "+rms_norm"]}
    options = {"compilation_config": given, "hf_overrides": {"a": 1}, "seed": 3}
    wanted = {"mode": 0, "custom_ops": ["none", "+rms_norm", "-rotary_embedding"]}
    found = with_needs(options, LFM2, torch.device("cpu"))
    assert found == {"compilation_config": wanted, "hf_overrides": {"a": 1, "block_dim": 64}, "seed": 3}
    assert given["custom_ops"] == ["none", "+rms_norm"]
    assert with_needs(found, LFM2, torch.device("cpu")) == found  # no operator twice
    assert with_needs(options, LFM2, torch.device("cuda"))["compilation_config"] == given
    alone = with_needs({"hf_overrides": {}}, LFM2, torch.device("cpu"))
    assert alone["compilation_config"] == {"custom_ops": ["-rotary_embedding"]}


def test_the_widths_of_heads_on_the_cpu_are_those_that_vllm_names():
    assert set(CPU_HEAD_WIDTHS) <= set(CPUAttentionBackend.get_supported_head_sizes())


def test_a_number_is_the_mode():
    found = with_needs({"compilation_config": 0, "hf_overrides": {}}, LFM2, torch.device("cpu"))
    assert found["compilation_config"] == {"mode": 0, "custom_ops": ["-rotary_embedding"]}
