"""How an engine of vLLM ends, and what it would leave behind. `vllm_api` has imported vLLM by then."""

import gc
import logging
from pathlib import Path
from typing import Any

from rlx.rollout.vllm_weights import tensors_of

logger = logging.getLogger(__name__)


def remove_names(queue: Any) -> None:
    """Remove the files of a queue that all processes of a group have opened: the workers end by SIGKILL, which would leave them.

    Its writer has 25 MB in /dev/shm and two sockets. What the processes have opened stays until they end.
    """
    if queue is None or not queue._is_writer or queue.buffer is None:
        return
    queue.buffer.shared_memory.unlink()
    queue.buffer.is_creator = False  # else it would unlink the name again when it is closed
    for name in ("local_subscribe_addr", "local_notify_addr"):
        address = getattr(queue.handle, name, None)  # not every version has both
        if address is not None:
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


def end(core: Any) -> None:
    """End the parts of an engine. If a part of a failed engine raises, the other parts are still ended."""
    from vllm.distributed import destroy_model_parallel

    def give_back() -> None:
        core.model_executor.collective_rpc(_give_back)

    # The last one, because another engine makes groups of its own.
    for part in (give_back, core.model_executor.shutdown, core.scheduler.shutdown, destroy_model_parallel):
        try:
            part()
        except Exception as error:
            logger.warning("vLLM: %s of an engine that ends: %s: %s", part.__qualname__, type(error).__name__, error)


def _give_back(worker: Any) -> None:
    """Empty weights and cache even if others refer to them: compiled code keeps its examples, an error its frames.

    vLLM cannot start a second engine in a process while a byte of them is left.
    """
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    _ROPE_DICT.clear()  # else the next engine would reuse its rotary tables, which are now empty
    for layer in worker.get_model().modules():
        LAYERWISE_INFO.pop(layer, None)  # kept for reloading, and refers to the layer
        for value in vars(layer).values():
            for tensor in tensors_of(value):
                storage = tensor.untyped_storage()
                if storage.resizable():
                    storage.resize_(0)


def collect() -> None:
    """Collect garbage, an engine too."""
    gc.unfreeze()  # vLLM freezes all objects that exist at its start, including its own
    gc.collect()
