import pytest
import torch

from rlx.data.batch import Batch
from rlx.models.tiny import make_tiny_tokenizer
from rlx.rewards.manager import ConversationError, Conversations

CHAT = [{"role": "user", "content": "1+1?"}]


@pytest.fixture
def batch():
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
    tensors = {
        "input_ids": mask.long() * 9,
        "attention_mask": mask,
        "response_mask": mask[:, 2:],
        "seed": torch.arange(2),
    }
    return Batch.of(tensors, {"raw_prompt": [CHAT, "Say:"], "response_text": ["2", " two"]})


def other_tokenizer():
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    return tokenizer


def test_with_one_tokenizer_it_reads_the_policys_tokens(batch):
    conversations = Conversations(make_tiny_tokenizer(), make_tiny_tokenizer())
    found = conversations.of(batch)
    assert conversations.same and set(found.tensors.keys()) == {"input_ids", "attention_mask", "response_mask"}
    assert found["input_ids"].equal(batch["input_ids"])


def test_with_another_template_it_reads_the_texts(batch):
    tokenizer = other_tokenizer()
    found = Conversations(make_tiny_tokenizer(), tokenizer).of(batch)
    rows = zip(found["input_ids"], found["attention_mask"], strict=True)
    texts = [tokenizer.decode(ids[mask], skip_special_tokens=True) for ids, mask in rows]
    assert texts == ["[user]1+1?[assistant]2", "Say: two"]
    lengths = found["attention_mask"].sum(dim=1)
    assert lengths.tolist() == [len(texts[0]), len(texts[1]) + 1], "plain text ends as its tokenizer ends it"
    assert found["attention_mask"][:, -1].all() and found["response_mask"].shape == (2, 1)


def test_what_cannot_be_written_is_told(batch):
    tokenizer = other_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConversationError, match="does not take a chat"):
        Conversations(make_tiny_tokenizer(), tokenizer).of(batch)
    nameless = Batch(batch.tensors, {"response_text": ["2", "two"]})
    with pytest.raises(ConversationError, match="gives no info raw_prompt"):
        Conversations(make_tiny_tokenizer(), other_tokenizer()).of(nameless)
