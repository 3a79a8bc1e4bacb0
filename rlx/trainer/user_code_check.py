"""Code of the user's own, tried before anything starts.

Each file is imported in a process that ends afterwards, so that nothing of what an import may do (claim device memory, start
threads, crash, never come to its end) reaches the driver. Imports little itself, as it comes before torch and Ray.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlx.config.check.validate import Verdict
from rlx.config.faults import Fault
from rlx.config.machine import Machine, on_accelerator
from rlx.config.schema import PPOConfig
from rlx.rewards.function import BATCHED, KEY, SINGLE, Loadable, own_function
from rlx.rewards.pool import ProcessPool
from rlx.user_code import DATASET, POLICY_LOSS, ImportFailed, Interface, UserCodeError, load_callable


@dataclass(frozen=True, eq=False)
class Named:
    """What is called by position: a policy loss or the class of a data set. See Loadable."""

    source: str
    name: str
    interface: Interface

    def load(self) -> Callable[..., Any]:
        """See Loadable."""
        return load_callable(self.source, self.name, self.interface)


class UserCode(NamedTuple):
    """Something of the user's own.

    Args:
        what: in words.
        keys: that it hangs on, `path` and `name` first.
        code: what is tried.
        expected: what it should be.
        memory_limit_gb: what the process may allocate [10^9 bytes]; None: anything.
        in_workers: workers import it, and the driver does not.
    """

    what: str
    keys: tuple[str, ...]
    code: Loadable
    expected: str
    memory_limit_gb: float | None = None
    in_workers: bool = False


def check_user_code(config: PPOConfig, broken: frozenset[str], machine: Machine) -> Verdict:
    """Imports reward function, policy loss and data set class of the user's, looks for the names, and sees whether they can
    be called as they will be.

    A file that is not there is no fault here: a rule of the configuration says so. Where the run uses accelerators and this
    machine has none, a policy loss whose import fails is only warned of: the workers' machines may have what it needs.

    Args:
        config: as far as it could be read.
        broken: keys that could not be read; what hangs on them is not tried.
        machine: of the driver.
    """
    faults, warnings = [], []
    for own in _of(config):
        if not broken.isdisjoint(own.keys):
            continue
        try:
            with ProcessPool(1, own.memory_limit_gb, at_once=1) as pool:
                pool.check(own.code)
        except UserCodeError as error:
            elsewhere = own.in_workers and on_accelerator(config, machine) and not machine.gpus
            if elsewhere and isinstance(error, ImportFailed):
                warnings.append(f"{own.what} cannot be imported on this machine, which has no GPU: {error}")
                continue
            remedy = f"correct the file, {own.keys[0]} or {own.keys[1]}"
            faults.append(Fault(f"{own.what} cannot be used", str(error), own.expected, remedy, own.keys))
    return Verdict(tuple(faults), tuple(warnings))


def _of(config: PPOConfig) -> Iterator[UserCode]:
    """What there is, of files that are there."""
    reward = own_function(config.reward, config.custom_reward_function)
    if reward is not None and _is_there(reward.source):
        keys = (f"{KEY}.path", f"{KEY}.name", f"{KEY}.reward_kwargs", "reward.reward_manager.name")
        parameters = (*(BATCHED if reward.batched else SINGLE), *reward.options)
        expected = f"{reward.name}({', '.join(parameters)}), called by keyword"
        yield UserCode("the reward function of your own", keys, reward, expected, config.reward.memory_limit_gb)
    loss, dataset = config.actor_rollout_ref.actor.policy_loss, config.data.custom_cls
    if loss.path is not None and _is_there(loss.path):
        yield _by_position("the policy loss of your own", loss.path, loss.name, POLICY_LOSS, in_workers=True)
    if dataset.path is not None and dataset.name is not None and _is_there(dataset.path):
        yield _by_position("the dataset class of your own", dataset.path, dataset.name, DATASET)


def _by_position(what: str, path: str, name: str, interface: Interface, in_workers: bool = False) -> UserCode:
    keys, expected = (f"{interface.key}.path", f"{interface.key}.name"), f"{name}({', '.join(interface.parameters)})"
    return UserCode(what, keys, Named(path, name, interface), expected, in_workers=in_workers)


def _is_there(path: str) -> bool:
    file = Path(path).expanduser()
    return file.is_file() and file.suffix == ".py"
