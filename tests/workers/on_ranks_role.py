"""The sampler's role with a vLLM engine that fails on demand: what the tests let each rank do."""

import gc
import logging
from dataclasses import replace

import psutil
import torch
import torch.distributed as dist

from rlx.models.loading import load_tokenizer
from rlx.rollout.engines import start_engines
from rlx.workers.roles import ActorRole, RolloutRole

CPU = torch.device("cpu")
ROLES: dict[str, ActorRole | RolloutRole] = {}
LEFT_AT_A_RESTART: list[tuple[set[str], int]] = []
ALIASES: list[torch.Tensor] = []  # of an engine's weights and cache, as compiled code has them


def start(config):
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path, False)
    actor = ROLES["actor"] = ActorRole(config, CPU, tokenizer)
    rollout = ROLES["rollout"] = RolloutRole(config, CPU, tokenizer, actor)
    rollout.sync(0)
    build = rollout._build
    hold_aliases(rollout.sampler)

    def note_and_build():
        kinds = map(type, gc.get_objects())
        left = {kind.__name__ for kind in kinds if is_of_vllm(kind)}
        LEFT_AT_A_RESTART.append((left, sum(alias.untyped_storage().nbytes() for alias in ALIASES)))
        sampler = build()
        hold_aliases(sampler)
        return sampler

    rollout._build = note_and_build


def hold_aliases(sampler):
    def aliases(worker):
        model = worker.get_model()
        caches = [layer.kv_cache for layer in model.modules() if hasattr(layer, "kv_cache")]
        return [x.detach() for x in (*model.parameters(), *model.buffers(), *caches)]

    ALIASES[:] = sampler.engine._engine.collective_rpc(aliases)[0]
    assert sum(alias.untyped_storage().nbytes() for alias in ALIASES) > 1 << 22, "the cache is among them"


def is_of_vllm(kind):
    """Whether it is vLLM's engine or one of its layers."""
    return kind.__name__ == "EngineCore" or (issubclass(kind, torch.nn.Module) and kind.__module__.startswith("vllm"))


def left_at_a_restart():
    """Which parts of an engine were in memory when a new one was built, and the bytes of its tensors, by restart since the last call."""
    left = list(LEFT_AT_A_RESTART)
    LEFT_AT_A_RESTART.clear()
    return left


def on_two_engines(config, shares):
    """Samples of this rank on two engines, before and after one of rank 1 is killed; the warnings; the engines left at the end."""

    def engines():
        return [each for each in psutil.Process().children() if "rlx.rollout.engine_process" in each.cmdline()]

    policy = config.actor_rollout_ref
    config = replace(config, actor_rollout_ref=replace(policy, rollout=replace(policy.rollout, engines_per_gpu=2)))
    waiting = start_engines(config.actor_rollout_ref.rollout)
    tokenizer = load_tokenizer(policy.model.path, False)
    before, role = ROLES["rollout"], RolloutRole(config, CPU, tokenizer, ActorRole(config, CPU, tokenizer), waiting)
    ROLES["rollout"] = role
    role.sync(0)
    first = generate(shares, "train")
    if dist.get_rank() == 1:
        engines()[0].kill()
    role.rest()
    role.sync(1)
    again = generate(shares, "train")
    role.sampler.close()
    ROLES["rollout"] = before
    return first, again, len(engines())


def break_shutdown():
    """The engine that is there now will not end as it should."""

    def shutdown():
        raise RuntimeError("injected at shutdown")

    ROLES["rollout"].sampler.engine._client.engine_core.model_executor.shutdown = shutdown


def stop():
    ROLES.pop("rollout").sampler.close()
    ROLES.clear()
    ALIASES.clear()


def generate(shares, purpose, fails=None):
    """This rank's samples of its share; `fails` maps ranks to the calls that raise. The error instead, if there is one.

    Returns:
        samples or (class, message) of the error; the warnings of rlx; how often the plug-in was called.
    """
    from failing_plugin import Failing  # vLLM comes with it, and rlx imports that in its own way first

    Failing.calls, Failing.raises_at = 0, (fails or {}).get(dist.get_rank(), ())
    warnings = _Warnings()
    logging.getLogger("rlx").addHandler(warnings)
    try:
        result = ROLES["rollout"].generate(shares[dist.get_rank()], purpose)
    except Exception as error:
        result = type(error).__name__, str(error)
    finally:
        logging.getLogger("rlx").removeHandler(warnings)
    return result, warnings.texts, Failing.calls


def sample_as(changes):
    """Changes how samples for training are drawn; returns what was there, and how many tokens the sampler has completed."""
    role = ROLES["rollout"]
    before = role.sampling["train"]
    role.sampling["train"] = replace(before, **changes)
    return {name: getattr(before, name) for name in changes}, role.sampler.tokens


def rest_and_save(folder):
    """What lies between two generations of a run that saves."""
    ROLES["rollout"].rest()
    ROLES["actor"].begin_save(folder)
    ROLES["actor"].finish_save()
    ROLES["actor"].rest()


class _Warnings(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())
