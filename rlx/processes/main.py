"""What an isolated process runs: `python -m rlx.processes.main CONNECTION NOTE OWNER MEMORY_BYTES MODULE NUMBERS…`.

`MODULE.serve(connection, *NUMBERS)` handles the owner's requests until the owner closes the connection.
"""

import contextlib
import importlib
import os
import socket
import sys
from pathlib import Path

from rlx.processes import calls
from rlx.processes.child import OUT_OF_MEMORY, end_with, limit_memory
from rlx.user_code import load_module

NICE = 5
"""The sampler, which works at the same time, gets three quarters of a core that both want; the limits are in wall time."""


def main() -> None:
    """Run with the arguments above."""
    descriptor, calls.note_descriptor, owner, memory_bytes = map(int, sys.argv[1:5])
    end_with(owner)
    limit_memory(memory_bytes)
    os.nice(NICE)
    with contextlib.suppress(OSError):  # where Linux groups processes by session, it compares the groups' own numbers
        Path("/proc/self/autogroup").write_text(str(NICE))
    code = 0
    try:
        with contextlib.suppress(ConnectionError):  # the owner has ended the pool
            serve = importlib.import_module(sys.argv[5]).serve
            serve(socket.socket(fileno=descriptor), *map(int, sys.argv[6:]))
    except MemoryError:
        code = OUT_OF_MEMORY
    os._exit(code)  # even if the code has left threads running


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    # A process that user code started by multiprocessing (`spawn` or `forkserver`). It unpickles functions by the name of their
    # module, which only `load_module` can import.
    for _path in filter(None, os.environ.get(calls.USER_FILES, "").split(os.pathsep)):
        load_module(_path, "multiprocessing")
