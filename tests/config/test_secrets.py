import pytest

from rlx.config.compose.command_line import compose
from rlx.config.schema.tree import LEAVES
from rlx.config.secrets import is_secret, override_without_secrets, without_secrets
from rlx.driver import main

SECRET = (
    *("api_key", "HF_TOKEN", "openaiApiKey", "password", "db-password", "AWS_SECRET_ACCESS_KEY", "APIKey"),
    *("master_key", "forward_key", "cast_key", "mast_key", "end_key", "key"),  # only somewhat like a harmless one
)
HARMLESS = ("prompt_key", "answer_key", "max_tokens", "pad_token", "monkey", "keyboard", "KL")


@pytest.mark.parametrize("name", SECRET + HARMLESS)
def test_names_of_secrets_and_those_that_only_look_like_them(name: str):
    assert is_secret(name) == (name in SECRET)


def test_no_key_of_the_schema_is_taken_for_a_secret():
    texts = [key for key, leaf in LEAVES.items() if "str" in str(leaf.hint)]
    assert len(texts) > 50 and [key for key in texts if is_secret(key.rpartition(".")[2])] == []


def test_secrets_are_hidden_and_the_shape_stays():
    tree = {
        "headers": [{"api_key": "s1", "top_k": 3}],
        "token": {"a": "s2", "b": 1},
        "url": "https://me:s3@host/x?token=s4&n=1",
        "password": 123456,
        "plain": ["sk-0123456789abcdef", "Bearer 0123456789"],
    }
    assert without_secrets(tree) == {
        "headers": [{"api_key": "***", "top_k": 3}],
        "token": {"a": "***", "b": 1},
        "url": "https://***@host/x?token=***&n=1",
        "password": "***",
        "plain": ["***", "***"],
    }


KWARGS, RUNTIME = "custom_reward_function.reward_kwargs", "ray_kwargs.ray_init.runtime_env"


@pytest.mark.parametrize(
    "command",
    [
        [f"{KWARGS}.api_key=s3cret"],
        [f"{KWARGS}={{judge: {{api_key: s3cret}}}}"],
        ["environment.kwargs.api_key=s3cret"],
        ["environment.kwargs.headers=['Authorization: s3cret'"],
        [f"{RUNTIME}={{env_vars: {{NAME: s3cret}}"],
        [f"{RUNTIME}={{env_vars:", "{NAME:", "s3cret}}"],
        [f"{RUNTIME}={{env_vars:", "{NAME:", "s3cret}"],
        [f"{KWARGS}.api_key=s3cret,s3cret2"],
        [f"{KWARGS}.api_key", "s3cret"],
        [f"{KWARGS}={{api_key: 's3cret}}"],
        ["trainer.seed={api_key: s3cret}"],
        ["trainer={api_key: s3cret}"],
        ["custom_reward_functon.reward_kwargs=[{api_key: s3cret}]"],
        [f"~{KWARGS}.api_key=s3cret"],
        ["--api-key=s3cret"],
    ],
    ids=str,
)
def test_no_command_shows_its_secret(command: list[str], capfd: pytest.CaptureFixture[str]):
    main(["--check", "--tree", *command, "trainer.sed=1"])
    printed = capfd.readouterr()
    assert "***" in printed.err + printed.out and "s3cret" not in printed.err + printed.out


def test_a_warning_of_a_key_without_effect_shows_no_secret(capfd: pytest.CaptureFixture[str]):
    by_braces = [f"{RUNTIME}={{env_vars:{name}:s3cret}}" for name in ("NAME", "OTHER")]  # as bash expands braces
    given = [f"{KWARGS}={{api_key: s3cret}}", "environment.kwargs.api_key=s3cret", *by_braces]
    assert main(["--check", "--tree", *given]) == 0
    printed = capfd.readouterr()
    assert f"{KWARGS}={{'api_key': '***'}}" in printed.err and "s3cret" not in printed.err + printed.out


def test_a_dumped_configuration_holds_no_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_MODELS", "/s0/models")
    monkeypatch.setenv("MY_TOKEN", "s1")
    composed = compose(
        [
            "actor_rollout_ref.model.path=${oc.env:MY_MODELS}/qwen",
            "data.train_files=['${oc.env:MY_MODELS}/train.jsonl']",
            "custom_reward_function.reward_kwargs={api_key: s2, judge: {Password: s3}, url: 'https://u:s4@h', top: 3}",
            "ray_kwargs.ray_init.runtime_env.env_vars={HF_HOME: s5, MY_TOKEN: '${oc.env:MY_TOKEN}'}",
            "data.prompt_key=question",
        ]
    )
    assert composed.faults == ()
    assert composed.config.actor_rollout_ref.model.path == "/s0/models/qwen"
    assert composed.config.custom_reward_function.reward_kwargs["api_key"] == "s2"
    assert composed.config.ray_kwargs.ray_init["runtime_env"]["env_vars"] == {"HF_HOME": "s5", "MY_TOKEN": "s1"}
    assert not [secret for secret in ("s0", "s1", "s2", "s3", "s4", "s5") if secret in composed.yaml]
    for shown in ("path: ${oc.env:MY_MODELS}/qwen", "MY_TOKEN: ${oc.env:MY_TOKEN}", "prompt_key: question", "top: 3"):
        assert shown in composed.yaml


def test_a_refused_override_shows_no_secret():
    wrong = ["custom_reward_function.reward_kwargs.api_key=s1(", "trainer.api_key=s2", "trainer.password.x=s3"]
    faults = "\n".join(map(str, compose(wrong).faults))
    assert faults.count("***") == 3 and not [secret for secret in ("s1", "s2", "s3") if secret in faults], faults
    assert override_without_secrets("trainer.seed=3") == "trainer.seed=3"


def test_a_key_of_rlx_is_shown_whatever_its_name():
    """Else the command that continues an interrupted run would have *** for its tokens."""
    shown = [f"{key}=1" for key, leaf in LEAVES.items() if not isinstance(leaf.default, dict)]
    assert [text for text in shown if override_without_secrets(text) != text] == []
    assert override_without_secrets("custom_reward_function.reward_kwargs.api_key=1").endswith("=***")
