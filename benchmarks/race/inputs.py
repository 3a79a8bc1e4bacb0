"""Model, prompts and reward of whole runs on random weights, the same for every framework.

Responses have exactly the longest length: no framework needs an option for it, since EOS and padding are never sampled.
"""

import json
from argparse import Namespace
from itertools import chain, islice, product
from pathlib import Path
from random import Random
from string import ascii_lowercase, ascii_uppercase, digits
from typing import TYPE_CHECKING

import torch

from benchmarks.common import random_model
from benchmarks.offload.device import clean_up

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SPECIAL = ("<|pad|>", "<|end|>")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
REWARD = "def score(data_source, solution_str, ground_truth, extra_info=None): return len(set(solution_str)) / 64\n"
CHANNEL = 0.1  # of every embedding, in the one channel that no layer writes to
MARGIN = 40.0  # by which the logits of `SPECIAL` are below those of other tokens


def byte_tokenizer(size: int) -> "PreTrainedTokenizerBase":
    """Return a byte-level BPE tokenizer with `size` tokens.

    Beside bytes it knows words of capitals and digits. So each small letter is a token, and every id decodes to text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ascii_uppercase + digits
    words = chain.from_iterable(product(letters, repeat=n) for n in (2, 3, 4))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    longer = list(islice(words, size - len(SPECIAL) - len(alphabet)))
    tokens = [*SPECIAL, *alphabet, *("".join(word) for word in longer)]
    merges = [("".join(word[:-1]), word[-1]) for word in longer]
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=SPECIAL[0], eos_token=SPECIAL[1], chat_template=TEMPLATE
    )


@torch.no_grad()
def forbid(model: "PreTrainedModel", tokens: list[int]) -> None:
    """Change the weights such that the model never samples these tokens; all other logits move by one constant."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0.0
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embedding[:, 0] = CHANNEL
    if head is not embedding:
        head[:, 0] = 0.0
    ids = torch.randint(len(tokens), len(embedding), (4, 64), device=embedding.device)
    hidden = model(ids, output_hidden_states=True).hidden_states[-1]  # behind the last norm
    head[tokens] = 0.0
    head[tokens, 0] = -MARGIN / float(hidden[..., 0].min())


def write_inputs(folder: Path, options: Namespace, device: torch.device) -> list[str]:
    """Write model, prompts of exactly `options.prompt` tokens and a reward; return verl's and rlx's keys that name them.

    The device's free memory goes back to the system afterwards: vLLM and child processes take memory from there.
    """
    model = random_model(options.shape, device, max_position_embeddings=options.prompt + options.response)
    tokenizer, random = byte_tokenizer(model.config.vocab_size), Random(0)
    forbid(model, [0, 1])
    model.config.pad_token_id, model.config.eos_token_id, model.config.bos_token_id = 0, 1, None
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 1
    for part in (model, tokenizer):
        part.save_pretrained(folder / "model")
    del model
    clean_up(device)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(options.prompts * options.steps):
            text = "".join(random.choices(ascii_lowercase, k=options.prompt))
            prompt = [{"role": "user", "content": text}]
            row = {"prompt": prompt, "data_source": "random", "reward_model": {"style": "rule", "ground_truth": ""}}
            file.write(json.dumps(row) + "\n")
    (folder / "reward.py").write_text(REWARD)
    return [
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"data.train_files={folder / 'prompts.jsonl'}",
        f"data.val_files={folder / 'prompts.jsonl'}",
        f"custom_reward_function.path={folder / 'reward.py'}",
        "custom_reward_function.name=score",
    ]
