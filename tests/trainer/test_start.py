"""What is found wrong before the warm start, the run's folder and the workers' models; and that they come after it."""

import json
import os
import shutil

import pytest

from rlx.checkpoint.manifest import seal
from rlx.config.compose.command_line import compose
from rlx.data.files import DataError
from rlx.rewards.manager import RewardError
from rlx.trainer import checkpoints as ck
from rlx.trainer import run as module
from rlx.trainer.run_lock import RunLocked
from rlx.trainer.start import StartError, added_system_prompt, policy_tokenizer, prepare


def row(source):
    prompt = [{"role": "user", "content": "1 + 1"}]
    return {"data_source": source, "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": "2"}}


@pytest.fixture
def config(tmp_path, untrained):
    """config(*overrides) of a small run with an untrained model."""

    def of(*overrides, model=untrained):
        sizes = ("data.arithmetic.train_size=16", "data.arithmetic.val_size=8", "data.train_batch_size=8")
        base = ("experiment=arithmetic", f"actor_rollout_ref.model.path={model}", *sizes)
        folders = (f"trainer.default_local_dir={tmp_path}/runs", f"warm_start.cache_dir={tmp_path}/cache")
        composed = compose([*base, *folders, *overrides])
        assert not composed.faults, composed.faults
        return composed.config

    return of


@pytest.fixture
def rows(tmp_path):
    """rows(*sources): a file with one prompt of each data source."""

    def write(*sources):
        path = tmp_path / f"{'_'.join(sources).replace('/', '-')}.jsonl"
        path.write_text("".join(json.dumps(row(source)) + "\n" for source in sources))
        return path

    return write


def test_nothing_wrong(config):
    prepared = prepare(config())
    assert (len(prepared.train), len(prepared.val), prepared.checkpoint) == (16, 8, None)
    assert len(prepared.sampler.next()) == 8 and prepared.notices(config()) == []


def test_all_faults_come_at_once(config, rows):
    with pytest.raises(StartError) as caught:
        prepare(
            config(
                "+ray_kwargs.ray_init.num_cpu=2",
                "actor_rollout_ref.model.attn_implementation=sdap",
                f"data.train_files={rows('my/data', 'your/data')}",
                "data.train_batch_size=3",
                "data.max_prompt_length=3",
                "trainer.resume_mode=resume_path",
                "trainer.resume_from_path=/none/global_step_3",
            )
        )
    text = str(caught.value)
    assert text.startswith("5 faults:\n  1. ray_kwargs.ray_init: ")
    assert "2. trainer.resume_from_path" in text and "3. actor_rollout_ref.model: attn_implementation" in text
    assert text.count("remedy: raise data.max_prompt_length") == 2, "of both splits"


def test_a_single_fault_is_raised_as_it_is(config, rows):
    with pytest.raises(DataError, match=r"data\.train_batch_size: got 17"):
        prepare(config("data.train_batch_size=17"))
    with pytest.raises(RewardError, match="no reward function for data source 'my/data', 'your/data';"):
        prepare(
            config(
                f"data.train_files={rows('your/data')}", f"data.val_files={rows('my/data')}", "data.train_batch_size=1"
            )
        )


def test_validation_rows_of_a_run_that_never_validates_are_not_read(config, rows):
    own = ("data.max_prompt_length=3", "data.truncation=left", f"data.val_files={rows('my/data')}")
    with pytest.raises(RewardError, match="no reward function for data source 'my/data'"):
        prepare(config(*own))
    prepared = prepare(config(*own, "trainer.val_before_train=False", "trainer.test_freq=-1"))
    with prepared.held:
        assert prepared.val is None


def test_a_data_source_that_no_prompt_has_is_told_of(config, tmp_path):
    (tmp_path / "mine.py").write_text("def compute_score(**all): return 0")
    own = config(
        f"custom_reward_function.path={tmp_path}/mine.py", "custom_reward_function.data_sources=[rlx/arithmetics]"
    )
    prepared = prepare(own)
    with prepared.rewards:
        (notice,) = prepared.notices(own)
    assert "no prompt is of 'rlx/arithmetics'; the prompts are of 'rlx/arithmetic'" in notice


OWN_SOURCES = """
from rlx.data.prompts import PromptDataset

class Relabelled(PromptDataset):
    def batch(self, indices):
        batch = super().batch(indices)
        return batch.with_(info={"data_source": ["rlx/arithmetic"] * len(indices)})
"""


def test_a_template_that_writes_the_date_or_hides_tools_is_told_of(config, tmp_path):
    file = tmp_path / "tools.jsonl"
    file.write_text(f"{json.dumps({**row('rlx/arithmetic'), 'tools': [{'name': 'add'}]})}\n" * 8)
    prepared = prepare(config(f"data.train_files={file}"))
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    prepared.tokenizer.chat_template = template
    (said,) = prepared.tokenizer.apply_chat_template([[{"role": "user", "content": "x"}]], tokenize=False)
    assert said[-5:-1].isdigit(), "the year"
    date, tools = prepared.notices(config())
    assert "the present date" in date and "fixed date" in date
    assert "does not show the model the tools of the rows" in tools
    prepared.tokenizer.chat_template = "{{ tools }}"
    assert prepared.notices(config()) == []


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TURNS


@pytest.mark.parametrize(
    ("template", "added"),
    [
        ("{% if messages[0].role != 'system' %}<system>You are kind.</>{% endif %}" + TURNS, "You are kind."),
        *((template, "") for template in (TURNS, "<system>always</>" + TURNS, NO_SYSTEM)),
    ],
)
def test_a_system_prompt_of_the_templates_own_is_shown(config, untrained, tmp_path, template, added):
    tokenizer, folder = prepare(config()).tokenizer, shutil.copytree(untrained, tmp_path / "model")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    assert added_system_prompt(tokenizer) == added
    notices = prepare(config("data.max_prompt_length=256", model=folder)).notices(config())
    assert [f'of its own, "{added}"; a system message' in each for each in notices] == [True] * bool(added)


def test_a_class_of_the_users_own_may_make_its_own_data_sources(config, rows, tmp_path):
    (tmp_path / "mine.py").write_text(OWN_SOURCES)
    own = (f"data.custom_cls.path={tmp_path}/mine.py", "data.custom_cls.name=Relabelled")
    prepared = prepare(config(*own, f"data.train_files={rows('my/data')}", "data.train_batch_size=1"))
    assert prepared.notices(config()) == []


def test_a_checkpoint_of_other_prompts_is_refused_before_anything_starts(config, tmp_path):
    folder = tmp_path / "runs/a/checkpoints/global_step_2"
    (folder / "actor").mkdir(parents=True)
    (folder / "actor/checkpoint.json").write_text(json.dumps({"contents": ["model"], "adapters": {}}))
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}")
    prepared = prepare(config())
    ck.write_driver_state(
        folder, ck.DriverState(2, 1, 2, prepared.sampler.state_dict(), {"type": "fixed", "coef": 0.1}, 0, {})
    )
    for sealed in (folder / "actor", folder):
        seal(sealed, {})
    held = prepare(config(*resume))
    assert held.checkpoint == folder
    with held.lock, pytest.raises(RunLocked, match=rf"process {os.getpid()} on .* still runs"):
        prepare(config(*resume))
    with pytest.raises(DataError, match="the checkpoint's prompts have"):
        prepare(config(*resume, "data.arithmetic.train_size=24"))
    with pytest.raises(ck.ResumeError, match="there is no critic in it"):
        prepare(config(*resume, "algorithm.adv_estimator=gae"))


def test_a_mistake_costs_no_warm_start_and_leaves_no_folder(config, tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError("must not start")

    monkeypatch.setattr(module, "warm_start", never)
    with pytest.raises(DataError):
        module.run(config("data.train_batch_size=17", model="builtin:tiny"), "", workers=None)
    assert not (tmp_path / "runs").exists() and not (tmp_path / "cache").exists()


def test_the_tokenizer_before_the_warm_start_is_the_one_after_it(config, untrained):
    before, after = policy_tokenizer(config(model="builtin:tiny")), policy_tokenizer(config(model=untrained))
    chat = [{"role": "system", "content": "ä"}, {"role": "user", "content": " 1 + 1 .\n"}]
    assert type(before) is type(after) and len(before) == len(after)
    assert (before.pad_token_id, before.eos_token_id) == (after.pad_token_id, after.eos_token_id)
    ids, again = (
        each.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for each in (before, after)
    )
    assert ids == again
    for skip in (False, True):
        texts = [each.decode([*ids, each.eos_token_id], skip_special_tokens=skip) for each in (before, after)]
        assert texts[0] == texts[1]
