"""One process of a run: joins the process group and hosts roles by name."""

import math
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from rlx.checkpoint.manifest import damaged_chunks
from rlx.config.host_memory import host_memory
from rlx.config.schema import PPOConfig
from rlx.config.schema.roles import pools_of_roles, sampling_processes
from rlx.engine.host_offload import HostRelief, host_use
from rlx.heartbeat import at_beat
from rlx.models.loading import load_tokenizer
from rlx.rollout.engines import start_engines
from rlx.workers.roles import (
    ActorRole,
    CriticRole,
    EngineRole,
    LinkedWeights,
    RefRole,
    RewardRole,
    RolloutRole,
    TrainedRole,
)
from rlx.workers.weight_link import WeightLink

Role = EngineRole | RolloutRole
PROCESS = "process"
COLLECTIVE_EXTRA_S = 60.0  # so that the driver, which can name the place, notices a hang before torch does


class Worker:
    """Hosts roles. The role name `process` addresses the process as a whole.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set in the environment, and in that of the first process possibly
    MASTER_LISTEN_FD, the descriptor of a socket that is bound to this address and port. RLX_POOL is the number of its pool.

    Args:
        config: the tree; `trainer.total_training_steps` and the critic's nulls are set, model paths are folders or hub names.
        roles: some of actor, rollout, ref, critic, reward, built in a fixed order; `rollout` reads the weights of `actor`. The process
            hosts those of its pool.

    Attributes:
        roles: the hosted roles by name.

    Raises ValueError: the device does not exist.
    """

    def __init__(self, config: PPOConfig, roles: Sequence[str]):
        self._began, self._start_s = time.monotonic(), dict[str, float]()
        pools, own = pools_of_roles(config), pool()
        roles = [role for role in roles if pools[role] == own]
        limit_s = config.trainer.hang_timeout_s + COLLECTIVE_EXTRA_S
        self.device = join_process_group(config.trainer.device, limit_s)
        self._note_start("device")
        self.roles: dict[str, Role] = {}
        self._active: Role | None = None
        self._relief = HostRelief()
        self._memory = MemoryLog(self.device)
        model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
        # Now, because they import vLLM while the other roles are built
        engines = start_engines(rollout) if "rollout" in roles else []
        tokenizer = load_tokenizer(model.path, model.trust_remote_code)
        link = None
        if config.trainer.n_rollout_gpus:
            link = WeightLink(self.device, int(os.environ["RANK"]) + own, 1 + sampling_processes(config), limit_s)
        made: dict[str, Callable[[], Role]] = {
            "actor": lambda: ActorRole(config, self.device, tokenizer, link),
            "ref": lambda: RefRole(config, self.device),
            "critic": lambda: CriticRole(config, self.device, tokenizer),
            "reward": lambda: RewardRole(config, self.device),
            # Last, because vLLM takes a share of the memory that is free then
            "rollout": lambda: RolloutRole(
                config, self.device, tokenizer, self.roles.get("actor") or LinkedWeights(config, link), engines
            ),
        }
        for name in (each for each in made if each in roles):
            self.roles[name] = made[name]()
            self.roles[name].rest()
            self._note_start(name)
        self._readings = ReadingLog(self.device, self.roles.get("rollout"))
        at_beat(self._readings.look)

    def _note_start(self, name: str) -> None:
        now = time.monotonic()
        self._start_s[name], self._began = now - self._began, now

    def start_s(self) -> dict[str, float]:
        """Return the seconds that the start of the device and of each role took, in order."""
        return self._start_s

    @contextmanager
    def at_work(self, role: str, method: str) -> Iterator[Callable[..., Any]]:
        """Yield a method of a role to call, after the role that worked before has freed its device memory.

        If host memory is short, a rollout frees some of that first too.
        """
        if role == PROCESS:
            yield getattr(self, method)
            return
        chosen = self.roles[role]
        if not (isinstance(chosen, TrainedRole) and chosen.works_beside(method)):
            if self._active not in (None, chosen):
                if method == "sync" and isinstance(self._active, ActorRole):
                    self._active.rest(parameters=False)  # the sampler reads the parameters, then `sync` offloads them
                else:
                    self._active.rest()
                if isinstance(chosen, RolloutRole):
                    # After the rest, because parameters and optimizer states take room that activations left in the arena.
                    self._relief.relieve(host_memory())
            self._active = chosen
        self._readings.begin()
        with self._memory.around(f"{role}.{method}"):
            yield getattr(chosen, method)
        if isinstance(chosen, RolloutRole):
            self._readings.read()  # that it has ended

    def damage(self, checkpoint: str) -> list[str]:
        """Return the damaged parts of a checkpoint's files, among this process's share; raises as `damaged_chunks`."""
        if pool():
            return []  # those that train read all of them
        return damaged_chunks(Path(checkpoint), dist.get_rank(), dist.get_world_size())

    def usage(self) -> dict[str, Any]:
        """Return the memory and time that the process used since the last call.

        Returns:
            `<role>/<figure>`: activation offloading as `Memory.stats` names it, for roles that offload.
            `memory/<role>.<method>_before_gb` and so on: see `MemoryLog`; the role before already rests at "before".
            `load/<figure>`: of the sampler, see `RolloutRole.take_load`; without samples for training none.
            `memory/host_<user>_gb`: offloaded bytes in host memory now, and those reserved for them, see `host_use`.
            peak_memory_gb: largest allocated device memory [10^9 bytes]; on CPU the largest resident size of the process since
            it started.
            readings: see `ReadingLog.take`.
        """
        figures = {
            f"{name}/{figure}": value
            for name, role in self.roles.items()
            if isinstance(role, EngineRole)
            for figure, value in role.engine.memory.stats().items()
        }
        figures |= {f"memory/{name}": value for name, value in self._memory.take().items()}
        if isinstance(sampler := self.roles.get("rollout"), RolloutRole):
            figures |= {f"load/{name}": value for name, value in sampler.take_load().items()}
        figures |= {f"memory/host_{user}_gb": held / 1e9 for user, held in host_use().items()}
        return {**figures, "peak_memory_gb": self._memory.take_peak_gb(), "readings": self._readings.take()}


def pool() -> int:
    """Return the number of this process's pool, see `pools_of_roles`."""
    return int(os.environ.get("RLX_POOL", "0"))


def join_process_group(choice: str, timeout_s: float = 1800.0) -> torch.device:
    """Set up torch.distributed, including collectives of host tensors, and return this process's device.

    Args:
        choice: `trainer.device`: `cpu`, `cuda`, or `auto` for the accelerator that this process sees, if any.
        timeout_s: of collectives [s].

    Raises ValueError: the requested device does not exist.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    seen = accelerator.type if accelerator is not None else "cpu"
    backend, device = "gloo", torch.device("cpu")
    if choice != "cpu" and (choice != "auto" or seen == "cuda"):
        if seen != "cuda":
            raise ValueError(
                f"trainer.device: got cuda, but torch {torch.__version__} sees only {seen}; set trainer.device=cpu"
            )
        backend, device = "cpu:gloo,cuda:nccl", torch.device(seen, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
    # The store listens on the socket MASTER_LISTEN_FD of the first process if that is set, else on all interfaces. All pools share it.
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    listener = os.environ.get("MASTER_LISTEN_FD")
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and pool() == 0,
        wait_for_workers=False,  # the process group waits for its own
        master_listen_fd=None if listener is None else int(listener),
    )
    store, limit = dist.PrefixStore(f"pool_{pool()}", store), timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    return device


def memory_in_use(device: torch.device) -> dict[str, float]:
    """Return the memory in use now [10^9 bytes].

    gb: on CUDA everything in use on the device by torch, a sampler with an allocator of its own, CUDA itself and other
    processes; on CPU the resident size of this process. allocated_gb, on CUDA only: the part in torch's tensors.
    """
    if device.type == "cpu":
        return {"gb": psutil.Process().memory_info().rss / 1e9}
    free, total = torch.cuda.mem_get_info(device)
    return {"gb": (total - free) / 1e9, "allocated_gb": torch.accelerator.memory_allocated(device) / 1e9}


class MemoryLog:
    """Records memory before the first and after the last of consecutive calls of one name, and on a device the peak of torch's tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._figures: dict[str, float] = {}
        self._last = ""
        self._peak_gb = 0.0

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Record the memory in use before and after a block of code, and its peak."""
        if name != self._last:
            self._note(f"{name}_before")
        self._last, peak = name, f"{name}_peak_allocated_gb"
        self._look_at_peak()
        yield
        if self._device.type != "cpu":
            self._figures[peak] = max(self._figures.get(peak, 0.0), self._look_at_peak())
        self._note(f"{name}_after")

    def take(self) -> dict[str, float]:
        """Return `<name>_before_gb`, `<name>_after_gb` and so on for the last run of calls of each name, and reset them."""
        figures, self._figures, self._last = self._figures, {}, ""
        return figures

    def take_peak_gb(self) -> float:
        """Return the largest memory since the last call [10^9 bytes]: allocated by torch; on CPU resident, since the process started."""
        self._look_at_peak()
        found, self._peak_gb = self._peak_gb, 0.0
        return found

    def _look_at_peak(self) -> float:
        """Return the peak since the last look, and keep it for `take_peak_gb`."""
        if self._device.type == "cpu":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        else:
            peak = torch.accelerator.max_memory_allocated(self._device)
            torch.accelerator.reset_peak_memory_stats(self._device)
        self._peak_gb = max(self._peak_gb, peak / 1e9)
        return peak / 1e9

    def _note(self, moment: str) -> None:
        for figure, value in memory_in_use(self._device).items():
            self._figures[f"{moment}_{figure}"] = value


READ_S, READ_SHARE, MOST_READINGS = 0.25, 1e-3, 500
"""Seconds between two readings; the largest share of time that reading the GPU may take; the most readings that are kept."""


class ReadingLog:
    """Records when a process and the engines of its sampler were busy, for `rlx.trainer.timeline`.

    It looks at the clock at each beat, between the steps of samplers and of models, so no thread polls. Of a long step it keeps
    every second reading, and again if need be.
    """

    def __init__(self, device: torch.device, rollout: Role | None) -> None:
        self._device, self._rollout = device, rollout
        self._rows: list[dict[str, float]] = []
        self._every_s, self._due_s, self._gpu_due_s = READ_S, 0.0, 0.0
        self._gpu_busy = 0.0
        self.read()  # NVML's start takes long

    def begin(self) -> None:
        """Read now, and again at the next beat, when what begins is at work."""
        self.read()
        self._due_s = 0.0

    def look(self) -> None:
        """Read if it is time."""
        if time.monotonic() >= self._due_s:
            self.read()

    def read(self) -> None:
        row = {"age": time.monotonic()}
        if isinstance(self._rollout, RolloutRole):
            for number, load in enumerate(self._rollout.sampler.engine_loads(), 1):
                row |= {f"engine {number} {name}": requests for name, requests in load._asdict().items()}
            row["tokens"] = self._rollout.sampler.tokens
        self._rows.append(row | self._busy())
        if len(self._rows) > MOST_READINGS:
            del self._rows[1::2]
            self._every_s *= 2
        self._due_s = row["age"] + self._every_s

    def _busy(self) -> dict[str, float]:
        """Return the CPU time of this process so far, or the share of the last moment in which its GPU ran a kernel."""
        now = time.monotonic()
        if self._device.type == "cpu":
            return {"CPU busy": time.process_time() / torch.get_num_threads()}
        if now >= self._gpu_due_s:
            try:
                self._gpu_busy = torch.cuda.utilization(self._device) / 100
                self._gpu_due_s = time.monotonic() + (time.monotonic() - now) / READ_SHARE
            except Exception:  # nvidia-ml-py is not installed, or the device is a part of a card, which does not tell
                self._gpu_due_s = math.inf
        return {"GPU busy": self._gpu_busy} if self._gpu_due_s < math.inf else {}

    def take(self) -> dict[str, list[float]]:
        """Return the readings since the last call, a list for each figure.

        Returns:
            age: seconds from each reading to now; CPU busy or GPU busy: the share of the time to the next reading, of the process's
            threads or of the GPU, if that is known; tokens: of the sampler's completions so far; and of each engine of the sampler
            requests: engine 1 running, engine 1 waiting.
        """
        self.read()
        rows, self._rows, self._every_s = self._rows, self._rows[-1:], READ_S
        columns = {name: [row.get(name, 0.0) for row in rows] for name in rows[-1]}
        ages = columns["age"] = [rows[-1]["age"] - at for at in columns["age"]]
        if (spent := columns.get("CPU busy")) is not None:
            parts = zip(pairwise(spent), pairwise(ages), strict=True)
            columns["CPU busy"] = [
                min(1.0, (new - old) / max(1e-9, since - to)) for (old, new), (since, to) in parts
            ] + [0.0]
        if "GPU busy" in columns:
            columns["GPU busy"] = [*columns["GPU busy"][1:], 0.0]
        return columns
