"""Whole runs whose chat template rewrites earlier turns, with on_rewritten_history=fork."""

import shutil
from collections import defaultdict

import pytest
from test_run import results, resume_from
from test_run_environment import OWN, VLLM, check, read_transcripts
from transformers import AutoTokenizer

pytestmark = pytest.mark.e2e

# Turns before the last user message are written without all behind their second letter.
SHORTENS = (
    "{%- for m in messages -%}{%- set said = m.content -%}"
    "{%- if m.role == 'assistant' and not loop.last -%}{%- set said = said[:2] -%}{%- endif -%}"
    "{{ '<|' + m.role + '|>' + said }}{%- if m.role == 'assistant' -%}{{ eos_token }}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


@pytest.fixture
def options(tmp_path, untrained):
    """The overrides of a run with three turns."""
    path, folder = tmp_path / "own.py", tmp_path / "model"
    path.write_text(OWN)
    shutil.copytree(untrained, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = SHORTENS
    tokenizer.save_pretrained(folder)
    return [
        f"actor_rollout_ref.model.path={folder}",
        "actor_rollout_ref.rollout.multi_turn.on_rewritten_history=fork",
        "actor_rollout_ref.rollout.temperature=0.7",
        "data.max_response_length=48",
        f"environment.path={path}",
        *("environment.name=Echo", "environment.processes=1", "environment.rewards=replace"),
        *("trainer.save_freq=1", "trainer.total_training_steps=2"),
    ]


GRPO = (
    "algorithm.adv_estimator=grpo",
    "algorithm.norm_adv_by_std_in_grpo=False",
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=seq_reward",
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "trainer.n_gpus_per_node=2",
    "trainer.test_freq=2",
)


@pytest.mark.slow
def test_conversations_fork_and_resume_exactly(train, options):
    """GRPO with dynamic sampling on two processes, which hold other numbers of rows."""
    settings = [*options, *GRPO]
    folder, whole = train(*settings)
    resumed, second = train(*settings, *resume_from(folder, 1))
    found, expected = ({n: x for n, x in results(m).items() if not n.endswith("_s")} for m in (second[2], whole[2]))
    assert found == expected
    assert read_transcripts(resumed, 2) and len(read_transcripts(folder, 2)) == len(read_transcripts(resumed, 2))
    assert expected["conversation/forks"] > 0 and expected["conversation/turns_mean"] > 1
    assert 0 < expected["mismatch/turn_2/max_abs_log_prob"] < 1e-4, "the sampler saw the row that is trained on"
    lines = read_transcripts(folder, 1)
    assert len(lines) == pytest.approx(32 * (1 + whole[1]["conversation/forks"]))
    of_conversation = defaultdict(list)
    for line in lines:
        of_conversation[line["group"], line["sample"]].append(line)
    assert len(of_conversation) == 32 and max(map(len, of_conversation.values())) == 3
    for rows in of_conversation.values():
        assert [row["branch"] for row in rows] == [*range(len(rows))] and len({row["reward"] for row in rows}) == 1
        turns = [turn for row in rows for turn in row["turns"]]
        check({**rows[0], "reward": rows[0]["reward"] - sum(t["reward"] or 0.0 for t in turns if t["branch"])})
        for row in rows[1:]:
            assert row["turns"][0]["role"] == "history" and row["turns"][-1]["end"] == len(row["token_ids"])
            assert (
                row["token_ids"][: rows[0]["turns"][0]["start"]] == rows[0]["token_ids"][: rows[0]["turns"][0]["start"]]
            )
    for group in {group for group, _ in of_conversation}:
        own = [rows for (number, _), rows in of_conversation.items() if number == group]
        advantages = [{x for row in rows for x in row["advantages"] if x is not None} for rows in own]
        assert all(len(each) == 1 for each in advantages), "one number for all rows of a conversation"
        assert sum(each.pop() for each in advantages) == pytest.approx(0.0, abs=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_vllm")
def test_vllm_saw_the_rows_that_are_trained_on(train, options):
    (_, steps) = train(*options, *VLLM, "trainer.total_training_steps=1", "trainer.save_freq=-1")
    assert steps[1]["conversation/forks"] > 0
    assert 0 < steps[1]["mismatch/turn_2/max_abs_log_prob"] < 1e-3
