"""What a run is predicted to hold in each phase, summed by hand for a small decoder."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from rlx.config.check.rules_memory import remedies
from rlx.config.compose.command_line import compose
from rlx.config.forecast.forecast_text import PARTS, long_text, role_checkpoints, short_text
from rlx.config.forecast.memory_forecast import MemoryForecast
from rlx.config.machine import Cluster, Machine
from rlx.driver import main
from rlx.offload.plan.run_memory import NO_LIMIT, Phase
from rlx.offload.plan.shapes import SHAPES

DOCS = Path(__file__).parents[3] / "docs"
SMALL = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100},
}
LAYER = 2 * 64 * (64 + 32) + 3 * 64 * 128 + 2 * 64
ROOT = 2 * 100 * 64 + 64
N = ROOT + 2 * LAYER
TOKENS = 4 * 16  # four sequences of 6 + 10 tokens
INPUTS = 2 * 64 * TOKENS
# Two norms; q, attention's result, k, v and its sums; the MLP's four results. Backward: the input, two gradients, gate and up.
WORKING = (2 * 8 * 64 + 4 * (64 + 32) + 16 + 8 * 128 + 6 * 64 + 4 * 128) * TOKENS
GATHERED = 2 * (ROOT + 2 * LAYER)
SUMMED = 4 * LAYER
MODEL, ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("model", "actor", "ref", "rollout"))
KL = f"{ACTOR}.use_kl_loss=True"


def machine(gpus: int = 1, device_gb: float = 1.0, host_gb: float = 10.0) -> Machine:
    return Machine(
        gpus, 8, frozenset(), vllm="0.26.0", device_bytes=int(device_gb * 1e9), host_bytes=int(host_gb * 1e9)
    )


@pytest.fixture
def forecast(tmp_path: Path):
    """`forecast(*overrides, on=machine(), **changes of the model)`."""

    def of(*overrides: str, on: Machine | None = None, **changes: object) -> MemoryForecast:
        (tmp_path / "config.json").write_text(json.dumps({**SMALL, **changes}))
        composed = compose(
            [
                *(f"{MODEL}.path={tmp_path}", "data.train_batch_size=8", "data.max_prompt_length=6"),
                *("data.max_response_length=10", f"{ACTOR}.ppo_mini_batch_size=8"),
                *(f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", f"{ROLLOUT}.name=hf", "algorithm.adv_estimator=grpo"),
                *("trainer.n_gpus_per_node=1", *overrides),
            ]
        )
        return MemoryForecast.of(composed.config, on or machine())

    return of


def parts(phase: Phase) -> dict[str, float]:
    return {name: nbytes for name, nbytes in phase.parts.items() if nbytes}


def test_an_update_is_the_sum_of_its_parts(forecast):
    update = forecast().phase("update_actor")
    assert update.where == "backward"
    assert parts(update) == {
        "others": 2 * N,  # the copy of the weights of rollout.name=hf, in bf16
        "weights": 4 * N,
        "gradients": 4 * N,
        "optimizer": 8 * N,
        "gathered": GATHERED + SUMMED,
        "working": INPUTS + WORKING,  # in the second layer, while the first one's inputs wait
    }
    assert update.peak == 18 * N + GATHERED + SUMMED + INPUTS + WORKING
    assert update.limit == pytest.approx(0.94e9)
    assert update.host == update.disk == 0


def test_the_optimizers_step_is_the_peak_only_where_its_state_comes_for_it(forecast):
    short = ("data.max_prompt_length=1", "data.max_response_length=1", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1")
    assert forecast(*short).phase("update_actor").where == "head"  # which has FSDP's gathered weights beside the state
    step = forecast(*short, f"{ACTOR}.fsdp_config.optimizer_offload=True").phase("update_actor")
    assert step.where == "optimizer step"
    assert step.peak == (2 + 4 + 4 + 8) * N
    assert step.parts["gathered"] == 0


def test_log_probs_hold_no_gradients(forecast):
    found = forecast(f"{ACTOR}.ppo_mini_batch_size=4")
    phase = found.phase("old_log_prob")
    assert found.names == ["rollout", "old_log_prob", "update_actor", "sync"]
    assert "old_log_prob" not in forecast().names and "pass of their own" not in long_text(forecast()), "one update"
    assert "old log-probs of 4 of 8 prompts take a pass of their own: the first update gives" in long_text(found)
    assert parts(phase) == {
        "others": 2 * N,
        "weights": 4 * N,
        "optimizer": 8 * N,
        "gathered": GATHERED,
        "working": 2 * (3 * 64 + 3 * 128) * TOKENS,
    }


def test_a_rollout_of_transformers_has_weights_and_cache(forecast):
    rollout = forecast(f"{ROLLOUT}.n=3").phase("rollout")
    cache = 8 * 3 * 16 * 2 * 2 * 2 * 16 * 2  # sequences, tokens, keys and values, layers, heads, width, bytes
    assert parts(rollout) == {"others": 12 * N, "sampler": 2 * N + cache}
    few = forecast(f"{ROLLOUT}.n=3", f"{ROLLOUT}.max_num_seqs=2").phase("rollout")
    assert few.parts["sampler"] == 2 * N + cache / 12


def test_a_rollout_of_vllm_has_its_share_of_all_memory(forecast):
    on = machine(device_gb=10)
    found = forecast(f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.gpu_memory_utilization=0.6", on=on)
    rollout = found.phase("rollout")
    assert parts(rollout) == {"others": 12 * N, "sampler": 6e9}
    assert rollout.limit == 8e9
    assert found.phase("update_actor").parts["others"] == 0
    assert found.phase("sync").parts["sampler"] == 2 * N
    awake = forecast(f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.free_cache_engine=False", on=on)
    assert awake.phase("update_actor").parts["others"] == awake.phase("sync").parts["sampler"] == 5e9
    apart = forecast(f"{ROLLOUT}.name=vllm", "trainer.n_rollout_gpus=1", on=on)
    assert parts(apart.phase("rollout")) == {"sampler": 5e9} and "sampler" not in parts(apart.phase("sync"))
    assert apart.phase("update_actor").parts["others"] == 0
    assert apart.host_bytes == on.host_bytes, "the sampler keeps nothing there"


def test_vllms_share_must_hold_the_weights_and_one_sequence(forecast):
    token = 2 * 2 * 2 * 16 * 2
    small = Machine(1, 8, frozenset(), device_bytes=4 * (N + 8 * token), host_bytes=10**9)
    found = forecast(f"{ROLLOUT}.name=vllm", on=small)
    assert found.phase("rollout").lacking == 0  # half of the device is its share
    assert found.phase("rollout", 17).lacking == token
    quarter = forecast(f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.gpu_memory_utilization=0.25", on=machine(device_gb=8))
    assert quarter.longest("rollout") == (2 * 10**9 - 2 * N) // token // 64 * 64


def test_sync_has_the_largest_tensor_in_one_piece(forecast):
    assert parts(forecast().phase("sync")) == {
        "weights": 4 * N,
        "optimizer": 8 * N,
        "gathered": 4 * 100 * 64,
        "sampler": 2 * N,
    }


# Settings


def test_processes_share_weights_and_rows(forecast):
    reshards = f"{ACTOR}.fsdp_config.reshard_after_forward=True"
    four = forecast("trainer.n_gpus_per_node=4", reshards, on=machine(4)).phase("update_actor")
    assert [four.parts[name] for name in ("weights", "gradients", "optimizer")] == [N, N, 2 * N]
    assert four.parts["gathered"] == GATHERED + SUMMED
    small, large = (forecast("trainer.n_gpus_per_node=4", on=machine(4, share * N / 1e9)) for share in (66.7, 66.6))
    assert small.phase("update_actor").parts["gathered"] == 2 * N + 2 * 4 * N, "they stay, and so do whole gradients"
    assert small.phase("old_log_prob").parts["gathered"] == 2 * 2 * N, "twice: also in one piece"
    assert large.phase("update_actor").parts["gathered"] == GATHERED + SUMMED
    assert small.decided().config.actor_rollout_ref.actor.fsdp_config.reshard_after_forward == "never"
    ahead = forecast("trainer.n_gpus_per_node=4", f"{ACTOR}.fsdp_config.forward_prefetch=True", on=small.machine)
    assert ahead.phase("update_actor").parts["gathered"] == GATHERED + SUMMED, "layers are gathered ahead, as asked"
    # Two of the eight samples fall to each.
    assert four.parts["working"] == (INPUTS + WORKING) / 2
    pairs = forecast("trainer.n_gpus_per_node=4", f"{ACTOR}.fsdp_config.fsdp_size=2", on=machine(4))
    assert pairs.phase("update_actor").parts["weights"] == 2 * N


def test_neighbours_that_share_sequences_have_half_of_them_each(forecast):
    found = forecast("trainer.n_gpus_per_node=2", f"{ACTOR}.ulysses_sequence_parallel_size=2", on=machine(2))
    assert found.phase("update_actor").parts["working"] == (INPUTS + WORKING) / 2


def test_types_of_weights_activations_and_sums(forecast):
    narrow = f"{ACTOR}.fsdp_config.model_dtype=bf16"
    masters = forecast(narrow).phase("update_actor")
    assert [masters.parts[name] for name in ("weights", "gradients", "optimizer")] == [2 * N, 4 * N, 12 * N]
    alone = forecast(narrow, f"{ACTOR}.ppo_micro_batch_size_per_gpu=8").phase("update_actor")
    assert alone.parts["gradients"] == 2 * N, "nothing is summed over micro-batches"
    sums = f"{ACTOR}.fsdp_config.mixed_precision.reduce_dtype=bf16"
    bf16 = forecast(narrow, sums, f"{ACTOR}.optim.master_weights=False").phase("update_actor")
    assert [bf16.parts[name] for name in ("weights", "gradients", "optimizer")] == [2 * N, 2 * N, 4 * N]
    assert bf16.parts["gathered"] in (SUMMED, 0)  # nothing is cast; the step has no sums
    fp32 = forecast(f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp32").phase("update_actor")
    assert fp32.parts["gathered"] == 0  # one process, stored, computed and summed in one type
    assert fp32.parts["working"] > 1.4 * (INPUTS + WORKING)
    narrow = forecast(f"{ACTOR}.fsdp_config.mixed_precision.reduce_dtype=bf16").phase("update_actor")
    assert narrow.parts["gathered"] == GATHERED + 2 * LAYER
    kept = forecast(f"{ACTOR}.fsdp_config.reshard_after_forward=False", num_hidden_layers=4)
    assert kept.phase("old_log_prob").parts["gathered"] == 2 * (ROOT + 4 * LAYER)


@pytest.mark.parametrize(
    ("options", "stays", "host", "disk"),
    [
        ((), INPUTS, 0, 0),
        (("enable_activation_offload=True",), 0, 2 * INPUTS, 0),
        (("enable_activation_offload=True", "activation_offload.max_host_bytes=10000"), 2 * INPUTS - 10000, 10000, 0),
        (("enable_activation_offload=True", "activation_offload.tier=disk"), 0, 0, 2 * INPUTS),
    ],
)
def test_where_the_inputs_of_layers_wait(forecast, options, stays, host, disk):
    update = forecast(*(f"{MODEL}.{option}" for option in options)).phase("update_actor")
    assert update.where == "backward"
    assert (update.parts["working"], update.host, update.disk) == (WORKING + stays, host, disk)


def test_the_modes_of_activations_are_ordered(forecast):
    flag = f"{MODEL}.enable_activation_offload=True"
    no_checkpointing = f"{MODEL}.enable_gradient_checkpointing=False"
    large = (f"{ACTOR}.ppo_micro_batch_size_per_gpu=8", "data.max_response_length=1000")

    def update(*options: str) -> Phase:
        return forecast(*large, *options, num_hidden_layers=16).phase("update_actor")

    plain, checkpointing, boundary = update(no_checkpointing), update(), update(flag)
    attention, every = update(flag, f"{MODEL}.activation_offload.save=attention"), update(flag, no_checkpointing)
    assert plain.peak > checkpointing.peak > boundary.peak
    assert boundary.host < attention.host < every.host
    assert update(flag, f"{MODEL}.activation_offload.save=auto") == boundary
    tiled = forecast(*large, flag, f"{MODEL}.tiled_mlp=64", num_hidden_layers=16).phase("update_actor")
    assert tiled.peak < boundary.peak


def test_what_waits_on_the_host_is_not_on_the_device(forecast):
    fsdp = f"{ACTOR}.fsdp_config"
    both = forecast(f"{fsdp}.param_offload=True", f"{fsdp}.optimizer_offload=True", KL)
    ref, update = both.phase("ref"), both.phase("update_actor")
    assert (ref.parts["others"], ref.host) == (2 * N, 12 * N)
    assert update.parts["others"] == (2 + 4) * N  # the reference rests on the device
    assert update.host == 8 * N
    # A state smaller than the pieces in which it comes is there whole.
    assert (update.where, update.peak) == ("optimizer step", (6 + 4 + 4 + 8) * N)
    policy = forecast(f"{fsdp}.offload_policy=True", KL)
    assert parts(policy.phase("update_actor"))["working"] == INPUTS + WORKING
    assert set(parts(policy.phase("update_actor"))) == {"others", "gathered", "working"}
    assert policy.phase("update_actor").host == 16 * N
    assert policy.phase("ref").host == policy.phase("rollout").host == 12 * N


def test_adapters_alone_have_gradients_and_states(forecast):
    adapters = 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    update = forecast(f"{MODEL}.lora_rank=4").phase("update_actor")
    expected = [4 * (N + adapters), 4 * adapters, 8 * adapters]
    assert [update.parts[name] for name in ("weights", "gradients", "optimizer")] == expected
    assert update.parts["gathered"] == GATHERED + 2 * adapters + 4 * adapters / 2


def test_adapters_on_bf16_are_fp32_and_their_reference_is_the_actor(forecast):
    adapters = 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    found = forecast(f"{MODEL}.lora_rank=4", f"{ACTOR}.fsdp_config.model_dtype=bf16", KL)
    update, ref = found.phase("update_actor"), found.phase("ref")
    expected = [2 * N + 4 * adapters, 4 * adapters, 8 * adapters]
    assert [update.parts[name] for name in ("weights", "gradients", "optimizer")] == expected
    assert found.names == ["rollout", "ref", "update_actor", "sync"]
    assert ref.parts["others"] == found.phase("old_log_prob").parts["others"], "no second model"
    assert ref.peak == found.phase("old_log_prob").peak


def test_a_sampler_that_takes_adapters_keeps_its_base_in_host_memory(forecast):
    vllm = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.dtype=bf16", f"{MODEL}.lora_rank=4")
    adapters = 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128)) * 2
    found, merged = forecast(*vllm), forecast(*vllm, f"{MODEL}.lora.merge=True")
    assert found.phase("update_actor").host == 2 * 2 * (N + adapters)  # blocks of powers of two
    assert merged.phase("update_actor").host == found.phase("rollout").host == 0
    offloaded = forecast(
        *vllm, f"{ACTOR}.fsdp_config.param_offload=True", f"{ACTOR}.fsdp_config.optimizer_offload=True"
    )
    assert parts(offloaded.phase("sync"))["weights"] == 4 * (N + adapters), (
        "the actor's base goes before the sampler's comes"
    )
    assert offloaded.phase("sync").parts["sampler"] == 0


@pytest.mark.parametrize(("experts", "nbytes"), [(256, 1), (257, 2)])
def test_recorded_experts_of_the_batch_are_on_the_host(forecast, experts, nbytes):
    sizes = {"model_type": "qwen3_moe", "num_experts": experts, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    record = f"{ROLLOUT}.enable_rollout_routing_replay=True"
    found = [forecast(f"{ROLLOUT}.n=5", *more, **sizes).phase("update_actor") for more in ((), (record,))]
    assert found[1].host - found[0].host == 8 * 5 * 16 * 2 * 3 * nbytes
    assert found[1].parts == found[0].parts


def test_a_critic_has_no_head(forecast):
    found = forecast("algorithm.adv_estimator=gae")
    assert found.names == ["rollout", "values", "update_critic", "update_actor", "sync"]
    critic = found.phase("update_critic")
    assert critic.parts["weights"] == 4 * (N - 100 * 64)
    assert critic.parts["others"] == 14 * N
    assert found.phase("values").parts["others"] == 14 * N


def test_a_reference_has_weights_alone(forecast):
    found = forecast(KL, f"{REF}.log_prob_micro_batch_size_per_gpu=2")
    assert found.names == ["rollout", "ref", "update_actor", "sync"]
    ref = parts(found.phase("ref"))
    assert (ref["weights"], ref["others"]) == (4 * N, 14 * N)
    assert "gradients" not in ref and "optimizer" not in ref
    assert ref["working"] == found.phase("old_log_prob").parts["working"] / 2


# Lengths


def test_frozen_layers_wait_on_the_host(forecast):
    streams = f"{MODEL}.layer_offload=True"
    resident, streamed = forecast(KL, num_hidden_layers=3), forecast(KL, streams, num_hidden_layers=3)
    before, after = resident.phase("ref"), streamed.phase("ref")
    assert (
        after.parts["weights"] == before.parts["weights"] - 4 * 3 * LAYER + 2 * 2 * LAYER
    )  # in fp32; two layers in bf16
    assert after.parts["gathered"] == 2 * ROOT == before.parts["gathered"] - 2 * 3 * LAYER
    assert after.host == 2 * 3 * LAYER
    # The actor's layers are trained and stay. Between passes the reference has none on the device.
    assert resident.phase("update_actor").peak - streamed.phase("update_actor").peak == 4 * 3 * LAYER
    (line,) = [line for line in long_text(streamed).splitlines() if "layer_offload" in line]
    assert f"{MODEL}.layer_offload: ref streams 0.00 GB from host memory, once in each without backward" in line
    assert "GB/s" not in line, "the link of this machine is not known"
    assert "layer_offload" not in long_text(resident)
    assert forecast(KL, streams, on=Machine(0, 8, frozenset())).streaming == []


def test_a_quantised_base_has_nine_sixteenths_of_a_byte_per_weight(forecast):
    lora = (f"{MODEL}.lora_rank=2", f"{ACTOR}.fsdp_config.model_dtype=bf16")
    full, small = forecast(*lora), forecast(*lora, f"{MODEL}.quantization=nf4")
    update, smaller = full.phase("update_actor").parts, small.phase("update_actor").parts
    assert smaller["weights"] == update["weights"] - (2 - 9 / 16) * (N - ROOT)
    streamed = forecast(*lora, f"{MODEL}.quantization=nf4", f"{MODEL}.layer_offload=True", num_hidden_layers=3)
    ((_, memory),) = streamed.streaming
    assert memory.streamed == 3 * LAYER * 9 / 16
    assert memory.buffers == 2 * LAYER * 9 / 16


def test_a_host_too_small_for_streamed_weights_is_told_what_would_fit(forecast):
    streams = (f"{MODEL}.lora_rank=2", f"{ACTOR}.fsdp_config.model_dtype=bf16", f"{MODEL}.layer_offload=True")
    needed = max(phase.host for phase in forecast(*streams, num_hidden_layers=8).phases())
    little = replace(machine(host_gb=0.7 * needed / 1e9), packages=frozenset({"bitsandbytes"}))
    text = remedies(forecast(*streams, num_hidden_layers=8, on=little))
    others = f"{MODEL}.quantization=nf4, or {MODEL}.layer_offload_directory=FOLDER"
    assert text == f"set {MODEL}.layer_offload=False, or {others}"
    on_disk = forecast(*streams, f"{MODEL}.layer_offload_directory=/tmp", num_hidden_layers=8)
    assert max(phase.host for phase in on_disk.phases()) == needed - 2 * 8 * LAYER
    (line,) = [line for line in long_text(on_disk).splitlines() if "layer_offload" in line]
    assert "GB from /tmp, twice" in line


def test_one_process_without_room_for_copies_of_all_layers_is_told_to_copy_them_one_by_one(forecast):
    key, deep = f"{ACTOR}.fsdp_config.reshard_after_forward", {"num_hidden_layers": 12}
    peaks = [max(x.peak for x in forecast(f"{key}={value}", **deep).phases()) for value in (True, "auto")]
    assert peaks[1] - peaks[0] == 2 * 10 * LAYER
    assert f"{key}=True" in remedies(forecast(on=machine(device_gb=peaks[1] / 1e9), **deep))
    two = forecast("trainer.n_gpus_per_node=2", on=machine(2, device_gb=peaks[1] / 4e9), **deep)
    assert key not in remedies(two)


def test_rows_and_tokens_limit_a_micro_batch(forecast):
    dynamic = [f"{ACTOR}.ppo_micro_batch_size_per_gpu=null", f"{ACTOR}.use_dynamic_bsz=True"]

    def working(tokens: int, length: int | None = None, *more: str) -> float:
        found = forecast(*dynamic, f"{ACTOR}.ppo_max_token_len_per_gpu={tokens}", *more)
        return found.phase("update_actor", length).parts["working"]

    per_token = (INPUTS + WORKING) / TOKENS
    large = f"{ROLLOUT}.n=8"
    assert working(100, None, large) == 100 * per_token
    assert working(100, 200, large) == 200 * per_token  # a longer one is a micro-batch of its own
    assert working(10**6, None) == 8 * 16 * per_token  # there are no more samples


def test_a_micro_batch_of_conversations_that_fork_may_be_full(forecast):
    """A mini-batch of 8 samples in micro-batches of up to 64 rows: one row each, or up to three, or any number."""
    rows = [f"{ACTOR}.ppo_micro_batch_size_per_gpu=64", "environment.name=guessing"]

    def working(*overrides: str, is_least: bool = False) -> float:
        found = forecast(*rows, *(f"{ROLLOUT}.multi_turn.{each}" for each in overrides))
        return found.phase("update_actor", is_least=is_least).parts["working"]

    fork = "on_rewritten_history=fork"
    assert working() == working("on_rewritten_history=keep", "max_assistant_turns=3") > 0
    assert working(fork, "max_assistant_turns=3") == 3 * working()
    assert working(fork) == 8 * working()
    assert working(fork, is_least=True) == working(is_least=True)


def test_a_prompt_counts_once_for_its_responses(forecast):
    def working(*overrides: str) -> float:
        return forecast(f"{ROLLOUT}.n=4", *overrides).phase("update_actor").parts["working"]

    apart, rows = f"{MODEL}.use_shared_prefix=False", f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    assert working(apart) == INPUTS + WORKING
    assert working() == (INPUTS + WORKING) * (6 + 4 * 10) / TOKENS
    assert working(f"{rows}=6") == (INPUTS + WORKING) * (3 * 6 + 6 * 10) / TOKENS, (
        "two groups, one of them in two parts"
    )
    assert working(f"{rows}=1") == working(f"{rows}=1", apart)
    assert working(f"{MODEL}.attn_implementation=eager") == working(f"{MODEL}.attn_implementation=eager", apart)


def test_of_packed_rows_one_alone_is_sure_to_be_long(forecast):
    found = forecast(f"{ACTOR}.ppo_micro_batch_size_per_gpu=8", "data.max_response_length=1000")
    most, sure = (found.phase("old_log_prob", is_least=least).parts["working"] for least in (False, True))
    assert most == 8 * sure
    padded = forecast(f"{MODEL}.use_remove_padding=False", "data.max_response_length=1000")
    assert padded.phase("old_log_prob", is_least=True) == padded.phase("old_log_prob")


def test_the_longest_fits_and_the_next_does_not(forecast):
    found = forecast(on=machine(device_gb=0.1))
    for name in ("rollout", "old_log_prob", "update_actor"):
        longest = found.longest(name)
        assert longest is not None and longest % 64 == 0
        assert found.phase(name, longest).fits()
        assert not found.phase(name, longest + 64).fits()
    assert found.longest("sync") is None
    assert forecast(on=machine(device_gb=0.001)).longest("update_actor") == 0


def test_the_longest_is_no_longer_than_the_models_positions(forecast):
    def rows(**changes: object) -> dict[str, list[str]]:
        lines = long_text(forecast(**changes)).partition("peaks in GB")[2].splitlines()
        return {line.split()[0]: line.split()[3:5] for line in lines if len(line.split()) > 4}

    free, bound = rows(), rows(max_position_embeddings=640)
    longest, full = free["update_actor"]
    assert int(longest.replace(",", "")) > 640 and full == "device"
    assert bound["update_actor"] == bound["rollout"] == ["640", "positions"]
    assert bound["sync"] == free["sync"] == ["any", "-"]
    assert rows(max_position_embeddings=10**9) == free
    assert "update_actor" in short_text(forecast(max_position_embeddings=640)) and " 640" in short_text(
        forecast(max_position_embeddings=640)
    )


def test_the_hosts_memory_limits_the_longest_too(forecast):
    flag = f"{MODEL}.enable_activation_offload=True"
    plenty, little = (forecast(flag, on=machine(host_gb=gb)).longest("update_actor") for gb in (10, 0.01))
    assert little == 10**7 // (2 * INPUTS // 16) // 64 * 64
    assert plenty is not None and plenty > little
    capped = f"{MODEL}.activation_offload.max_host_bytes={NO_LIMIT}"
    assert forecast(flag, capped, on=machine(host_gb=0.01)).longest("update_actor") == little


# What is not known


def test_of_an_unknown_architecture_nothing_is_predicted(forecast):
    found = forecast(model_type="starcoder2")
    assert found.names == found.phases() == []
    (line,) = short_text(found).splitlines()
    assert line.startswith("memory: no prediction for actor: ") and "starcoder2" in line
    assert long_text(found) == line


def test_a_model_that_is_not_here_is_named_once(tmp_path: Path):
    composed = compose([f"{MODEL}.path=rlx-tests/nowhere", KL, f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"])
    (line,) = short_text(MemoryForecast.of(composed.partial, machine())).splitlines()
    assert line == (
        "memory: no prediction for actor, critic, ref: the config.json of rlx-tests/nowhere is not on this machine"
    )


def test_roles_that_are_known_are_predicted_beside_those_that_are_not(forecast, tmp_path: Path):
    judge = tmp_path / "judge"
    judge.mkdir()
    (judge / "config.json").write_text('{"model_type": "gpt2"}')
    found = forecast("reward_model.enable=True", f"reward_model.model.path={judge}")
    assert "reward" not in found.names and "update_actor" in found.names
    assert found.phase("update_actor") == forecast().phase("update_actor")
    assert short_text(found).startswith("memory: no prediction for reward: ")


def test_the_memory_of_a_cluster_is_not_known(forecast):
    cluster = Machine(0, 4, frozenset(), Cluster("head:6379", (8, 8)))
    found = forecast("trainer.n_gpus_per_node=8", "trainer.nnodes=2", on=cluster)
    assert found.on_device
    assert found.phase("update_actor").parts["weights"] == 4 * N / 16
    assert all(phase.fits() for phase in found.phases())
    assert [line.split()[-2:] for line in short_text(found).splitlines()[1:4]] == [["?", "?"]] * 3


# In words


def of_7b(forecast, state: object, device_gb: float, host_gb: float = 300, response: int = 8192) -> MemoryForecast:
    """Qwen2-7B's shape in bf16 with fp32 masters, one sequence in a micro-batch, on one device."""
    return forecast(
        *(f"{ACTOR}.fsdp_config.model_dtype=bf16", f"{ACTOR}.fsdp_config.optimizer_state={state}"),
        *(
            f"{MODEL}.enable_activation_offload=True",
            f"{MODEL}.tiled_mlp=auto",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
        ),
        *(f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.gpu_memory_utilization=0.3", f"data.max_response_length={response}"),
        on=machine(device_gb=device_gb, host_gb=host_gb),
        **SHAPES["qwen2-7b"],
    )


def test_auto_keeps_as_much_of_the_state_on_the_device_as_all_phases_leave(forecast):
    assert of_7b(forecast, "auto", 300).decided().split_states() == []
    tight = of_7b(forecast, "auto", 100).decided()
    ((name, staying, moving),) = tight.split_states()
    total = 12 * 7_615_616_512
    assert name == "actor" and 0 < staying < total and staying + moving == pytest.approx(total)
    assert tight.config.actor_rollout_ref.actor.fsdp_config.optimizer_state == staying
    assert all(phase.fits() for phase in tight.phases())
    assert max(phase.peak - phase.limit for phase in tight.phases()) == pytest.approx(0, abs=2)
    update = tight.phase("update_actor")
    assert update.parts["optimizer"] == staying and update.host > moving
    text = long_text(of_7b(forecast, "auto", 100))
    assert f"optimizer state: of the actor's 91.4 GB in each process {staying / 1e9:.1f} stay on the device" in text
    least = of_7b(forecast, "auto", 50).decided()
    assert least.split_states()[0][1] == 0, "a device that is too small keeps nothing"


def test_a_split_state_moves_bytes_from_the_device_to_the_host(forecast):
    fsdp = f"{ACTOR}.fsdp_config"
    places = ("device", 2 * N, "host")
    whole, split, host = (forecast(f"{fsdp}.optimizer_state={place}").phase("update_actor") for place in places)
    assert [phase.parts["optimizer"] for phase in (whole, split, host)] == [8 * N, 2 * N, 0]
    assert [phase.host for phase in (whole, split, host)] == [0, 6 * N, 8 * N]
    assert host == forecast(f"{fsdp}.optimizer_offload=True").phase("update_actor")


def test_without_an_accelerator_one_line_speaks_of_the_host(forecast):
    cpu = Machine(0, 4, frozenset(), host_bytes=10**9)
    found = forecast("trainer.n_gpus_per_node=2", f"{MODEL}.enable_activation_offload=True", on=cpu)
    update = found.phase("update_actor")
    assert [update.parts[name] for name in ("weights", "gradients", "optimizer")] == [2 * N, 2 * N, 4 * N]
    assert update.parts["others"] == 4 * N  # the sampler's copy is in fp32 as well
    assert update.host == 0 and update.limit == pytest.approx(0.47e9)
    (line,) = short_text(found).splitlines()
    most = max(phase.peak for phase in found.phases())
    assert f"up to {2 * most / 1e9:.2f} of 1.00 GB of host memory in 2 process(es), in update_actor" in line
    apart = forecast("trainer.n_rollout_gpus=3", f"{MODEL}.enable_activation_offload=True", on=cpu)
    both = apart.phase("update_actor").peak + 3 * apart.phase("rollout").peak
    assert (
        f"up to {both / 1e9:.2f} of 1.00 GB of host memory in 4 process(es), in update_actor and rollout"
        in short_text(apart)
    )


SAVES = ("trainer.save_freq=1", f"{ACTOR}.fsdp_config.model_dtype=bf16", f"{ACTOR}.checkpoint.async_save=True")


@pytest.mark.parametrize(
    ("overrides", "nbytes", "staged"),
    [
        ((), 14, 14),
        ((f"{ACTOR}.fsdp_config.optimizer_offload=True",), 14, 2),
        ((f"{ACTOR}.fsdp_config.optimizer_offload=True", f"{ACTOR}.fsdp_config.param_offload=True"), 14, 0),
        ((f"{ACTOR}.fsdp_config.optimizer_offload=True", f"{ACTOR}.strategy=fsdp"), 14, 14),
        ((f"{ACTOR}.checkpoint.save_contents=[model,hf_model]",), 4, 2),
        ((f"{ACTOR}.checkpoint.async_save=False",), 14, 0),
    ],
)
def test_a_checkpoint_takes_disk_and_its_staging_host_memory(forecast, overrides, nbytes, staged):
    (actor,) = role_checkpoints(forecast(*SAVES, *overrides)).values()
    assert actor[:2] == (nbytes * N, staged * N), "bytes a weight: bf16, fp32 masters and moments"


def test_the_pages_on_memory_explain_all_columns_and_show_what_is_rejected(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen2-7b"]))
    (tmp_path / "mine.jsonl").write_text('{"prompt": "What is 7 + 5?", "answer": "12"}\n' * 300)
    (tmp_path / "reward.py").write_text("def compute_score(*_, **__):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    config = compose(["experiment=gsm8k_grpo_8gpu", f"{MODEL}.path=."]).config
    heads = [
        line
        for line in long_text(MemoryForecast.of(config, machine(8, 80.0, 2000.0))).splitlines()
        if " in GB " in line
    ]
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "planning.md").read_text(), re.M)
    columns = {column for head in heads for column in re.split("  +", head)[1:]}
    assert len(heads) == 2 and columns | {*PARTS} <= {name for row in rows for name in re.findall("`([^`]+)`", row)}
    (command,) = re.findall(r"^rlx check (.*)$", (DOCS / "out_of_memory.md").read_text(), re.M)
    assert main(["--check", *shlex.split(command.replace("Qwen/Qwen2.5-7B-Instruct", "."))]) == 2
    assert "1. the run does not fit into" in capsys.readouterr().err
