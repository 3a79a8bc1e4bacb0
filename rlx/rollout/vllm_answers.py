"""Read the outputs of vLLM's engine."""

from typing import Any

import torch
from torch import Tensor

from rlx.rollout.protocol import Completion, EngineError, Request


def completion_of(request: Request, output: Any) -> Completion:
    """Return the completion of a request from vLLM's output. Raises EngineError if it did not come to its end, or lacks experts."""
    log_probs = list(output.logprobs.logprobs) if output.logprobs is not None else None
    reason = output.finish_reason
    if reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended a request with {reason!r}, expected stop or length")
    experts = experts_of(request, output) if request.sampling.with_experts else None
    stop = output.stop_reason if isinstance(output.stop_reason, str) else None
    return Completion(list(output.token_ids), log_probs, reason, experts, stop)


def experts_of(request: Request, output: Any) -> Tensor:
    """Return the experts of a request's tokens, as in `Completion`. Raises EngineError if vLLM lacks some."""
    found, tokens = output.routed_experts, len(request.prompt_ids) + len(output.token_ids) - 1
    if found is None or len(found) != tokens:
        got = "none" if found is None else f"those of {len(found)} tokens"
        raise EngineError(f"vLLM returned experts: got {got}, expected those of {tokens} tokens")
    if not found.any() and found.shape[-1] > 1:  # no token has one expert twice
        raise EngineError(
            "vLLM recorded no experts, because its kernel does not report them; set another by "
            "engine_kwargs.vllm, or actor_rollout_ref.rollout.enable_rollout_routing_replay=False"
        )
    # It counts in uint8, or uint16, which torch hardly computes with.
    return torch.from_numpy(found if found.dtype == "uint8" else found.astype("int16"))
