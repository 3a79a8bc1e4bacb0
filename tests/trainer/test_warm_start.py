import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlx.config.check.folders import warm_starts_folder
from rlx.config.schema import (
    ActorRolloutRefConfig,
    ArithmeticConfig,
    DataConfig,
    EnvironmentConfig,
    ModelConfig,
    PPOConfig,
    TinyModelConfig,
    WarmStartConfig,
)
from rlx.data.arithmetic import make_problems
from rlx.models.tiny import make_tiny
from rlx.trainer import imitation
from rlx.trainer import warm_start as module
from rlx.trainer.warm_start import warm_start

TINY = TinyModelConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
)


@pytest.fixture
def config(tmp_path):
    return PPOConfig(
        data=DataConfig(arithmetic=ArithmeticConfig(train_size=64, val_size=16)),
        actor_rollout_ref=ActorRolloutRefConfig(model=ModelConfig(path="builtin:tiny", tiny=TINY)),
        warm_start=WarmStartConfig(max_steps=6, batch_size=4, eval_every=3, cache_dir=str(tmp_path / "new" / "cache")),
    )


def weights_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_a_model_folder_is_made_once_and_is_the_same_anywhere(config, tmp_path, capsys):
    folder = warm_start(config)
    told = "until it solves 30% of held-out problems, for at most 6 step(s); it is cached in"
    assert f"{told} {folder}\n" in capsys.readouterr().out
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert warm_start(config) == folder and capsys.readouterr().out == ""
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]
    torch.manual_seed(123)  # the caller's random state has no say
    elsewhere = replace(config, warm_start=replace(config.warm_start, cache_dir=str(tmp_path / "other")))
    again = warm_start(elsewhere)
    assert again.name == folder.name
    fresh = make_tiny(TINY)[0].state_dict()
    for name, tensor in weights_of(folder).items():
        assert torch.equal(tensor, weights_of(again)[name])
        assert not torch.equal(tensor, fresh[name])
    assert AutoTokenizer.from_pretrained(folder).get_chat_template()
    assert json.loads((folder / "warm_start.json").read_text())["steps"] == 6


@pytest.mark.parametrize(
    "change",
    [
        lambda c: replace(c, warm_start=replace(c.warm_start, lr=2e-3)),
        lambda c: replace(c, data=replace(c.data, arithmetic=replace(c.data.arithmetic, difficulty=2))),
        lambda c: replace(c, actor_rollout_ref=ActorRolloutRefConfig(model=ModelConfig(tiny=replace(TINY, seed=1)))),
    ],
)
def test_whatever_changes_the_model_changes_its_folder(config, change):
    assert module._fingerprint(change(config)) != module._fingerprint(config)


def test_what_does_not_change_the_model_keeps_its_folder(config):
    other = replace(config, trainer=replace(config.trainer, seed=5), data=replace(config.data, train_batch_size=3))
    assert module._fingerprint(other) == module._fingerprint(config)
    own = EnvironmentConfig(path="game.py", name="calculator", kwargs={"most": 3})
    assert module._fingerprint(replace(config, environment=own)) == module._fingerprint(config), (
        "nothing of it is shown"
    )
    assert module._fingerprint(replace(config, environment=replace(own, path=None))) != module._fingerprint(config)


def test_accuracy_is_measured_on_problems_outside_both_splits(config):
    tokenizer, task = make_tiny(TINY)[1], config.data.arithmetic
    train, held_out = ({each.turns[0][0] for each in part} for part in imitation._examples(config, tokenizer))
    given, val = (
        {imitation._example(row, config.environment, tokenizer).turns[0][0] for row in make_problems(task, split)}
        for split in ("train", "val")
    )
    assert train == given
    assert len(held_out) == imitation.HELD_OUT and not held_out & (given | val)


def test_only_the_solution_is_learned_and_padding_is_not():
    ids, labels = imitation._padded([(((5, 6), (7, 1)),), (((8,), (9, 9, 9, 1)),)])
    assert ids.tolist() == [[5, 6, 7, 1, 0], [8, 9, 9, 9, 1]]
    assert labels.tolist() == [[-100, -100, 7, 1, -100], [-100, 9, 9, 9, 1]]


@pytest.mark.slow
def test_training_stops_at_the_target(config):
    small = replace(TINY, hidden_size=64, num_hidden_layers=2)
    config = replace(
        config,
        data=DataConfig(arithmetic=ArithmeticConfig(train_size=2048)),
        actor_rollout_ref=ActorRolloutRefConfig(model=ModelConfig(tiny=small)),
        warm_start=replace(
            config.warm_start, max_steps=1000, batch_size=16, eval_every=25, lr=5e-3, target_accuracy=0.01
        ),
    )
    result = json.loads((warm_start(config) / "warm_start.json").read_text())
    assert result["accuracy"] >= 0.01
    assert result["steps"] < 1000 and result["steps"] % 25 == 0


def test_a_failure_leaves_nothing_that_looks_finished(config, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("transformers.tokenization_utils_base.PreTrainedTokenizerBase.save_pretrained", full)
    with pytest.raises(OSError, match="disk full"):
        warm_start(config)
    assert list(warm_starts_folder(config).iterdir()) == []


def test_a_folder_that_cannot_be_written_costs_no_training(config, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("read-only file system")

    monkeypatch.setattr(module.tempfile, "mkdtemp", full)
    monkeypatch.setattr(imitation._Training, "run", lambda self: pytest.fail("it trained"))
    with pytest.raises(OSError, match="read-only"):
        warm_start(config)


def test_the_slower_of_two_processes_leaves_the_folder_of_the_faster(tmp_path):
    for name in ("finished", "unfinished"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    module._publish(tmp_path / "unfinished", tmp_path / "finished")
    assert (tmp_path / "finished" / "file").read_text() == "finished"
    with pytest.raises(OSError):
        module._publish(tmp_path / "absent", tmp_path / "nowhere")
