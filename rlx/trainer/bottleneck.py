"""Which phase costs a run the most time, and the key to turn if the cause is a known one. Pure functions of `Timeline`'s costs."""

from collections.abc import Mapping

from rlx.config.schema import PPOConfig
from rlx.config.schema.roles import has_environment, has_reward_model
from rlx.trainer.progress import PHASES, duration

MUCH = 0.25  # of a phase, from which on a cause is named
BUSY = 0.6  # a GPU that is less busy while it samples waits for the sampler's Python
KEYS = {
    "old_log_prob": "algorithm.rollout_correction.bypass_mode=True takes the sampler's log-probs instead (docs/rollout.md)",
    "validate": "raise trainer.test_freq, or lower data.val_max_samples",
    "checkpoint": "raise trainer.save_freq, or set actor_rollout_ref.actor.checkpoint.async_save=True",
}


def costliest(costs: Mapping[str, float], steps: int, config: PPOConfig) -> str:
    """Say which phase of the steps cost most, and what to do; empty without steps.

    Args:
        costs: of all these steps, as `rlx.trainer.timeline.costs`.
    """
    phases = {name: costs[name] for name in PHASES if costs.get(name)}
    if not phases:
        return ""
    name = max(phases, key=lambda phase: phases[phase])
    share = phases[name] / costs["step"]
    said = f"{name.replace('_', ' ')}, {duration(phases[name] / steps)} of {duration(costs['step'] / steps)} a step ({share:.0%})"
    why = _why(name, costs, config)
    return f"{said}: {why}" if why else said


def _why(phase: str, costs: Mapping[str, float], config: PPOConfig) -> str:
    if phase == "rollout":
        return _why_rollout(costs, config)
    if phase == "reward" and not has_reward_model(config):
        return "reward functions run in reward.num_workers processes; raise it if there are cores (docs/rewards.md)"
    role = phase.removeprefix("update_")
    stalled = costs.get(f"stall/{role}", 0.0) / costs[phase]
    if not costs.get("cpu") and stalled > MUCH / 2:
        model = "critic.model" if role == "critic" else "actor_rollout_ref.model"
        return f"compute waits for offloading's copies in {stalled:.0%} of it; {model}.activation_offload.save=auto copies less"
    return KEYS.get(phase, "")


def _why_rollout(costs: Mapping[str, float], config: PPOConfig) -> str:
    rollout = config.actor_rollout_ref.rollout
    tail, idle, waiting = (costs.get(name, 0.0) / costs["rollout"] for name in ("tail", "idle", "waiting"))
    busy = costs["busy"] / costs["known"] if costs.get("known") else 1.0
    if not costs.get("cpu") and rollout.name == "hf":
        return "transformers samples; set actor_rollout_ref.rollout.name=vllm"
    if tail > MUCH:
        return (
            f"{tail:.0%} of it waits for the last few answers; lower data.max_response_length, or raise data.train_batch_size "
            "(docs/slow_generation.md)"
        )
    if has_environment(config) and idle > MUCH:
        return f"no request runs in {idle:.0%} of it, because environments work; raise environment.processes"
    if busy < BUSY:
        more = f"raise actor_rollout_ref.rollout.engines_per_gpu={rollout.engines_per_gpu}"
        more = (
            more
            if rollout.tensor_model_parallel_size == 1
            else "lower rollout.tensor_model_parallel_size if the model fits"
        )
        return f"the GPU is busy in {busy:.0%} of it and else waits for vLLM's scheduler; {more} (docs/rollout.md)"
    if waiting > 2 * MUCH:
        return f"requests wait for a place in {waiting:.0%} of it; raise actor_rollout_ref.rollout.max_num_seqs"
    return ""
