"""The driver's reports to its supervisor: lines of JSON through a pipe.

| fact | meaning |
|---|---|
| `max_restarts` | `trainer.max_restarts`; without it the driver has not begun, and is started again only if it was killed |
| `folder` | of the run |
| `scratch` | a folder to remove at the end, unless the run failed |
| `grace_s` | seconds that the driver may take after SIGTERM; with it the driver handles signals |
| `step` | the step that begins |
| `ray` | "starts" or "runs" while the driver has a Ray on this machine, whose processes the supervisor then watches |
| `head` | address of the cluster's head, `host:port` |
| `saved` | the checkpoint written after a signal |
| `end` | the fields of `End` but `step`: why the driver is about to end |
"""

import json
import os
from typing import Any

DESCRIPTOR = "RLX_SUPERVISOR_PIPE"
FOLDER = "RLX_RUN_FOLDER"
RESTARTS = "RLX_RESTARTS"
OUT_OF_MEMORY = "out of host memory"
"""The error of an end whose process was killed for memory."""

# Taken out of the environment, so that no worker inherits it.
_descriptor = int(os.environ.pop(DESCRIPTOR, "-1"))
if _descriptor >= 0:
    os.set_inheritable(_descriptor, False)


def tell(**facts: Any) -> None:
    """Send facts to the supervisor; without one do nothing."""
    if _descriptor >= 0:
        os.write(_descriptor, json.dumps(facts).encode() + b"\n")


def folder_to_continue() -> str | None:
    """Return the folder of the run that this driver continues, or None if it is the first."""
    return os.environ.get(FOLDER)


def restarts() -> list[str]:
    """Return why the drivers before this one ended, the oldest first."""
    return list(json.loads(os.environ.get(RESTARTS, "[]")))
