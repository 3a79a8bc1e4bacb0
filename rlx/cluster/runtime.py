"""Join or start Ray, and leave nothing behind."""

import inspect
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from rlx.cluster.errors import ClusterError, RayStartError, WorkerFailure, one_line
from rlx.config.schema import PPOConfig
from rlx.errors import ExplainedError, did_you_mean, storing
from rlx.supervisor.link import handling, tell

_PROBE_S = 10.0
_NO_HEAD = "unset RAY_ADDRESS to run on this machine only, or start the cluster with `ray start --head`"
logger = logging.getLogger(__name__)


@contextmanager
def session(config: PPOConfig) -> Iterator[None]:
    """Keep Ray running as long as the context lasts.

    It joins the cluster at `RAY_ADDRESS` (or `ray_kwargs.ray_init.address`) if there is one, else it starts Ray on this machine
    only. If the process has already started Ray, that is used and left running. At the end, also after an exception, Ctrl-C or
    SIGTERM, all processes that were started here have ended. Raises ClusterError if nothing answers at the address.
    """
    if ray.is_initialized():
        yield
        return
    options = dict(config.ray_kwargs.ray_init)
    address = str(options.pop("address", None) or os.environ.get("RAY_ADDRESS") or "local")
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    folder: Path | None = None
    try:
        if address == "local":
            _set_local_environment()
            folder = _private_folder(options.pop("_temp_dir", None))
            tell(scratch=str(folder))
            tell(ray="starts")  # the supervisor looks for Ray's processes, because `ray.init` may hold Python's lock
            came: list[int] = []  # signals; half a start would leave processes
            with handling({signal.SIGINT: lambda number, _: came.append(number)}):
                _start_here(folder / "ray", {**quiet, **options})
            if came:
                raise KeyboardInterrupt
            tell(ray="runs")
        else:
            _join(address, {**quiet, **options})
            tell(head=ray.get_runtime_context().gcs_address)
        if threading.current_thread() is threading.main_thread():
            # Ray's own handler prints addresses of C++ frames and sometimes aborts the process.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        yield
    except Exception as error:
        if isinstance(error, WorkerFailure | ClusterError) or not isinstance(error, ExplainedError):
            folder = None  # kept, because its logs may tell more; a restart removes it
        raise
    finally:
        tell(ray=None, head=None)  # their end is no loss from now on
        # A second signal does not interrupt the cleanup.
        with handling(dict.fromkeys((signal.SIGINT, signal.SIGTERM), signal.SIG_IGN)):
            _shutdown()
            if folder:
                shutil.rmtree(folder, ignore_errors=True)


def check_options(config: PPOConfig) -> None:
    """Raise ClusterError if Ray does not know an option in `ray_kwargs.ray_init`. It lists none with a leading underscore."""
    known = [name for name, of in inspect.signature(ray.init).parameters.items() if of.kind is not of.VAR_KEYWORD]
    unknown = [name for name in config.ray_kwargs.ray_init if name not in known and not name.startswith("_")]
    if unknown:
        found = ", ".join(f"{name!r} ({did_you_mean(name, known, 'remove it')})" for name in unknown)
        raise ClusterError(f"ray_kwargs.ray_init: ray.init of Ray {ray.__version__} does not know {found}")


def accelerator() -> str:
    """Return the device for `trainer.device=auto`: `cuda` if the Ray of this process has GPUs, else `cpu`."""
    return "cuda" if ray.cluster_resources().get("GPU") else "cpu"


def _private_folder(parent: str | None) -> Path:
    """Return a new folder of mode 0700 for Ray's folder.

    Ray opens its own folder, with the sockets and logs in it, to all users. The default parent is short, because a socket's path
    has at most 107 bytes.
    """
    chosen = Path(parent or os.environ.get("RAY_TMPDIR") or "/tmp").expanduser()
    with storing(chosen):
        chosen.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="rlx_", dir=chosen))


def _set_local_environment() -> None:
    """Set variables for a Ray that this run starts for itself: services that it does not need are off, and it has a token.

    Values that the user has set stay. Without a token Ray would write one to the home folder, where two runs that start at the
    same time would overwrite each other's.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_enable_metrics_collection", "0")  # its port would be open to other machines
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15: workers would wait for everything else on the machine
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # a process per core, most of them unused
    named = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if not named and not (Path.home() / ".ray" / "auth_token").exists():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _start_here(folder: Path, options: dict[str, Any]) -> None:
    """Start Ray on this machine; raise RayStartError if one of its processes does not come up."""
    try:
        ray.init(address="local", _temp_dir=str(folder), **{"include_dashboard": False, **options})
    except (TypeError, ValueError):
        raise  # an option is wrong
    except Exception as error:  # Ray raises no type of its own
        raise RayStartError(
            f"Ray did not start: {one_line(str(error))}; its logs are in {folder}/session_latest/logs"
        ) from None


def _join(address: str, options: dict[str, Any]) -> None:
    """Connect to a cluster; raise ClusterError if that fails."""
    _probe(address)
    try:
        ray.init(address=address, **options)
    except (ConnectionError, ray.exceptions.AuthenticationError) as error:
        # With a word such as "auto" Ray looks for a head itself.
        if isinstance(error, ConnectionError) and ":" not in address:
            raise ClusterError(f"RAY_ADDRESS: got {address!r}, and Ray found no cluster; {_NO_HEAD}") from None
        raise ClusterError(
            f"the Ray head at {address} answers, but does not let this process in ({one_line(str(error))}); if the cluster "
            "asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH as on its nodes; see docs/cluster.md"
        ) from None


def _probe(address: str) -> None:
    """Raise ClusterError if nothing listens at `host:port`; Ray itself would try for many minutes."""
    if "://" in address:
        raise ClusterError(
            f"RAY_ADDRESS: got {address!r}, an address of Ray's client or job server, expected host:port of the head. "
            "From outside the cluster use `ray job submit --address ... -- python -m rlx.main_ppo ...`"
        )
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE_S).close()
    except OSError as error:
        raise ClusterError(f"no Ray head answers at {address} ({error}); {_NO_HEAD}") from None


def _shutdown() -> None:
    """End Ray and wait until its processes have ended; older versions of Ray, such as 2.52, cannot wait."""
    waits = "wait_for_processes" in inspect.signature(ray.shutdown).parameters
    ray.shutdown(**({"wait_for_processes": True} if waits else {}))
