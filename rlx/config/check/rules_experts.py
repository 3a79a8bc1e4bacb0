"""Rules about mixtures of experts. Only workers see the model, so they refuse one without experts."""

from rlx.config.check.context import CheckContext, Faults

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
RECORDS, REPLAY = f"{ROLLOUT}.enable_rollout_routing_replay", f"{ACTOR}.router_replay.mode"
BALANCE, PREFIXES = f"{ACTOR}.router_aux_loss_coef", f"{ROLLOUT}.enable_prefix_caching"


def replay_has_a_record(s: CheckContext) -> Faults:
    """Experts are only replayed if the sampler returns them."""
    if s.value(REPLAY) == "R3" and not s.value(RECORDS):
        what, expected = f"{REPLAY}=R3 replays the sampler's experts, which it does not return", f"{RECORDS}=True"
        yield s.fault(what, expected, f"set {RECORDS}=True, or {REPLAY}=disabled", RECORDS, REPLAY)


def routers_can_be_watched(s: CheckContext) -> Faults:
    """Routers are watched in each process's own, whole sequences, and not in compiled layers."""
    watched = [key for key in (RECORDS, BALANCE) if s.value(key)]
    compiled, together = f"{ACTOR}.use_torch_compile", f"{ACTOR}.ulysses_sequence_parallel_size"
    for key, needed in ((compiled, False), (together, 1)):
        if watched and s.value(key) != needed:
            what = f"{watched[0]} watches routers, which it cannot with {key.rpartition('.')[2]}"
            yield s.fault(what, f"{key}={needed}", f"set {key}={needed}, or leave out {watched[0]}", key, *watched)


def vllm_keeps_experts_of_prefixes(s: CheckContext) -> Faults:
    """vLLM returns experts from the blocks of its prefix cache; 0.32 does not start without."""
    if s.value(RECORDS) and s.value(f"{ROLLOUT}.name") == "vllm" and not s.value(PREFIXES):
        what = "vLLM returns the experts of a sequence from the blocks of its prefix cache"
        yield s.fault(what, f"{PREFIXES}=True", f"set {PREFIXES}=True, or {RECORDS}=False", PREFIXES, RECORDS)


EXPERT_RULES = (replay_has_a_record, routers_can_be_watched, vllm_keeps_experts_of_prefixes)
