"""Write a batch's prompts and responses in the tokens of a reward model."""

from typing import TYPE_CHECKING, Any

from rlx.data.batch import SEQUENCE, Batch, left_padded
from rlx.errors import ExplainedError
from rlx.user_code import TEMPLATE_LIMIT_S, call_within

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ConversationError(ExplainedError, ValueError):
    """A conversation cannot be written for the reward model."""


class Conversations:
    """Turns samples into the sequences of a reward model.

    If policy and judge have the same vocabulary and chat template, the sequences are the policy's own tokens. Otherwise the
    reward model's chat template formats the prompt's messages and the response's text, without special tokens. A prompt of
    plain text needs no template: the response follows it directly.
    """

    def __init__(self, policy: "PreTrainedTokenizerBase", judge: "PreTrainedTokenizerBase"):
        self._judge = judge
        self.same = policy.get_vocab() == judge.get_vocab() and policy.chat_template == judge.chat_template

    def of(self, batch: Batch) -> Batch:
        """Return the columns SEQUENCE to score, row by row, of a batch with them and with info raw_prompt and response_text.

        Raises ConversationError if the reward model's tokenizer refuses a chat, or if a user's data set gives no raw_prompt.
        """
        if self.same:
            return batch.select(*SEQUENCE)
        if "raw_prompt" not in batch.info:
            raise ConversationError(
                "the reward model has another tokenizer than the policy and needs the prompts' messages, but the data set "
                "gives no info raw_prompt (text, or a list of messages, for each row); let its batch() give them"
            )
        texts = zip(batch.info["raw_prompt"], batch.info["response_text"], strict=True)
        ids_BT, mask_BT = left_padded([self._tokens(*each) for each in texts])
        # The model scores the whole sequence, so any part of it may count as the response.
        return Batch.of({"input_ids": ids_BT, "attention_mask": mask_BT, "response_mask": mask_BT[:, -1:]})

    def _tokens(self, prompt: str | list[dict[str, Any]], response: str) -> list[int]:
        if isinstance(prompt, str):
            return list(self._judge(prompt + response)["input_ids"])
        messages = [*prompt, {"role": "assistant", "content": response}]
        try:
            template = self._judge.apply_chat_template
            return list(call_within(TEMPLATE_LIMIT_S, template, messages, tokenize=True, return_dict=False))
        except Exception as fault:  # templates raise any kind of error
            raise ConversationError(
                f"the reward model's tokenizer does not take a chat ({type(fault).__name__}: {fault}); expected a chat template "
                "for these roles; save one with the tokenizer, or use prompts of plain text"
            ) from None
