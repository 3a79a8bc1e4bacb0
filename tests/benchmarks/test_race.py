"""Inputs, rows and table of the race, and a small one on the CPU."""

import json
import os
from argparse import Namespace

import pytest
import torch

from benchmarks.common import random_model
from benchmarks.race.__main__ import figures, main, shared_keys, trl_racer, verl_racer
from benchmarks.race.inputs import MARGIN, byte_tokenizer, forbid

WORK = {"shape": "tiny", "prompts": 2, "samples": 4, "prompt": 40, "response": 8, "steps": 3}
SIZE = [f"--{name}={value}" for name, value in WORK.items()]


@pytest.mark.parametrize("tied", [True, False])
def test_forbidden_tokens_are_never_sampled_and_the_others_keep_their_chances(tied):
    model = random_model("tiny", torch.device("cpu"), tie_word_embeddings=tied).float()
    forbid(model, [0, 1])
    logits = model(torch.randint(2, 1024, (4, 100))).logits
    assert logits[..., :2].max() + 0.8 * MARGIN < logits[..., 2:].min()
    assert 0.05 < logits[..., 2:].std() < 1


def test_each_small_letter_is_a_token_and_every_token_has_a_text_of_its_own():
    tokenizer = byte_tokenizer(3000)
    assert len(tokenizer) == 3000
    assert len(tokenizer("thequickbrownfox")["input_ids"]) == 16
    texts = [tokenizer.decode([number]) for number in range(258, 3000)]
    assert len(set(texts)) == len(texts) and all(texts)
    message = [{"role": "user", "content": "abc"}]
    assert tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True) == "abc"


def test_figures_are_medians_without_the_first_step_and_rest_is_what_no_phase_takes():
    verl = {"timing_s/gen": 3.0, "timing_s/update_actor": 4.0, "timing_s/update_weights": 0.5, "actor/grad_norm": 0.7}
    steps = {n: {**verl, "timing_s/step": seconds} for n, seconds in ((1, 90.0), (2, 9.0), (3, 11.0), (4, 10.0))}
    found = figures(steps, 50.0)
    assert found["generation"] == 3.0 and found["update"] == 4.0 and found["sync"] == 0.5 and found["old"] == 0.0
    expected = {"steps": 3, "step": 10.0, "rest": 2.5, "engines": 1, "peak GB": 50.0, "grad norm": 0.7}
    assert {name: found[name] for name in expected} == expected


def options_of(**changes):
    fields = {"updates": 1, "micro_batch": 4, "checkpointing": False, "lora": 0, "share": 0.4, "each": None, "site": []}
    return Namespace(**WORK, **fields | {"frameworks": ["rlx", "verl"]} | changes)


def test_verl_runs_with_its_own_packages_first_and_its_rows_are_read(tmp_path):
    options = options_of(site=[f"verl={tmp_path / 'old'}", "TRL=/elsewhere"])
    racer = verl_racer(tmp_path, options, [*shared_keys(options), "custom_reward_function.name=score"])
    assert "reward.custom_reward_function.name=score" in racer.command
    assert racer.environment["PYTHONPATH"].startswith(f"{tmp_path / 'old'}:")
    fsdp2 = "actor_rollout_ref.actor.strategy=fsdp2"
    assert fsdp2 not in racer.command and fsdp2 in verl_racer(tmp_path, options_of(lora=8), []).command
    assert trl_racer(tmp_path, options).environment["PYTHONPATH"].startswith("/elsewhere:")
    assert not racer.steps()
    rows = [{"step": 1, "data": {"timing_s/step": 5.0}}, {"step": 1, "data": {"val/x": 1.0}}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 2, "da')
    assert racer.steps() == {1: {"timing_s/step": 5.0}}


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("RLX_NIGHTLY"), reason="whole runs of a benchmark are tried nightly")
def test_rlx_and_trl_do_the_same_steps(tmp_path, capsys):
    on_cpu = ["actor_rollout_ref.rollout.name=hf", "trainer.device=cpu", f"--json={tmp_path / 'figures.json'}"]
    main([*on_cpu, *SIZE, "--updates=2", "--micro-batch=4", "--frameworks", "rlx", "TRL"])
    found = json.loads((tmp_path / "figures.json").read_text())["frameworks"]
    assert set(found) == {"rlx", "TRL"}, capsys.readouterr().out
    for row in found.values():
        assert row["steps"] == 2 and row["tokens"] == WORK["response"]
        assert all(row[phase] > 0 for phase in ("generation", "old", "ref", "update")) and row["rest"] >= 0
    assert found["rlx"]["grad norm"] == pytest.approx(found["TRL"]["grad norm"], rel=0.5)
