"""A plug-in of vLLM that fails on demand; vLLM loads it by its name, in each rank."""

from typing import ClassVar

from vllm.v1.sample.logits_processor import LogitsProcessor

CALL_LIMIT = 200


class Failing(LogitsProcessor):
    """Changes nothing, and raises at chosen calls, counted over all engines of the process."""

    calls: ClassVar[int] = 0
    raises_at: ClassVar[tuple[int, ...]] = ()

    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def apply(self, logits):
        Failing.calls += 1
        if Failing.calls in Failing.raises_at:
            raise RuntimeError(f"injected at call {Failing.calls}")
        assert Failing.calls < CALL_LIMIT, "requests never end"
        return logits

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        pass
