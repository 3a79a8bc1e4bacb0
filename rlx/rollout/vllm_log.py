"""Keep vLLM from warning of what rlx intends."""

import logging
from collections.abc import Callable, Sequence

# Parts of warnings, by the logger that writes them.
_NO_NEWS = {
    "v1.worker.cpu_worker": ("set_num_threads", "LD_PRELOAD"),
    "renderers.base": ("Chat template warmup failed", "because tokenizer is not initialized"),  # tokens go in and out
    "utils.jit_monitor": ("during inference",),  # kernels of the trainer and of rare sampling compile when used
    "v1.worker.gpu_model_runner": ("weights were not loaded",),  # `reload` raises if some did not arrive
    "model_executor.model_loader.reload.layerwise": ("RotaryEmbedding: Failed to load",),  # it has no weights
}


def hush() -> None:
    """Drop these warnings in this process."""
    for name, texts in _NO_NEWS.items():
        logging.getLogger(f"vllm.{name}").addFilter(_without(texts))


def _without(texts: Sequence[str]) -> Callable[[logging.LogRecord], bool]:
    return lambda record: not any(text in record.getMessage() for text in texts)
