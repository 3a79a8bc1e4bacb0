"""Whole runs with environments: one turn equals a single response, several turns resume exactly and may fork, transcripts hold them."""

import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from run_tools import OWN, results, resume_from, transcript
from transformers import AutoTokenizer

from rlx.cluster.errors import WorkerFailure, end_of
from rlx.errors import ExplainedError

pytestmark = pytest.mark.e2e

RAISES = 1 + OWN.splitlines().index('            raise ValueError("unlucky")')
UNLUCKY = f"error: raised ValueError (own.py:{RAISES}): unlucky"


# Turns before the last user message are written without all behind their second letter.
SHORTENS = (
    "{%- for m in messages -%}{%- set said = m.content -%}"
    "{%- if m.role == 'assistant' and not loop.last -%}{%- set said = said[:2] -%}{%- endif -%}"
    "{{ '<|' + m.role + '|>' + said }}{%- if m.role == 'assistant' -%}{{ eos_token }}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


@pytest.fixture
def shortening(tmp_path, untrained):
    """The overrides of a model whose template rewrites earlier turns, and that forks then."""
    folder = tmp_path / "model"
    shutil.copytree(untrained, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = SHORTENS
    tokenizer.save_pretrained(folder)
    return [f"actor_rollout_ref.model.path={folder}", "actor_rollout_ref.rollout.multi_turn.on_rewritten_history=fork"]


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    found = f"environment.path={path}", "environment.processes=1"
    return lambda name, *more: [*found, f"environment.name={name}", *more]


@pytest.mark.slow
def test_one_turn_with_an_environment_changes_no_number(train, own, learning):
    """Nor does it where one update a batch needs no pass for old log-probs; the samples have their trainer's all the same."""
    steps = ["trainer.total_training_steps=1", "trainer.test_freq=1", *learning]
    steps += ["actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    _, alone = train(*steps)
    assert "timing_s/old_log_prob" not in alone[1] and alone[1]["actor/ppo_kl"] == 0
    assert alone[1]["timing_s/update_actor"] > 0 < alone[1]["memory/update_actor_after_gb"]
    folder, with_it = train(*steps, *own("Once"))
    for step, expected in alone.items():
        found = results(with_it[step])
        added = {name for name in found if name.startswith("conversation/")}
        assert {name: x for name, x in found.items() if name not in added} == results(expected)
        assert not added or (found["conversation/turns_mean"], found["conversation/loss_token_share"]) == (1.0, 1.0)
    lines = transcript(folder, 1)
    gaps = [abs(gap) for line in lines for gap in line["log_prob_gap"] if gap is not None]
    assert len(lines) == 32 and len(gaps) == sum(sum(line["loss_mask"]) for line in lines) and max(gaps) < 1e-4


@pytest.mark.slow
def test_conversations_resume_exactly_and_are_kept(train, own):
    """In the middle of an epoch, with a critic over turns."""
    settings = ["data.max_response_length=48", "trainer.save_freq=1", "trainer.total_training_steps=2"]
    settings += ["algorithm.adv_estimator=gae", "algorithm.time_step=turn", "algorithm.lam=0.9"]
    settings += ["actor_rollout_ref.rollout.temperature=0.7", *own("Echo", "environment.rewards=replace")]
    folder, whole = train(*settings)
    resumed, second = train(*settings, *resume_from(folder, 1))
    found, expected = ({n: x for n, x in results(m).items() if not n.endswith("_s")} for m in (second[2], whole[2]))
    assert found == expected
    kept = ("token_ids", "loss_mask", "advantages", "reward", "reason")
    again, first = ([[own[name] for name in kept] for own in transcript(run, 2)] for run in (resumed, folder))
    assert len(again) == 32 and again == first and 1 < expected["conversation/turns_mean"] < 3
    assert expected["mismatch/turn_2/max_abs_log_prob"] < 1e-3
    assert (
        expected["conversation/failures"] > 0
        and expected["conversation/ended/error"] == expected["conversation/failures"] / 32
    )
    for record in transcript(folder, 1):
        check(record)
        assert (record["reason"] == UNLUCKY) == record.get("traceback", "").endswith("ValueError: unlucky\n")


@pytest.mark.slow
def test_an_agent_at_the_address_trains_the_same_weights_and_resumes_exactly(train, own):
    settings = ["data.max_response_length=48", "trainer.save_freq=1", "trainer.total_training_steps=2"]
    settings += ["environment.rewards=replace", "actor_rollout_ref.rollout.multi_turn.max_turn_tokens=8"]
    built_in, expected = train(*settings, *own("Last"))
    folder, found = train(*settings, *own("endpoint"))
    resumed, again = train(*settings, *own("endpoint"), *resume_from(folder, 1))
    kept = [{n: x for n, x in results(each[2]).items() if not n.endswith("_s")} for each in (expected, found, again)]
    assert kept[0] == kept[1] == kept[2] and kept[0]["actor/grad_norm"] > 0
    kept = [run / "checkpoints" / "global_step_2" / "actor" / "model" for run in (built_in, folder, resumed)]
    weights = [[file.read_bytes() for file in sorted(each.rglob("*")) if file.is_file()] for each in kept]
    assert weights[0] == weights[1] == weights[2] != []


@pytest.mark.nightly
def test_an_environment_of_verifiers_trains(train, tmp_path):
    pytest.importorskip("verifiers")
    sums, rows = Path(__file__).parents[1] / "fixtures" / "verifiers_sums.py", tmp_path / "rows.jsonl"
    subprocess.run([sys.executable, "-m", "rlx.environments.verifiers_agent", rows, sums], check=True)
    own = ["environment.name=verifiers", f"environment.path={sums}", "environment.kwargs.agent.runtime.type=subprocess"]
    own += [f"data.train_files={rows}", f"data.val_files={rows}", "data.train_batch_size=2", "environment.processes=1"]
    own += ["environment.rewards=replace", "data.max_response_length=48", "trainer.total_training_steps=1"]
    own += ["actor_rollout_ref.rollout.multi_turn.max_turn_tokens=8", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    folder, found = train(*own)
    assert found[1]["actor/grad_norm"] > 0 and found[1]["reward/extra/turns"] == 2.0
    for record in transcript(folder, 1):
        assert record["reward"] in {
            0.5 * right + len(set(record["turns"][-1]["text"].strip())) / 16 for right in (0, 1)
        }


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_vllm")
def test_processes_around_one_vllm_engine_have_the_same_conversations_and_train_on_the_rows_it_saw(
    train, own, shortening
):
    """Only the first process has environments; the trainer's log-probs of every turn are the sampler's, also of forks."""
    options = [
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=16777216",
        *("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "actor_rollout_ref.rollout.temperature=0.7"),
        *("actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2", "data.max_response_length=48"),
        *("trainer.n_gpus_per_node=2", "trainer.total_training_steps=1"),
        *own("endpoint", "environment.rewards=replace", "environment.max_parallel=20"),
    ]
    folder, steps = train(*options, *shortening)
    assert steps[1]["conversation/turns_max"] == 2 and steps[1]["conversation/forks"] > 0
    for turn, most in (("turn_1/", 1e-4), ("turn_2/", 1e-3)):
        assert 0 < steps[1][f"mismatch/{turn}max_abs_log_prob"] < most
    records = transcript(folder, 1)
    assert len({(record["group"], record["sample"]) for record in records}) == 32 < len(records)


@pytest.mark.slow
def test_conversations_fork(train, own, shortening):
    """GRPO with dynamic sampling on two processes, which hold other numbers of rows."""
    settings = ["algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=False", "trainer.n_gpus_per_node=2"]
    settings += ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=seq_reward"]
    settings += ["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", "trainer.total_training_steps=2"]
    settings += ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.rollout.temperature=0.7"]
    settings += ["data.max_response_length=48", "trainer.test_freq=2", *own("Echo", "environment.rewards=replace")]
    folder, whole = train(*settings, *shortening)
    assert whole[2]["conversation/forks"] > 0 and whole[2]["conversation/turns_mean"] > 1
    assert 0 < whole[2]["mismatch/turn_2/max_abs_log_prob"] < 1e-4, "the sampler saw the row that is trained on"
    lines = transcript(folder, 1)
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
def test_an_environment_that_always_fails_ends_the_run_with_its_own_traceback(train, own, tmp_path):
    options = own("Echo", "environment.on_failure=end_run")
    (tmp_path / "own.py").write_text(OWN.replace('self.seed = row["seed"]', 'self.seed = randon.Random(row["seed"])'))
    with pytest.raises(ExplainedError) as stopped:
        train("trainer.total_training_steps=1", *options)
    error = stopped.value
    assert isinstance(error, WorkerFailure)
    told = error.fault.detail
    assert 'self.seed = randon.Random(row["seed"])' in told and told.endswith("NameError: name 'randon' is not defined")
    assert set(re.findall(r'File "(.*)", line', told)) == {str(tmp_path / "own.py")}, "no frame of rlx"
    line = 1 + OWN.splitlines().index('        self.seed = row["seed"]')
    assert f"raised NameError (own.py:{line}): name 'randon' is not defined" in str(error)
    assert end_of(error)["curable"] is False, "a restart would fail the same way"


def check(record):
    """A transcript's lists have a length, and its turns are where they say."""
    lists = ("token_ids", "tokens", "loss_mask", "advantages", "log_prob_gap")
    assert {len(record[name]) for name in lists} == {len(record["token_ids"])}
    assert [x is not None for x in record["advantages"]] == [bool(x) for x in record["loss_mask"]]
    own = {
        place for turn in record["turns"] if turn["role"] == "assistant" for place in range(turn["start"], turn["end"])
    }
    assert own == {place for place, counts in enumerate(record["loss_mask"]) if counts}
    assert record["turns"][-1]["end"] == len(record["token_ids"])
    rewards = [turn["reward"] or 0.0 for turn in record["turns"]]
    assert sum(rewards) == pytest.approx(record["reward"], abs=1e-4)
    assert record["reason"] in ("done", "length", "max_turns", UNLUCKY)
