"""A logits processor of vLLM that does what the file `RLX_ENGINE_PLUGIN` says: `hang` or `fail`."""

import os
import time
from pathlib import Path

from vllm.v1.sample.logits_processor import LogitsProcessor


class Plugin(LogitsProcessor):
    def __init__(self, *_):
        pass

    def is_argmax_invariant(self):
        return True

    def update_state(self, batch_update):
        said = Path(os.environ["RLX_ENGINE_PLUGIN"])
        what = said.read_text() if said.exists() else ""
        if what == "fail":
            raise RuntimeError("injected")
        while what == "hang":
            time.sleep(1)

    def apply(self, logits):
        return logits
