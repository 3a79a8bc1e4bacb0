"""The command that verl's users know works here, but for what the machine lacks."""

import re
import subprocess
from pathlib import Path

import pytest

from rlx.config.check.validate import Verdict
from rlx.config.compose.command_line import compose
from rlx.config.machine import Machine

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"

# The command with which verl's documentation trains on GSM8K, on 8 GPUs; `…` stands for what the user fills in.
VERL_COMMAND = (
    "algorithm.adv_estimator=grpo data.train_files=… data.val_files=… data.train_batch_size=512 "
    "data.max_prompt_length=512 data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation=error "
    f"{MODEL}.path=… {ACTOR}.optim.lr=1e-6 {MODEL}.use_remove_padding=True {ACTOR}.ppo_mini_batch_size=256 "
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=64 {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.001 "
    f"{ACTOR}.kl_loss_type=low_var_kl {ACTOR}.entropy_coeff=0 {MODEL}.enable_gradient_checkpointing=True "
    f"{MODEL}.enable_activation_offload=True {ACTOR}.fsdp_config.param_offload=False "
    f"{ACTOR}.fsdp_config.optimizer_offload=False {ROLLOUT}.log_prob_micro_batch_size_per_gpu=64 "
    f"{ROLLOUT}.tensor_model_parallel_size=2 {ROLLOUT}.name=vllm {ROLLOUT}.gpu_memory_utilization=0.6 {ROLLOUT}.n=5 "
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=64 "
    "actor_rollout_ref.ref.fsdp_config.param_offload=True algorithm.use_kl_in_reward=False trainer.critic_warmup=0 "
    "trainer.logger=['console','tensorboard'] trainer.project_name=… trainer.experiment_name=… "
    "trainer.n_gpus_per_node=8 trainer.val_before_train=False trainer.nnodes=1 trainer.save_freq=-1 trainer.test_freq=5 "
    "trainer.total_epochs=15"
)


def whats(verdict: Verdict) -> list[str]:
    return [fault.what for fault in verdict.faults]


def filled_in(model: str, train: str, val: str) -> list[str]:
    words = iter([train, val, model, "'my project'", "gsm8k"])
    return [re.sub("…", lambda _: next(words), word) for word in VERL_COMMAND.split()]


def test_the_command_of_verl_lacks_only_what_the_machine_lacks(verdict):
    found = verdict(
        filled_in("/models/qwen", "/data/train.parquet", "/data/test.parquet"),
        Machine(gpus=1, cpus=4, packages=frozenset()),
    )
    assert sorted(whats(found)) == [
        "a data file does not exist",
        "a data file does not exist",
        "more GPUs are requested than available",
        "the model folder does not exist or has no config.json",
        "vLLM is not installed",
    ]
    assert found.warnings == ()


def test_the_command_of_verl_with_everything_there_is_valid(verdict, tmp_path: Path):
    for name in ("train.parquet", "test.parquet", "config.json"):
        (tmp_path / name).touch()
    command = filled_in(str(tmp_path), str(tmp_path / "train.parquet"), str(tmp_path / "test.parquet"))
    eight = Machine(gpus=8, cpus=64, packages=frozenset(), vllm="0.26.0")
    assert whats(verdict(command, eight)) == []
    assert whats(verdict([*command, f"{ROLLOUT}.name=hf", f"{ROLLOUT}.tensor_model_parallel_size=1"], eight)) == []


def test_the_experiment_of_that_name_is_the_command_of_verl():
    words = filled_in("Qwen/Qwen2.5-7B-Instruct", "data/gsm8k/train.parquet", "data/gsm8k/test.parquet")
    words += ["trainer.project_name=gsm8k", "trainer.experiment_name=grpo_8gpu"]
    assert compose(["experiment=gsm8k_grpo_8gpu"]).config == compose(words).config


EXAMPLES = (Path(__file__).parent / "verl_examples.txt").read_text()
SCRIPTS = {name: int(number) for number, name in re.findall(r"^(\d+) ([\w./]+)$", EXAMPLES, re.MULTILINE)}
VERL_PAGE = (Path(__file__).parents[3] / "docs/from_verl.md").read_text()
GENERIC = ("look for its name", "did you mean", "or another value that is allowed")
DATA, MODEL_FOLDER = "a data file does not exist", "the model folder does not exist or has no config.json"
LACKING = {DATA, MODEL_FOLDER, "several machines need a Ray cluster to join", "a file of your own does not exist"}
RUN_AS_THEY_ARE = {
    *("cispo_trainer/run_qwen3_8b_fsdp", "gmpo_trainer/run_qwen3_8b_fsdp", "grpo_trainer/run_qwen3_30b_a3b_fsdp"),
    *("grpo_trainer/run_qwen3_8b_fsdp", "gspo_trainer/run_qwen3_8b_fsdp", "ppo_trainer/run_qwen3_8b_fsdp"),
    *("reinforce_plus_plus_trainer/run_qwen3_8b_fsdp", "remax_trainer/run_qwen2.5_math_7b_sync_fsdp"),
    *("remax_trainer/run_qwen3_8b_fsdp", "rloo_trainer/run_qwen3_8b_fsdp", "tuning/scaling/run_qwen2_5_72b_fsdp"),
}
NEAR_ENOUGH = {"mixed_precision.param_dtype=bf16?"}


def overrides_of(script: int) -> list[str]:
    """What the script of this number passes."""
    found = []
    for numbers, override in re.findall(r"^([\d,-]+) ([^ =]+=.*)$", EXAMPLES, re.MULTILINE):
        spans = [[int(end) for end in span.split("-")] for span in numbers.split(",")]
        if any(span[0] <= script <= span[-1] for span in spans):
            found.append(override)
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_verl_lacks_only_what_the_machine_lacks_or_is_answered(verdict, script):
    overrides = overrides_of(SCRIPTS[script])
    assert len(overrides) > 25
    machine = Machine(gpus=8, cpus=64, packages=frozenset({"peft", "wandb"}), vllm="0.26.0")
    found = verdict(overrides, machine)
    faults = [fault for fault in found.faults if fault.what not in LACKING]
    unanswered = [str(fault) for fault in faults if any(words in fault.remedy for words in GENERIC)]
    assert [text for text in unanswered if not any(near in text for near in NEAR_ENOUGH)] == []
    assert (script in RUN_AS_THEY_ARE) == (not faults), [fault.what for fault in faults]
    # Once verl's keys are mended no other fault vanishes.
    before = found.faults
    unknown = {fault.what.removeprefix("unknown key ") for fault in before if fault.what.startswith("unknown key ")}
    sections = {key[:end] for key in unknown for end, sign in enumerate(f"{key}.") if sign == "."}
    mended = [each for each in overrides if each.partition("=")[0].lstrip("+") not in sections]
    mended += [named[1] for fault in before if (named := re.match(r"use ([\w.]+=\S*[^:\s])", fault.remedy))]
    others = [fault.what for fault in before if fault.what.removeprefix("unknown key ") not in unknown]
    after = whats(verdict(mended, machine))
    assert not [what for what in others if what not in after and "has an invalid value" not in what]
    assert not any(what.startswith("unknown key") for what in after)


def test_a_misnamed_size_of_sequence_groups_makes_no_fault_of_the_limits_of_tokens(verdict):
    name, machine = "ulysses_sequence_parallel_size", Machine(gpus=8, cpus=64, packages=frozenset(), vllm="0.26.0")
    overrides = overrides_of(SCRIPTS["grpo_trainer/run_qwen3_next_80b_a3b_fsdp"])
    (tokens,) = (each for each in overrides if each.startswith(f"{ACTOR}.ppo_max_token_len_per_gpu="))
    remedies = [fault.remedy for fault in verdict(overrides, machine).faults]
    assert tokens.endswith("=2816") and f"use {ACTOR}.{name}=8" in remedies
    assert not any("max_token_len" in remedy for remedy in remedies)
    without = [each for each in overrides if name not in each]
    assert sum("max_token_len" in fault.remedy for fault in verdict(without, machine).faults) == 3
    for role in ("actor", "ref"):
        without += [f"actor_rollout_ref.{role}.{name}=8"]
    assert not any("max_token_len" in fault.remedy for fault in verdict(without, machine).faults)


def test_older_keys_of_the_examples_are_known_or_answered():
    faults = [fault for override in overrides_of(0) for fault in compose([override]).faults]
    assert len(faults) > 10
    assert [fault for fault in faults if any(words in fault.remedy for words in GENERIC)] == []


def test_what_verl_alone_has_is_answered():
    answers = {
        "algorithm.adv_estimator=dapo": "use algorithm.adv_estimator=grpo actor_rollout_ref.actor.clip_ratio_high=0.28 ",
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=512": "remove it: weights",
        "trainer.v1.trainer_mode=separate_async": f"set {ROLLOUT}.partial.max_staleness, and trainer.n_rollout_gpus",
        f"{ROLLOUT}.agent.num_workers=8": "remove it; with an environment it is environment.processes",
        "algorithm.rollout_is=True": "use algorithm.rollout_correction.rollout_is=token in place of True",
        "algorithm.rollout_is_level=sequence": "use algorithm.rollout_correction.rollout_is=sequence",
        "trainer.esi_redundant_time=60": "use trainer.save_on_sigterm_s=60",
        "--config-path=./config": "remove it: rlx reads no YAML file of yours",
    }
    for override, remedy in answers.items():
        (fault,) = compose([override]).faults
        assert fault.remedy.startswith(remedy)


@pytest.mark.parametrize("end", ['"$@"', "$@", "", '"$@" 2>&1 | tee log', "2>&1 | tee log", "# all", "> log; cat log"])
@pytest.mark.parametrize("start", ["a=1 \\\n  ", ""], ids=["two lines", "one line"])
def test_the_pages_sed_hands_the_scripts_arguments_to_its_command(tmp_path: Path, start: str, end: str):
    (sed,) = re.findall(r"^sed .*$", VERL_PAGE, re.MULTILINE)
    script = tmp_path / "script.sh"
    script.write_text(f"echo before\necho python3 -m verl.trainer.main_ppo {start}b=2 {end}\necho behind\n")
    subprocess.run(["bash", "-c", sed.replace("SCRIPT", str(script))], check=True)
    done = subprocess.run(["bash", str(script), "--check"], cwd=tmp_path, capture_output=True, text=True, check=True)
    given = "a=1 b=2" if start else "b=2"
    command = f"{given} --check" if "$@" in end else f"--check {given}"
    assert done.stdout == f"before\npython3 -m rlx.main_ppo {command}\nbehind\n"
