from dataclasses import asdict, replace

import pytest
from omegaconf import OmegaConf

from rlx.config.compose.build import build
from rlx.config.compose.command_line import compose, config_folder, group_choices
from rlx.config.faults import ConfigError
from rlx.config.schema import PPOConfig
from rlx.config.schema.tree import LEAVES, value_at


def fault_of(*overrides: str):
    faults = compose(overrides).faults
    assert len(faults) == 1, [str(fault) for fault in faults]
    return faults[0]


def test_without_arguments_the_arithmetic_experiment_is_composed():
    config = compose([]).config
    assert config.actor_rollout_ref.model.path == "builtin:tiny"
    assert config.algorithm.adv_estimator == "grpo"
    assert compose([]).set_keys == frozenset()


@pytest.mark.parametrize("override", ["actor_rollout_ref.model.path=/m", "actor_rollout_ref.model={path: /m}"])
def test_a_model_path_leaves_the_defaults_of_the_tree(override: str):
    model = replace(PPOConfig().actor_rollout_ref.model, path="/m")
    assert compose([override]).config == replace(
        PPOConfig(), actor_rollout_ref=replace(PPOConfig().actor_rollout_ref, model=model)
    )


def test_no_experiment_can_be_asked_for():
    assert compose(["experiment=null"]).config == PPOConfig()


def test_one_override_makes_ppo_of_the_default_run():
    grpo, ppo = compose([]).config, compose(["algorithm.adv_estimator=gae"]).config
    assert ppo == replace(grpo, algorithm=replace(grpo.algorithm, adv_estimator="gae"))


@pytest.mark.parametrize("experiment", group_choices()["experiment"])
def test_an_experiment_composes_and_holds_only_what_differs_from_the_defaults(experiment: str):
    held = OmegaConf.to_container(OmegaConf.load(config_folder() / "experiment" / f"{experiment}.yaml"))
    config = compose([f"experiment={experiment}"]).config
    assert held and {key for key in flat(held) if value_at(config, key) == LEAVES[key].default} == set()


def flat(tree: dict, prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in tree.items():
        key = f"{prefix}{name}"
        found |= (
            {key} if key in LEAVES or not isinstance(value, dict) else flat(value, f"{key}.")
        )  # some keys hold a table
    return found


def test_overrides_win_over_files_and_the_later_over_the_earlier():
    composed = compose(["trainer.seed=3", "experiment=arithmetic", "data.train_batch_size=64", "trainer.seed=4"])
    assert (composed.config.data.train_batch_size, composed.config.trainer.seed) == (64, 4)
    assert composed.set_keys == {"data.train_batch_size", "trainer.seed"}


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_plus_signs_change_nothing(plus: str):
    assert compose([f"{plus}trainer.seed=3"]).config.trainer.seed == 3


@pytest.mark.parametrize(
    ("key", "given", "read"),
    [
        ("rollout_is_threshold", "0.5_5", "0.5_5"),
        ("rollout_is_threshold", "1_5", "1_5"),
        ("rollout_is_threshold", "'1_5'", "1_5"),
        ("rollout_is_threshold", "1e-4_5", "1e-4_5"),
        ("rollout_is_threshold", "2", "2.0"),
        ("rollout_rs_threshold", "[1.0_2, 0.1]", ("1.0_2", "0.1")),
        ("rollout_rs_threshold", '[0.5_2,"1_3"]', ("0.5_2", "1_3")),
        ("rollout_rs_threshold", "'0.5_2,1_3'", ("0.5_2", "1_3")),
    ],
)
def test_an_underscore_parts_two_bounds(key: str, given: str, read: object):
    composed = compose([f"+algorithm.rollout_correction.{key}={given}"])
    assert getattr(composed.config.algorithm.rollout_correction, key) == read


TEXTS = ["1.10", "0x10", "yes", "No", "1e3", "1_000", "true", "nan", "inf", "007", "-1", "+5", "None", "my run 1.10"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_key_that_takes_text_keeps_it_as_it_was_written(text: str):
    free = [key for key, leaf in LEAVES.items() if not (leaf.info.choices or leaf.info.bounds or leaf.info.words)]
    keys = [key for key in free if str(LEAVES[key].hint) in ("<class 'str'>", "str | None")]
    config = compose([f"{key}={text}" for key in keys]).config
    assert len(keys) > 30 and {key: value_at(config, key) for key in keys} == dict.fromkeys(keys, text)


def test_null_is_text_where_a_key_cannot_be_null_and_lists_of_texts_keep_theirs():
    composed = compose(
        ["trainer.experiment_name=null", "data.answer_key=null", "data.train_files=[1.10, yes,null,a b]"]
    )
    assert composed.config.trainer.experiment_name == "null" and composed.config.data.answer_key is None
    assert composed.config.data.train_files == ("1.10", "yes", "null", "a b")


@pytest.mark.parametrize(
    "given", ["[q_proj,v_proj]", "[q_proj, v_proj]", "q_proj,v_proj", "'q_proj,v_proj'", "['q_proj','v_proj']"]
)
def test_modules_for_adapters_are_given_as_text_or_list(given: str):
    for model in ("actor_rollout_ref.model", "critic.model"):
        composed = compose([f"{model}.target_modules={given}"])
        assert value_at(composed.config, f"{model}.target_modules") == "q_proj,v_proj"


def test_mappings_set_the_keys_they_name():
    composed = compose(["data={seed: 3, arithmetic: {difficulty: 2}}"])
    assert composed.set_keys == {"data.seed", "data.arithmetic.difficulty"}
    assert composed.config.data.arithmetic.difficulty == 2
    assert composed.config.data.train_batch_size == compose([]).config.data.train_batch_size


def test_free_mappings_take_any_key():
    composed = compose(["actor_rollout_ref.model.override_config.rope.type=yarn", "ray_kwargs.ray_init.num_cpus=4"])
    assert composed.config.actor_rollout_ref.model.override_config == {"rope": {"type": "yarn"}}
    assert composed.config.ray_kwargs.ray_init == {"num_cpus": 4}
    assert composed.set_keys == {"actor_rollout_ref.model.override_config", "ray_kwargs.ray_init"}


def test_interpolation_reaches_every_key_and_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RLX_TEST_NAME", "from_env")
    composed = compose(
        ["data.max_prompt_length=${critic.ppo_max_token_len_per_gpu}", "trainer.project_name=${oc.env:RLX_TEST_NAME}"]
    )
    assert composed.config.data.max_prompt_length == PPOConfig().critic.ppo_max_token_len_per_gpu
    assert composed.config.trainer.project_name == "from_env"


def test_the_yaml_is_the_whole_tree():
    composed = compose(["actor_rollout_ref.model.override_config.x=1", "actor_rollout_ref.actor.clip_ratio_low=null"])
    tree = OmegaConf.to_container(OmegaConf.create(composed.yaml))
    assert build(tree) == (composed.config, [])
    assert set(tree) == set(asdict(PPOConfig()))


@pytest.mark.parametrize(
    ("override", "what", "remedy"),
    [
        ("foo", "cannot be read", "key=value"),
        ("--chekc", "there is no option --chekc", "did you mean --check?"),
        ("--learning-rate=1e-5", "there is no option", "write a key without dashes: learning-rate=VALUE"),
        ("trainer.project_name=a=b", "cannot be read", "quote"),
        ("data..x=3", "cannot be read", "quote"),
        ("trainer.logger=[console,jsonl", "cannot be read", "a bracket is not closed"),
        ("ray_kwargs.ray_init={num_cpus: 2", "cannot be read", "a bracket is not closed"),
        ("", "cannot be read", "key=value"),
        ("trainer.seed=1,2", "sweep", "trainer.seed=[1,2]"),
        ("~trainer.seed", "cannot be deleted", "set trainer.seed"),
        ("hydra.run.dir=x", "Hydra's launcher", "default_local_dir"),
        ("experiment=arithmetik", "no file 'arithmetik'", "experiment=arithmetic"),
        ("experiment=[arithmetic]", "no file", "experiment=arithmetic"),
        ("experiment=zzz", "no file", "choose one"),
        ("experiments/foo=bar", "no group", "remove it"),
        ("experiment@here=arithmetic", "no group", "remove it"),
        ("trainer.seed=${trainer.foo}", "trainer.seed cannot be resolved", "name a key"),
        ("trainer.seed.x=1", "has no keys below it", "set trainer.seed itself"),
        ("data.train_files.x=1", "has no keys below it", "set data.train_files itself"),
        ("critic=2", "critic is a group of keys", "critic.strategy"),
        ("trainer=", "trainer is a group of keys", "trainer.total_epochs"),
    ],
)
def test_bad_overrides_are_faults(override: str, what: str, remedy: str):
    fault = fault_of(override)
    assert what in fault.what and "expecting" not in fault.what, "Hydra's parser's words"
    assert remedy in fault.remedy


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.train_files", "mine.jsonl"),
        ("experiment", "arithmetic"),
        ("actor_rollout_ref.model.override_config.x", "1"),
    ],
)
def test_a_missing_equals_sign_is_one_fault(key: str, value: str):
    composed = compose([key, value, "trainer.seed=1"])
    (fault,) = composed.faults
    assert fault.got == f"{key} {value}" and f'"{key}={value}"' in fault.remedy
    assert composed.partial == compose([f"{key}={value}", "trainer.seed=1"]).config


def test_keys_without_a_value_are_not_taken_for_each_others():
    faults = compose(["data.train_files", "data.val_files", "data.seed=1"]).faults
    assert [fault.remedy for fault in faults] == ["write key=value"] * 2


def test_what_is_given_twice_is_known_unless_it_is_the_same():
    twice = [
        "trainer.seed=1",
        "data.seed=3",
        "trainer.seed=2",
        "experiment=calculator",
        "+trainer.seed=5",
        "data.seed=3",
    ]
    composed = compose(
        [
            *twice,
            "experiment=arithmetic",
            "actor_rollout_ref.model.override_config.x=1",
            "actor_rollout_ref.model.override_config.y=1",
        ]
    )
    assert composed.config.trainer.seed == 5
    assert composed.repeated == {
        "trainer.seed=1": "+trainer.seed=5",
        "trainer.seed=2": "+trainer.seed=5",
        "experiment=calculator": "experiment=arithmetic",
    }


def test_all_faults_are_listed_at_once_and_the_config_is_not_given_out():
    composed = compose(["foo", "trainer.sed=1", "data.seed=x", "trainer.nnodes=0", "experiment=nothing"])
    assert len(composed.faults) == 5
    with pytest.raises(ConfigError) as error:
        _ = composed.config
    assert all(number in str(error.value) for number in ("5 fault(s)", "1. ", "5. ", "trainer.seed"))


@pytest.mark.parametrize(
    "pieces",
    [
        *(["data.train_files=['a',", "'b']"], ["data.train_files=[a,", "b]"], ["data.train_files=['a'", ",", "'b']"]),
        *(["data.train_batch_size", "=", "4"], ["data.train_batch_size=", "4"], ["data.train_batch_size", "=4"]),
        *(["data.train_files", "=", "[a,", "b]"], ["ray_kwargs.ray_init={a:", "1}"]),
    ],
)
def test_an_override_in_pieces_is_one_fault(pieces: list[str]):
    (fault,) = compose(["trainer.seed=3", *pieces, "data.seed=4"]).faults
    assert fault.what == f"{pieces[0].partition('=')[0]}: the override is in pieces" and pieces[-1] in fault.got
    assert f'"{"".join(pieces)}"' in fault.remedy and '"$@"' in fault.remedy
    assert not compose(["".join(pieces)]).faults, "the remedy helps"


def test_a_value_that_ends_in_an_equals_sign_swallows_no_other():
    faults = compose(["trainer.experiment_name=YWJj=", "~trainer.logger"]).faults
    assert len(faults) == 2 and not any("in pieces" in fault.what for fault in faults)


def test_a_key_without_a_value_swallows_no_other():
    faults = compose(["trainer.project_name=", "trainer.sed=1", "trainer.seed", "data.seed=4"]).faults
    assert [fault.what for fault in faults][-1] == "unknown key trainer.sed" and len(faults) == 2


def test_a_split_list_is_known_among_other_faults_and_shows_no_secret():
    split = ["custom_reward_function.reward_kwargs.api_key=[s1,", "s2]"]
    faults = compose([*split, "trainer.sed=1"]).faults
    assert len(faults) == 2 and not any(secret in str(faults) for secret in ("s1", "s2"))
    for unfinished in (
        ["data.train_files=[a,", "data.seed=4"],
        ["data.train_files=[a,"],
        ["data.train_files=[a]", "b]"],
    ):
        assert "pieces" not in str(compose(unfinished).faults), unfinished
