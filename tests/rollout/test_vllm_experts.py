"""Experts that vLLM uses: what it returns, and real ones of its layers replayed by the trainer."""

import numpy as np
import pytest
import torch

from rlx.rollout.protocol import EngineError, Request, Sampling


@pytest.mark.slow
def test_layers_of_vllm_and_the_trainer_number_experts_alike_and_replay_takes_the_mismatch_away(
    experts_folder, vllm_ranks
):
    for (own, differing, used), (replayed, _, none) in vllm_ranks("vllm_experts", "mismatch", experts_folder, "bf16"):
        assert 0.002 < differing == used < 0.2 and none == 0
        assert replayed < own
    for own, replayed in vllm_ranks("vllm_experts", "mismatch", experts_folder, "fp32"):
        assert own[1:] == replayed[1:] == (0, 0)
        assert max(own[0], replayed[0]) < 1e-4


def answer(experts):
    from vllm.outputs import CompletionOutput

    return CompletionOutput(0, "", [7, 8, 9], None, None, routed_experts=experts)


@pytest.mark.usefixtures("cpu_vllm")
@pytest.mark.parametrize(("given", "kept"), [("uint8", torch.uint8), ("uint16", torch.int16)])
def test_experts_of_prompt_and_response_without_the_last_token(given, kept):
    from rlx.rollout.vllm_support import experts_of

    request, experts = Request((1, 2), 0, Sampling(3)), np.arange(24).reshape(4, 3, 2).astype(given)
    found = experts_of(request, answer(experts))
    assert found.dtype == kept and found.tolist() == experts.tolist()
    with pytest.raises(EngineError, match="got none, expected those of 4 tokens"):
        experts_of(request, answer(None))
    with pytest.raises(EngineError, match="recorded no experts, because its kernel does not report them"):
        experts_of(request, answer(experts * 0))
    with pytest.raises(EngineError, match="got those of 3 tokens, expected those of 4 tokens"):
        experts_of(request, answer(experts[1:]))
