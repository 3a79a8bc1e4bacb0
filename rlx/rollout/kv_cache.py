"""A KV cache that appends in place.

transformers' dynamic cache copies all keys and values for each new token. On CPU this costs more than the arithmetic of a
small model.
"""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


def growing_cache(config: PreTrainedConfig, extra_tokens: int, has_window: bool = True) -> DynamicCache:
    """Return a DynamicCache for `config` whose plain layers have room for `extra_tokens` after the first call.

    Layers of other kinds (sliding window, linear attention) stay transformers' own.

    Args:
        config: of the model.
        extra_tokens: see above.
        has_window: whether the model applies its sliding window; if not, layers with one are plain.
    """
    cache = DynamicCache(config=config)
    plain = (DynamicLayer,) if has_window else (DynamicLayer, DynamicSlidingWindowLayer)
    cache.layers = [GrowingLayer(extra_tokens) if type(layer) in plain else layer for layer in cache.layers]
    return cache


class GrowingLayer(DynamicLayer):
    """Keys and values (B, heads, tokens, head_dim) as views of buffers with room for more tokens.

    Args:
        extra_tokens: room in each new buffer in addition to the tokens it stores at first.
    """

    def __init__(self, extra_tokens: int):
        super().__init__()
        self._extra_tokens = extra_tokens
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append along the token axis and return all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        if self._buffers is None or stop > self._buffers[0].shape[-2]:
            self._buffers = (self._grown(self.keys, key_states, stop), self._grown(self.values, value_states, stop))
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:stop] = states
        self._show(stop)
        return self.keys, self.values

    def _grown(self, old: Tensor, states: Tensor, stop: int) -> Tensor:
        batch, heads, _, head_dim = states.shape
        buffer = states.new_empty(batch, heads, stop + self._extra_tokens, head_dim)
        if old.numel():
            buffer[:, :, : old.shape[-2]] = old
        return buffer

    def _show(self, tokens: int) -> None:
        keys, values = self._buffers
        self.keys, self.values = keys[:, :, :tokens], values[:, :, :tokens]

    def reorder_cache(self, indices: Tensor) -> None:
        """Keep these rows; a row may be named several times. Other kinds of layers have no other method that does."""
        tokens = self.get_seq_length()
        if tokens:
            keys, values = self._buffers
            self._buffers = (torch.index_select(keys, 0, indices), torch.index_select(values, 0, indices))
            self._show(tokens)
