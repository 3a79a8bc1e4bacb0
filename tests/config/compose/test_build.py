import math
import re
from pathlib import Path
from typing import get_origin

import pytest

from rlx.config.compose.build import Renamed, build, nearest_keys, remedies, remedy_for
from rlx.config.compose.command_line import compose
from rlx.config.faults import Fault
from rlx.config.schema import PPOConfig
from rlx.config.schema.tree import LEAVES, Leaf, describe_expected, is_key, plain_type, value_at

CORRECTION = "algorithm.rollout_correction"
GROUPS = {key.rpartition(".")[0] for key in LEAVES}


def nested(key: str, value: object) -> dict:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def build_one(key: str, value: object) -> tuple[object, list[Fault]]:
    config, faults = build(nested(key, value))
    return (value_at(config, key) if key in LEAVES else None), faults


def test_nothing_given_is_the_defaults():
    assert build({}) == (PPOConfig(), [])


@pytest.mark.parametrize(
    ("key", "given", "read"),
    [
        ("trainer.seed", 3, 3),
        ("critic.optim.lr", 1, 1.0),
        ("data.train_files", "a,b", ("a,b",)),
        ("data.train_files", ["a", "b"], ("a", "b")),
        ("algorithm.rollout_correction.rollout_rs", "token_k1, seq_max_k2", ("token_k1", "seq_max_k2")),
        ("algorithm.rollout_correction.rollout_rs_threshold", "0.5_2.0,0.1", ("0.5_2.0", "0.1")),
        ("data.train_files", [], ()),
        ("critic.optim.betas", [0, 0.5], (0.0, 0.5)),
        ("data.val_batch_size", None, None),
        ("critic.strategy", None, None),
        ("ray_kwargs.ray_init", {"a": {"b": [1]}, 2: 3}, {"a": {"b": [1]}, "2": 3}),
        ("data.shuffle", False, False),
        ("trainer.logger", ["wandb", "console"], ("wandb", "console")),
        (f"{CORRECTION}.rollout_is_threshold", 3, "3.0"),
        (f"{CORRECTION}.rollout_rs_threshold", 1.5, ("1.5",)),
        (f"{CORRECTION}.rollout_rs_threshold", ["0.9_1.1", 2], ("0.9_1.1", "2.0")),
        (f"{CORRECTION}.rollout_rs", None, None),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype", "bfloat16", "bf16"),
        ("actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype", "torch.float32", "fp32"),
        ("actor_rollout_ref.rollout.dtype", "float16", "fp16"),
    ],
)
def test_values_of_the_right_type_are_read(key: str, given: object, read: object):
    value, faults = build_one(key, given)
    assert faults == []
    assert value == read
    assert type(value) is type(read)


WRONG = {int: [3.5, "x", True, [3]], float: ["1e-5", True], bool: [1, "true"], str: [3], tuple: [{}], dict: [3, "x"]}
"""Values of another type than a key's."""


def of_wrong_type(leaf: Leaf) -> list[object]:
    kind, is_optional = plain_type(leaf.hint)
    if leaf.info.bounds and kind is str:
        return [[1], True, None]
    return [*WRONG[get_origin(kind) or kind], *([] if is_optional else [None])]


def out_of_range(leaf: Leaf) -> list[object]:
    """Return values beside each end of the declared range, and what is no choice."""
    kind, info = plain_type(leaf.hint)[0], leaf.info
    step = 1 if kind is int else 1e-3
    beside = [end - step for end in (info.minimum,) if end is not None]
    beside += [end + step for end in (info.maximum,) if end is not None]
    beside += [end for end in (info.above, info.under) if end is not None]
    beside = [kind(each) if kind in (int, float) else each for each in beside]
    beside += [math.inf, math.nan] if kind is float else []
    beside += (
        [["no such choice"] if get_origin(kind) is tuple else "no such choice"]
        if kind is not int and info.choices
        else []
    )
    return [[each] * (info.length or 1) for each in beside] if info.length else beside


@pytest.mark.parametrize("section", {key.partition(".")[0]: None for key in LEAVES})
def test_a_value_of_another_type_or_out_of_range_is_one_fault(section: str):
    for key, leaf in LEAVES.items():
        if not key.startswith(f"{section}."):
            continue
        for kind, values in (("has the wrong type", of_wrong_type(leaf)), ("has an invalid value", out_of_range(leaf))):
            for value in values:
                read, (fault,) = build_one(key, value)
                assert fault.what == f"{key} {kind}" and fault.keys == (key,)
                assert repr(value) in fault.got and fault.expected == describe_expected(leaf)
                assert read == leaf.default or leaf.info.choices, "a rule must not read it"
        ends = (leaf.info.minimum, leaf.info.maximum)
        for value in (plain_type(leaf.hint)[0](end) for end in ends if end is not None and not leaf.info.length):
            assert build_one(key, value) == (value, []), f"{key}: the ends are allowed"


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("trainer.total_epoch", ["trainer.total_epochs"]),
        (
            "actor_rollout_ref.actor.clip_ration",
            ["actor_rollout_ref.actor.clip_ratio", "actor_rollout_ref.actor.clip_ratio_c"],
        ),
        ("train_batch_size", ["data.train_batch_size"]),
        ("algorithm.use_kl_loss", ["actor_rollout_ref.actor.use_kl_loss"]),
        ("actor_rolout_ref.actor.entropy_coef", ["actor_rollout_ref.actor.entropy_coeff"]),
        ("zzz.qqq", []),
        ("algorithm.foo", []),
        ("reward_model.model_path", ["reward_model.model.path"]),
        ("actor_rollout_ref.rollout.metrics.enable", []),
        ("policy_los.path", ["actor_rollout_ref.actor.policy_loss.path"]),
        ("actor_rollout_ref.actor.tiled_mpl", ["actor_rollout_ref.model.tiled_mlp"]),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_known_one(key: str, near: list[str]):
    assert nearest_keys(key) == near
    _, (fault,) = build_one(key, 1)
    assert fault.what == f"unknown key {key}"
    assert all(name in fault.remedy for name in near)
    assert set(fault.keys) == {key, *near}


def test_a_name_known_at_several_places_names_them_all():
    near = nearest_keys("actor_rollout_ref.lora_rank")
    assert set(near) == {"actor_rollout_ref.model.lora_rank", "critic.model.lora_rank"}
    assert near[0] == "actor_rollout_ref.model.lora_rank"


def test_an_unknown_group_is_reported_leaf_by_leaf():
    _, faults = build({"mystery": {"a": 1, "b": {"c": 2}}, "trainer": {"seed": 2}})
    assert [fault.what for fault in faults] == ["unknown key mystery.a", "unknown key mystery.b.c"]


ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("given", "remedy", "meant"),
    [
        (f"{ACTOR}.optim.clip_grad=0.5", f"use {ACTOR}.grad_clip=0.5", f"{ACTOR}.grad_clip"),
        (
            "critic.model.fsdp_config.param_offload=False",
            "use critic.fsdp.param_offload=False",
            "critic.fsdp.param_offload",
        ),
        ("reward.reward_model.model_path=/rm", "use reward_model.model.path=/rm", "reward_model.model.path"),
        ("reward.reward_model.nnodes=2", "remove it: rlx has no reward_model.nnodes", None),
        (
            f"{ACTOR}.ppo_micro_batch_size=64",
            f"use {ACTOR}.ppo_micro_batch_size_per_gpu=64 divided by the number of processes: it counts the samples of one process",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        ),
        (
            f"{ACTOR}.tis_imp_ratio_cap=2",
            f"use {CORRECTION}.rollout_is_threshold=2: it is read with {CORRECTION}.rollout_is=token",
            f"{CORRECTION}.rollout_is_threshold",
        ),
        (f"{ACTOR}.optim.total_training_steps=-1", "remove it, or use trainer.total_training_steps", None),
        (
            "reward_model.reward_manager=prime",
            "use reward.reward_manager.name=naive: reward functions always run in parallel processes",
            "reward.reward_manager.name",
        ),
        ("ray_init.api_key=s", "use ray_kwargs.ray_init.api_key=***", "ray_kwargs.ray_init.api_key"),
    ],
)
def test_a_key_that_has_another_name_here_is_answered_with_the_whole_key_and_its_value(given, remedy, meant):
    (fault,) = compose([given]).faults
    assert fault.remedy == remedy
    assert fault.keys == (given.partition("=")[0], *([meant] if meant else []))


REMEDIES = {key: found for key, found in remedies()["verl"].items() if found}


@pytest.mark.parametrize("is_value", [False, True])
def test_a_remedy_names_whole_keys(not_whole, is_value: bool):
    for pattern, remedy in REMEDIES.items():
        key, _, value = pattern.partition("=")
        if is_value != ("=" in pattern):
            continue
        if is_value:
            leaf = next(each for each in LEAVES if f".{each}".endswith(f".{key}"))
            _, (fault,) = build_one(leaf, [value] if get_origin(plain_type(LEAVES[leaf].hint)[0]) is tuple else value)
            remedy = fault.remedy
            assert "invalid value" in fault.what, pattern
            assert any(each in remedy for each in LEAVES), pattern
        elif isinstance(remedy, Renamed):
            places = ("", f"{ACTOR}.", "actor_rollout_ref.model.", "actor_rollout_ref.rollout.")
            found = [remedy_for(f"{place}{pattern}") for place in places]
            assert any(isinstance(each, Renamed) and (is_key(each.to) or each.to in GROUPS) for each in found), pattern
            remedy = remedy.why
        else:
            for given in (f"critic.{pattern}", f"{pattern}.below.it"):
                _, (fault,) = build_one(given, 1)
                assert (fault.remedy, fault.keys) == (remedy_for(given), (given,)), given
        assert not_whole(remedy) == [], pattern


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ("algorithm.adv_estimator=GRPO", "did you mean algorithm.adv_estimator=grpo?"),
        (f"{ACTOR}.policy_loss.loss_mode=gpso", f"did you mean {ACTOR}.policy_loss.loss_mode=gspo?"),
        ("data.train_batch_size=eight", "set data.train_batch_size to a whole number"),
        ("data.train_batch_size=8.0", "set data.train_batch_size=8"),
        ("data.shuffle=1", "set data.shuffle to True or False"),
        ("critic.optim.betas=0.9", "set critic.optim.betas=[0.9,0.999], or another value of that type"),
        ("trainer.logger=[console,tenserboard]", "did you mean trainer.logger=[console,tensorboard]?"),
        (
            "trainer.logger=[console,file]",
            "use trainer.logger=[console,jsonl]: it writes metrics.jsonl into the run's folder",
        ),
        (
            "trainer.logger=[console,paper]",
            "set trainer.logger=[console,jsonl] (the default), or another value that is allowed",
        ),
        (f"{CORRECTION}.rollout_rs=[geometric]", f"use {CORRECTION}.rollout_rs=[seq_mean_k1]"),
        # Keys of TRL
        ("num_generations=8", f"use {ROLLOUT}.n=8"),
        ("num_train_epochs=3.0", "use trainer.total_epochs=3"),
        ("max_steps=-1", "remove it, or use trainer.total_training_steps"),
        ("trainer.learning_rate=1e-5", f"use {ACTOR}.optim.lr=1e-05"),
        ("beta=0.04", f"use {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.04"),
        ("report_to=wandb", "use trainer.logger=[console,jsonl,wandb]"),
    ],
)
def test_a_wrong_value_or_foreign_key_is_answered_with_the_users_value(given: str, remedy: str):
    (fault,) = compose([given]).faults
    assert fault.remedy == remedy


@pytest.mark.parametrize("text", ["", "a", "0", "-1", "2_1", "0_1", "1_2_3", "inf", "nan", "0.5_nan", {}])
def test_bounds_that_are_none_are_a_fault(text: object):
    value, (fault,) = build_one(f"{CORRECTION}.rollout_is_threshold", text)
    assert value == "2.0"
    assert fault.expected == "str, a number > 0 or low_high"


def test_no_key_of_rlx_is_listed_as_missing():
    assert [key for key in LEAVES if remedy_for(key)] == ["ray_kwargs.ray_init"]
    assert all(remedy for remedy in REMEDIES.values())


def test_a_missing_value_is_asked_for():
    _, (fault,) = build_one("data.train_files", "???")
    assert "no value" in fault.what
    assert "data.train_files=" in fault.remedy


def test_every_key_is_documented():
    for key, leaf in LEAVES.items():
        assert leaf.info.doc.endswith("."), key
        assert build_one(key, list(leaf.default) if isinstance(leaf.default, tuple) else leaf.default)[1] == [], key


@pytest.mark.parametrize(
    "accepted",
    [
        "trainer.default_hdfs_dir=null",
        f"{ACTOR}.ppo_micro_batch_size=null",
        f"{ROLLOUT}.mode=async",
        f"{ROLLOUT}.mode=sync",
    ],
)
def test_what_has_no_effect_here_is_accepted(accepted: str):
    assert compose([accepted]).config == compose([]).config


PATHS = [key for key, leaf in LEAVES.items() if leaf.info.is_path]


@pytest.mark.parametrize(
    ("path", "what"),
    [("a" * 5000, "too long"), ("a/" * 2500, "too long"), ("~nobody-of-this-name/x", "home"), ("\udcff", "UTF-8")],
    ids=["a long name", "many folders", "no home", "no UTF-8"],
)
def test_a_path_that_no_file_can_have_is_one_fault_of_each_key(path: str, what: str):
    faults = compose([f"{key}='{path}'" for key in PATHS]).faults
    assert [fault.keys for fault in faults] == [(key,) for key in PATHS]
    for fault in faults:
        assert what in fault.what and len(str(fault)) < 400
        str(fault).encode()


def test_every_key_with_a_path_is_declared_as_one():
    named = {key for key in LEAVES if key.endswith((".path", "_dir", "directory", "_files", "_path", "adapter_path"))}
    assert named <= set(PATHS) and {"trainer.project_name", "trainer.experiment_name"} <= set(PATHS)


TRL_PAGE = (Path(__file__).parents[3] / "docs/from_trl.md").read_text()


def test_a_key_of_trl_is_answered_with_a_key_of_rlx(not_whole):
    for key in remedies()["trl"]:
        name, _, value = key.partition("=")
        _, (fault,) = build({name: value or ("wandb" if name == "report_to" else 3)})
        assert fault.what == f"unknown key {name}" and "did you mean" not in fault.remedy, key
        assert not_whole(fault.remedy) == [], key


def test_every_key_of_the_table_of_trl_is_answered():
    table = TRL_PAGE.partition("## Which key is which?")[2].partition("\n## ")[0]
    named = {
        name.partition("=")[0]
        for row in re.findall(r"^\| (`[^|]*)\|", table, re.M)
        for name in re.findall(r"`(\w+)", row)
    }
    assert len(named) > 25 and named - {"GRPOConfig"} - {key.partition("=")[0] for key in remedies()["trl"]} == set()
