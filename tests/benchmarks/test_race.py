"""Inputs of the race, and a small one on the CPU."""

import json

import pytest
import torch

from benchmarks.common import random_model
from benchmarks.race.__main__ import main
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


@pytest.mark.nightly
def test_rlx_and_trl_do_the_same_steps(tmp_path, capsys):
    on_cpu = ["actor_rollout_ref.rollout.name=hf", "trainer.device=cpu", f"--json={tmp_path / 'figures.json'}"]
    main([*on_cpu, *SIZE, "--updates=2", "--micro-batch=4", "--frameworks", "rlx", "TRL"])
    found = json.loads((tmp_path / "figures.json").read_text())["frameworks"]
    assert set(found) == {"rlx", "TRL"}, capsys.readouterr().out
    for row in found.values():
        assert row["steps"] == 2 and row["tokens"] == WORK["response"]
        assert all(row[phase] > 0 for phase in ("generation", "old", "ref", "update")) and row["rest"] >= 0
    assert found["rlx"]["grad norm"] == pytest.approx(found["TRL"]["grad norm"], rel=0.5)
