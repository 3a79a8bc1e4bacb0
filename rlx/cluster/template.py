"""A process that imports the workers' code while Ray starts; workers are forked from it and need not import it again.

`python -m rlx.cluster.template OWNER LISTENER MODULE ...` imports the modules and then answers at a listening socket, whose descriptor
it inherits. It ends with the process OWNER, which started it. On the other side is `enter_template.py`.
"""

import gc
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from threading import Event, Thread, get_native_id

from rlx.cluster import without_collection
from rlx.processes.child import end_with

_LATER = 10  # nice value


@contextmanager
def template(folder: Path, modules: Sequence[str]) -> Iterator[str]:
    """Start a template as long as the context lasts; yield the command that takes the place of `python` for Ray's workers."""
    path = folder / "template"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)
        with (folder / "template.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid()), str(listener.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},  # a look for devices does not begin CUDA
                pass_fds=[listener.fileno()],
                process_group=0,  # Ctrl-C is for the driver
            )
    try:
        yield shlex.join([sys.executable, "-IS", str(Path(__file__).with_name("enter_template.py")), str(path)])
    finally:
        process.kill()
        process.wait()


def serve(listener: socket.socket, modules: Sequence[str]) -> None:
    """Import the modules, then fork a worker for each connection. Returns only in a worker's process."""
    before = dict(os.environ)
    has_imported = Event()
    Thread(target=_import_and_stay, args=[modules, has_imported], daemon=True).start()
    has_imported.wait()
    imported = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.freeze()
    # A fork cannot use CUDA that has begun here. With GPUs vLLM's import begins it, so `runtime` starts no template there.
    uses_device = "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers
    while True:
        connection, _ = listener.accept()
        sys.stdout.flush()  # else each fork writes it again
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                environment = _become_worker(connection)
            except (OSError, EOFError):  # the command waited too long and has become the worker itself
                os._exit(0)
            # What an import has set holds for the worker too, unless its own environment says otherwise.
            own = {name: value for name, value in imported.items() if environment.get(name) == before.get(name)}
            os.environ.clear()
            os.environ.update({**environment, **own})
            if uses_device:
                os.execv(sys.executable, [sys.executable, *sys.argv])
            return
        connection.close()


def _import_and_stay(modules: Sequence[str], has_imported: Event) -> None:
    """Import modules and never return.

    A thread that ends frees what libraries keep for it, after Python has called it ended. MKL takes a lock for that; a worker
    forked meanwhile inherits the lock, and its first product of matrices waits for ever.
    """
    with _without_ray():
        import_ahead(modules)
    has_imported.set()
    Event().wait()


@contextmanager
def _without_ray() -> Iterator[None]:
    """Let imports of Ray fail: on import it reads variables, such as the token's mode, that only the worker's command has.

    vLLM would import it for its own Ray executor, and does without.
    """
    sys.modules["ray"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["ray"]


def import_ahead(modules: Sequence[str]) -> None:
    """Import modules in a thread of its own and at a low priority, because Ray's processes, which start meanwhile, take longer."""
    if sys.platform == "linux":  # elsewhere the priority would be that of the process
        os.setpriority(os.PRIO_PROCESS, get_native_id(), _LATER)
    with suppress(Exception), without_collection():  # the import that is needed says why it fails
        for module in modules:
            import_module(module)


def _become_worker(connection: socket.socket) -> dict[str, str]:
    """Take over arguments, folder and files of Ray's command, and return its environment; raises OSError or EOFError if it is gone."""
    header, files, _, _ = socket.recv_fds(connection, 8, 3)
    order = b""
    while len(order) < int.from_bytes(header):
        piece = connection.recv(1 << 16)
        if not piece:
            raise EOFError
        order += piece
    sys.argv, environment, folder = json.loads(order)
    os.chdir(folder)
    connection.sendall(b"1")
    connection.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    return environment


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    serve(socket.socket(fileno=int(sys.argv[2])), sys.argv[3:])
    runpy.run_path(sys.argv[0], run_name="__main__")
