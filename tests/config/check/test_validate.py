"""Every rule: the commands that break it, and what the user is told."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from case_tables import ACTOR, CORRECTION, FORK, GAE, JUDGE, MODEL, ON_GPU, ROLLOUT, cases, composed
from omegaconf import OmegaConf

from rlx.config.check.declared import CheckContext, declared_needs_are_met
from rlx.config.check.rules import vllm_can_run_the_model
from rlx.config.check.validate import RULES, Verdict, check
from rlx.config.compose.build import build
from rlx.config.compose.command_line import Composed, compose
from rlx.config.forecast.forecast_text import long_text
from rlx.config.forecast.memory_forecast import MemoryForecast
from rlx.config.machine import Cluster, Machine
from rlx.config.schema.tree import LEAVES
from rlx.offload.plan.shapes import SHAPES

KL_OF_RLOO = "algorithm.use_kl_in_reward=True algorithm.adv_estimator=rloo"
OTHER_MODEL = ("experiment=arithmetic", f"{MODEL}.path=org/name")
NOT_WRITTEN = "the run cannot write to this folder"

CASES = cases("faults")


def whats(verdict: Verdict) -> list[str]:
    return [fault.what for fault in verdict.faults]


@pytest.mark.parametrize(("command", "starts", "remedy"), CASES, ids=[case[0] for case in CASES])
def test_a_broken_rule_gives_its_fault_and_no_other(verdict, command: str, starts: list[str], remedy: str):
    found = verdict(command.split(), machine(gpus=1) if command.endswith(ON_GPU) else None)
    assert len(found.faults) == len(starts), whats(found)
    assert all(what.startswith(start) for what, start in zip(whats(found), starts, strict=True)), whats(found)
    assert remedy in found.faults[0].remedy
    assert all(all((fault.got, fault.expected, fault.remedy)) for fault in found.faults)


def test_every_rule_and_every_declared_need_has_a_case(cpu_machine: Machine):
    reached: set[object] = set()
    for command, _, _ in CASES:
        found = composed(*command.split())
        s = CheckContext(found.partial, found.set_keys, machine(1) if command.endswith(ON_GPU) else cpu_machine)
        for rule in {*RULES} - reached | {declared_needs_are_met}:
            if faults := [*rule(s)]:
                reached |= {rule, *(fault.what for fault in faults)}
    assert {*RULES} <= reached
    assert {need.what for leaf in LEAVES.values() for need in leaf.info.needs} - reached == set()


@pytest.mark.parametrize(
    "command",
    [
        "",
        GAE,
        "trainer.n_gpus_per_node=64",
        f"{GAE} critic.optim.lr=1e-4 critic.model.enable_activation_offload=False",
        "critic.optim.lr=1e-5 trainer.critic_warmup=0",
        f"{JUDGE} reward.format=tags",
        "reward.format='[0-9]+'",
        "reward.format=tags algorithm.filter_groups.enable=True algorithm.filter_groups.metric=format",
        f"{JUDGE} reward_model.rule_weight=1.0 algorithm.filter_groups.enable=True algorithm.filter_groups.metric=rule_score",
        f"{ACTOR}.use_dynamic_bsz=True {ACTOR}.ppo_micro_batch_size_per_gpu=null {ACTOR}.ppo_max_token_len_per_gpu=176",
        f"{MODEL}.enable_gradient_checkpointing=False",
        f"{MODEL}.enable_gradient_checkpointing=False {MODEL}.activation_offload.save=all",
        f"{ACTOR}.strategy=fsdp {ACTOR}.fsdp_config.fsdp_size=2 trainer.n_gpus_per_node=4",
        f"experiment=arithmetic {MODEL}.path=Qwen/Qwen2.5-0.5B-Instruct",
        "trainer.val_only=True trainer.resume_mode=auto",
        f"trainer.val_only=True trainer.resume_mode=auto {GAE} critic.optim.lr=1e-4",
        f"{CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_threshold=0.5_5.0",
        f"{CORRECTION}.rollout_is=sequence {CORRECTION}.rollout_rs=[seq_sum_k1,token_k1] "
        f"{CORRECTION}.rollout_rs_threshold=2.0 {CORRECTION}.rollout_token_veto_threshold=1e-4",
        f"{CORRECTION}.rollout_rs=[seq_mean_k1,seq_mean_k3,seq_max_k2] "
        f"{CORRECTION}.rollout_rs_threshold=[0.999_1.001,0.002,0.1]",
        f"{JUDGE} reward_model.model.layer_offload=True",
        f"{CORRECTION}.bypass_mode=True",
        f"{ROLLOUT}.calculate_log_probs=False",
        f"{FORK} {ACTOR}.loss_agg_mode=seq-mean-token-mean {CORRECTION}.rollout_is=sequence",
        f"{FORK} {GAE} algorithm.time_step=turn algorithm.use_kl_in_reward=True",
    ],
)
def test_what_can_run_has_no_faults(verdict, command: str):
    assert whats(verdict(command.split())) == []


@pytest.mark.parametrize(
    ("command", "warning"),
    [
        (f"{ACTOR}.policy_loss.loss_mode=gspo", "gspo is defined as a mean over sequences"),
        (f"{ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.loss_agg_mode=seq-mean-token-mean", None),
        (f"{ACTOR}.policy_loss.loss_mode=cispo", None),
        ("algorithm.filter_groups.enable=True", None),
        ("algorithm.filter_groups.enable=True trainer.total_training_steps=null", "several batches of prompts"),
        ("algorithm.use_kl_in_reward=True", "grpo divides by the standard deviation of rewards with the KL in them"),
        ("algorithm.use_kl_in_reward=True algorithm.norm_adv_by_std_in_grpo=False", None),
        (KL_OF_RLOO, None),
        ("algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.kl_coef=0 " + KL_OF_RLOO, "kl_coef=0 stays 0"),
        ("algorithm.kl_ctrl.kl_coef=0 " + KL_OF_RLOO, None),
        (f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=k1", "the gradient of kl_loss_type=k1 is 0 on average"),
        (f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=k1+", None),
        ("trainer.n_rollout_gpus=1", "sampler and trainer take turns"),
        (f"trainer.n_rollout_gpus=1 {ROLLOUT}.partial.max_staleness=1 {CORRECTION}.rollout_is=token", None),
        (
            f"trainer.n_rollout_gpus=99 {ROLLOUT}.partial.max_staleness=1 {CORRECTION}.rollout_is=token",
            "n_gpus_per_node=1 and trainer.n_rollout_gpus=99 processes share",
        ),
        (f"{JUDGE} algorithm.filter_groups.enable=True", "a score is at least 1, which means little for a reward"),
        (f"{JUDGE} reward_model.rule_weight=1 algorithm.filter_groups.enable=True", None),
    ],
)
def test_algorithms_that_are_put_together_oddly_are_warned_of(verdict, command: str, warning: str | None):
    found = verdict(command.split())
    assert not found.faults
    assert [warning in text for text in found.warnings] == ([True] if warning else [])


def test_a_run_that_cannot_see_the_mismatch_says_so_once(verdict):
    blind = verdict([f"{ROLLOUT}.calculate_log_probs=False"]).warnings
    assert [text for text in blind if "mismatch with the trainer is not measured" in text] == list(blind)
    assert len(blind) == 1 and not verdict([]).warnings


@pytest.mark.parametrize(
    ("config", "overrides", "positions"),
    [
        ({"max_position_embeddings": 64}, [], "64"),
        ({"max_position_embeddings": 4096}, [], None),
        ({"n_positions": 64}, [], "64"),
        ({"text_config": {"max_position_embeddings": 64}}, [], "64"),
        ({}, [], None),
        ({"max_position_embeddings": 64}, [f"+{MODEL}.override_config.max_position_embeddings=4096"], None),
        ({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn", "factor": 1.5}}, [], "96"),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "yarn", "factor": 64.0}}, [], None),
    ],
)
def test_sequences_beyond_the_models_positions_are_warned_of(verdict, tmp_path, config, overrides, positions):
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [f"{MODEL}.path={tmp_path}", "trainer.memory_check=off", "data.max_prompt_length=100", *overrides]
    warned = [text for text in verdict(command).warnings if "max_position_embeddings" in text]
    assert len(warned) == (positions is not None)
    assert all(f"the {positions} positions of the actor's model" in text for text in warned)


# Files and folders


def test_an_unfinished_checkpoint_is_not_resumed_from_and_its_run_must_be_writable(verdict, tmp_path):
    checkpoint = tmp_path / "checkpoints/global_step_3"
    checkpoint.mkdir(parents=True)
    command = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"]
    assert whats(verdict(command)) == ["the checkpoint to resume from is none, or not finished"]
    (checkpoint / "driver.json").touch()
    assert whats(verdict(command)) == []
    # Where the run goes on in its own folder, that for new ones is not written to.
    assert whats(verdict([*command, f"trainer.default_local_dir={__file__}"])) == []


def test_a_cache_of_warm_starts_may_be_read_only(verdict, read_only: Path):
    command = [f"trainer.default_local_dir={read_only.parent}/runs", f"warm_start.cache_dir={read_only}"]
    assert whats(verdict(command)) == [NOT_WRITTEN]
    assert whats(verdict([*command, *OTHER_MODEL])) == [], "then there is no warm start"
    os.chmod(read_only, 0o755)
    (read_only / "warm_start_0123").mkdir()
    os.chmod(read_only, 0o555)
    assert whats(verdict(command)) == []


@pytest.mark.parametrize("below", ["", "new/folder"])
def test_a_folder_without_permission_is_a_fault(verdict, read_only: Path, below: str):
    (fault,) = verdict([f"trainer.default_local_dir={read_only / below}", *OTHER_MODEL]).faults
    assert fault.got == f"trainer.default_local_dir={read_only / below}: {read_only} is not writable"


def test_a_key_that_is_given_twice_is_a_warning(verdict):
    warnings = verdict(["trainer.seed=1", "experiment=calculator", "trainer.seed=2", "experiment=arithmetic"]).warnings
    (unused,) = [warning for warning in warnings if warning.startswith("set without effect:")]
    assert unused.splitlines()[1:] == [
        "    trainer.seed=1: trainer.seed=2 comes after it",
        "    experiment=calculator: experiment=arithmetic comes after it",
    ]
    assert not any("comes after it" in warning for warning in verdict(["trainer.seed=1"]).warnings)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc")
def test_a_folder_that_cannot_be_made_is_a_fault_for_root_too(verdict):
    (fault,) = verdict(["trainer.default_local_dir=/proc/new/runs", *OTHER_MODEL]).faults
    assert fault.what == NOT_WRITTEN
    assert re.search(r"/proc (is not writable|cannot hold a new folder)", fault.got)


def test_the_check_of_a_folder_leaves_nothing_there(verdict, tmp_path: Path):
    assert whats(verdict([f"trainer.default_local_dir={tmp_path}/new", *OTHER_MODEL])) == []
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def read_only() -> Iterator[Path]:
    """A folder in which this process may not write, not even as root, who then is nobody for the test."""
    user = os.geteuid()
    with TemporaryDirectory() as name:
        os.chmod(name, 0o555)
        if user == 0:
            os.chown(name, 65534, 65534)
            os.seteuid(65534)
        yield Path(name)
        os.seteuid(user)
        os.chmod(name, 0o755)


# The machine


def machine(gpus: int = 0, cluster: Cluster | None = None, packages: tuple[str, ...] = ()) -> Machine:
    return Machine(gpus=gpus, cpus=4, packages=frozenset(packages), cluster=cluster)


@pytest.mark.parametrize(
    ("command", "where", "faults"),
    [
        ("trainer.n_gpus_per_node=2", machine(gpus=2), []),
        ("trainer.n_gpus_per_node=3", machine(gpus=2), ["more GPUs are requested than available"]),
        ("trainer.n_gpus_per_node=3 trainer.device=cpu", machine(gpus=2), []),
        ("trainer.n_gpus_per_node=3", machine(gpus=0), []),
        ("trainer.n_gpus_per_node=4 trainer.nnodes=2", machine(cluster=Cluster("h:1", (4, 8, 0))), []),
        (
            "trainer.n_gpus_per_node=4 trainer.nnodes=3",
            machine(cluster=Cluster("h:1", (4, 8, 0))),
            ["more GPUs are requested than available"],
        ),
        (
            "trainer.n_gpus_per_node=9",
            machine(gpus=9, cluster=Cluster("h:1", (8, 8))),
            ["more GPUs are requested than available"],
        ),
        ("trainer.nnodes=2 trainer.device=cpu", machine(cluster=Cluster("h:1", (0, 0))), []),
        ("trainer.device=cuda", machine(cluster=Cluster("h:1", error="refused")), ["the Ray cluster cannot be joined"]),
    ],
)
def test_gpus_and_clusters(verdict, command: str, where: Machine, faults: list[str]):
    assert whats(verdict(command.split(), where)) == faults


def test_installed_packages_are_no_fault(verdict):
    where = machine(gpus=1, packages=("peft", "wandb", "flash_attn", "liger_kernel"))
    command = f"{MODEL}.lora_rank=8 trainer.logger=[wandb] {MODEL}.attn_implementation=flash_attention_2"
    command += f" {MODEL}.use_liger=True"
    assert whats(verdict(command.split(), where)) == []


def test_flash_attention_needs_a_gpu_where_its_package_is(verdict):
    command = [f"{MODEL}.attn_implementation=flash_attention_2"]
    assert whats(verdict(command, machine(packages=("flash_attn",)))) == ["this kernel of attention needs a GPU"]
    assert whats(verdict(command)) == ["the package flash_attn is not installed"]


def test_a_critic_on_the_actors_path_gets_no_fault_of_its_own(verdict):
    (fault,) = verdict([GAE, f"{MODEL}.attn_implementation=flash_attention_2"]).faults
    assert fault.keys == (f"{MODEL}.attn_implementation",)


def test_checkpoints_for_export_alone_are_warned_of(verdict):
    saved = f"{ACTOR}.checkpoint.save_contents=[hf_model]"
    found = verdict(["trainer.save_freq=2", saved])
    (warning,) = (each for each in found.warnings if "resumed" in each)
    assert found.faults == () and warning.startswith(f"{saved} has no model")
    assert not [each for each in verdict(["trainer.save_freq=2"]).warnings if "resumed" in each]


@pytest.mark.parametrize(("beta", "is_warned"), [(0.999, True), (0.997, True), (0.996, False), (0.95, False)])
def test_a_second_moment_in_bf16_must_be_able_to_shrink(beta, is_warned, verdict):
    command = [f"{ACTOR}.optim.optimizer=_AdamW", f"{ACTOR}.optim.betas=[0.9,{beta}]"]
    warned = [text for text in verdict(command).warnings if "second moment in bf16" in text]
    assert len(warned) == is_warned and all("betas=[0.9,0.99]" in text for text in warned)
    moment = torch.tensor(1.0, dtype=torch.bfloat16)
    for _ in range(3000):  # of gradients that have become zero
        moment = (moment.float() * beta).bfloat16()
    assert (moment > 0.4) == is_warned


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("0.26.0", []),
        ("0.32.1+cpu", []),
        *((v, ["rlx does not know this version of vLLM"]) for v in ("0.25.9", "0.33.0")),
    ],
)
def test_the_version_of_vllm_is_checked(verdict, version, found):
    where = replace(machine(), vllm=version)
    assert whats(verdict([f"{ROLLOUT}.name=vllm"], where)) == found


def test_vllm_is_told_nothing_twice(verdict):
    options = "{max_num_seqs:8,seed:1,load_format:auto,block_size:32}"
    found = verdict(
        [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.engine_kwargs.vllm={options}"], replace(machine(), vllm="0.32.0")
    )
    assert whats(found) == ["an option of vLLM that rlx sets itself"] * 3
    remedies = [fault.remedy for fault in found.faults]
    assert remedies[0] == f"set {ROLLOUT}.max_num_seqs instead" and "remove it" in remedies[2]


def test_heads_that_vllm_has_no_kernel_for_are_refused_on_the_cpu_alone(tmp_path):
    def faults(gpus: int, *overrides: str):
        found = compose([f"{ROLLOUT}.name=vllm", f"{MODEL}.path={tmp_path}", *overrides])
        where = CheckContext(found.partial, found.set_keys, replace(machine(gpus), vllm="0.32.0"))
        return list(vllm_can_run_the_model(where))

    narrow = {**SHAPES["qwen2-7b"], "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(narrow))
    [fault] = faults(0)
    assert fault.got == "head_dim=16" and f"{ROLLOUT}.name=hf" in fault.remedy
    assert faults(1) == faults(0, f"+{MODEL}.override_config.head_dim=32") == faults(0, f"{ROLLOUT}.name=hf") == []


# Faults of reading and faults of rules together


def test_faults_of_both_kinds_come_together(verdict):
    found = verdict(["trainer.sed=1", f"{ROLLOUT}.n=1", "data.seed=x"])
    assert whats(found) == [
        "data.seed has the wrong type",
        "unknown key trainer.sed",
        "the estimator compares the responses to one prompt",
    ]


def test_no_rule_complains_about_a_key_that_could_not_be_read(verdict):
    wrong_type = verdict([f"{ACTOR}.ppo_micro_batch_size_per_gpu=many", f"{ACTOR}.use_dynamic_bsz=True"])
    assert whats(wrong_type) == [f"{ACTOR}.ppo_micro_batch_size_per_gpu has the wrong type"]
    misspelt = verdict(["experiment=null", f"{MODEL}.pth=/m", f"{ROLLOUT}.name=hf"])
    assert f"unknown key {MODEL}.pth" in whats(misspelt)
    assert "there is no model" not in whats(misspelt)


def test_no_value_of_any_key_makes_a_rule_crash(cpu_machine: Machine):
    everything = compose([GAE, f"{ACTOR}.use_kl_loss=True"])
    tree = OmegaConf.to_container(OmegaConf.create(everything.yaml))
    for number, (key, leaf) in enumerate(LEAVES.items()):
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place[section]
        before = place[name]
        values = [0, 7, None, "x", [], {}, *(leaf.info.choices or ())]
        place[name] = values[number % len(values)]
        config, faults = build(tree)
        found = check(Composed(config, frozenset({key}), tuple(faults)), cpu_machine)
        if not found.faults:
            assert long_text(MemoryForecast.of(config, cpu_machine))
        place[name] = before
