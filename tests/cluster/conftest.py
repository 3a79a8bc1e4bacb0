import contextlib
import functools
import os
import tempfile

import pytest


@pytest.fixture(scope="session")
def worker_class():
    """A small worker, defined here so that it travels by value: tests are no package that workers could import."""

    class Traced:
        def __init__(self, folder):
            self.folder = folder

        def __reduce__(self):
            return tempfile.mkdtemp, (None, None, self.folder)

    class Recorder:
        def __init__(self, name, distributed=False):
            if name == "fails":
                raise ValueError("the constructor\ndoes not like this")
            import logging
            import queue
            import sys

            self.rows, self.roles = queue.SimpleQueue(), dict.fromkeys(("each", "pair", "sample"), self)
            self.torch_came_early = "torch" in sys.modules
            logging.getLogger("rlx.tests").info("built %s", name)
            logging.getLogger("rlx.tests").warning("rank %s speaks", os.environ["RANK"])
            if distributed:
                import torch.distributed

                torch.distributed.init_process_group("gloo")

        @contextlib.contextmanager
        def at_work(self, role, method):
            yield functools.partial(getattr(self, method), role)

        def environment(self, role):
            import torch

            return dict(os.environ), torch.get_num_threads(), self.torch_came_early

        def echo(self, role, batch):
            return batch

        def shorter(self, role, batch):
            return batch.rows([])

        def show(self, role, batch, seen):
            """Finish row after row, each after the driver has seen the one before."""
            import time

            for seed in batch["seed"].tolist():
                self.rows.put(seed)
                until_s = time.monotonic() + 60
                while not (seen / str(seed)).exists():
                    if time.monotonic() > until_s:
                        raise TimeoutError(f"row {seed} was not seen")
                    time.sleep(0.02)
            return batch

        def finished(self):
            return [self.rows.get() for _ in range(self.rows.qsize())]

        def facts(self, role, batch, factor):
            return {"rank": int(os.environ["RANK"]), "rows": len(batch), "sum": factor * int(batch["seed"].sum())}

        def traced(self, role, folder):
            return Traced(folder)  # whoever reads it makes a folder there

        def add(self, role, a, b):
            return int(os.environ["RANK"]), a + b

        def reduce(self, role, what_rank_1_does):
            import signal
            import time

            import torch.distributed

            if os.environ["RANK"] == "1":
                if what_rank_1_does == "raise":
                    raise ValueError("the true cause")
                if what_rank_1_does == "sleep":
                    time.sleep(1000)
                os.kill(os.getpid(), signal.SIGKILL)
            torch.distributed.all_reduce(torch.ones(1))

        def work_slowly(self, role, seconds):
            import time

            from rlx.heartbeat import beat

            for _ in range(int(seconds / 0.1)):
                time.sleep(0.1)
                beat()
            return seconds

    return Recorder
