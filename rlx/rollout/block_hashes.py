"""Hand vLLM's hashes of a prompt's blocks from one turn of a conversation to the next.

vLLM finds a prompt in its prefix cache by the hashes of its blocks, for example of 16 tokens, and computes them in Python for
each request. The prompt of a turn begins with prompt and completion of the turn before, whose blocks vLLM has hashed already.
"""

from typing import Any

from rlx.rollout.protocol import PrefixMemory


class ContinuedHashes:
    """vLLM's hasher of new requests: takes over what a `PrefixMemory` knows, and lets vLLM's own hasher do the rest.

    A hash depends on the tokens up to its block's end, and on the name of the adapters. So hashes are taken over if the prompt
    begins with all tokens that they belong to, and if `forget` was not called since.

    Args:
        plain: vLLM's own: it returns the hashes of a request's blocks that `request.block_hashes` lacks.
    """

    def __init__(self, plain: Any) -> None:
        self._plain, self._era = plain, object()
        self._memory: PrefixMemory | None = None

    @classmethod
    def of(cls, core: Any) -> "ContinuedHashes":
        """Let vLLM's engine core hash new requests by one, and return it. Nobody calls it if the core hashes none, or elsewhere."""
        plain = getattr(core, "request_block_hasher", None)
        hashes = cls(plain)
        if plain is not None:
            core.request_block_hasher = hashes
        return hashes

    def expect(self, memory: PrefixMemory | None) -> None:
        """Use this memory for the request that comes next, and keep its tokens and hashes there."""
        self._memory = memory

    def forget(self) -> None:
        """Use no hashes of the requests before: adapters change."""
        self._era = object()

    def __call__(self, request: Any) -> list[Any]:
        """Return the hashes of a new request's blocks that its `block_hashes` lacks; known ones are put there."""
        request._block_hasher = self._plain  # vLLM calls it for each token that it decodes
        memory, self._memory = self._memory, None
        if memory is not None:
            tokens, hashes = request.all_token_ids, request.block_hashes
            known = memory.tokens
            if memory.era is self._era and tokens[: len(known)] == known[:]:
                hashes.extend(memory.block_hashes)
            # vLLM appends what it decodes to both of these.
            memory.tokens, memory.block_hashes, memory.era = tokens, hashes, self._era
        return self._plain(request)
