import pytest

from rlx.data.files import gsm8k_row


def test_row():
    row = gsm8k_row({"question": "How many? ", "answer": "2*600=1200\n#### 1,200"}, "train", 3)
    (message,) = row["prompt"]
    assert message["role"] == "user"
    assert message["content"].startswith("How many?\n\n") and "####" in message["content"]
    assert row["data_source"] == "openai/gsm8k"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1200"}
    assert row["extra_info"] == {
        **{"index": 3, "split": "train", "question": "How many? ", "answer": "2*600=1200\n#### 1,200"}
    }


@pytest.mark.parametrize(
    "row, what",
    [
        ({"question": "q"}, "got question 'q' and answer None, expected two texts"),
        ({"question": 5, "answer": "#### 5"}, "got question 5"),
        ({"question": "q", "answer": "It is 5."}, "expected `#### <number>` at its end"),
        ({"question": "q", "answer": "It is 5. ####  "}, "expected `#### <number>` at its end"),
    ],
)
def test_row_faults(row, what):
    with pytest.raises(ValueError, match=what):
        gsm8k_row(row, "train", 0)
