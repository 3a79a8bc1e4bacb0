"""Keys, model, prompts and reward of whole runs on random weights, the same for every framework, and the medians of their steps.

Responses have exactly the longest length: no framework needs an option for it, since EOS and padding are never sampled. Or the weights
give EOS one probability at each token, so that lengths vary.
"""

import json
import math
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from itertools import chain, islice, product
from pathlib import Path
from random import Random
from string import ascii_lowercase, ascii_uppercase, digits
from typing import TYPE_CHECKING

import torch

from benchmarks.common import random_model
from benchmarks.offload.device import clean_up
from rlx.offload.plan.shapes import SHAPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PHASE = "timing_s/"
OTHERS = ("actor/tokens_saved", "actor/grad_norm", "response_length/mean", "perf/tokens", "perf/peak_memory_gb")
SPECIAL = ("<|pad|>", "<|end|>")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
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


@torch.no_grad()
def end_by_chance(model: "PreTrainedModel", token: int, mean: float) -> None:
    """Change the weights of a forbidden token such that one of `mean` samples is this token, whatever comes before it."""
    head = model.get_output_embeddings().weight
    found = model(torch.randint(2, len(head), (4, 64), device=head.device), output_hidden_states=True)
    logit = found.logits.float().logsumexp(-1).mean() - math.log(mean - 1)
    head[token, 0] = float(logit / found.hidden_states[-1][..., 0].float().mean())


def write_inputs(folder: Path, options: Namespace, device: torch.device, mean_response: int = 0) -> list[str]:
    """Write model, prompts of exactly `options.prompt` tokens and a reward; return verl's and rlx's keys that name them.

    With `mean_response` the lengths of responses vary.

    The device's free memory goes back to the system afterwards: vLLM and child processes take memory from there.
    """
    model = random_model(options.shape, device, max_position_embeddings=options.prompt + options.response)
    tokenizer, random = byte_tokenizer(model.config.vocab_size), Random(0)
    forbid(model, [0, 1])
    if mean_response:
        end_by_chance(model, 1, mean_response)
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


def settings(options: Namespace, gpus: int = 1) -> list[str]:
    """Return the overrides of every run but those of its inputs. verl knows them too."""
    tokens = options.micro_batch * (options.prompt + options.response)
    policy = "actor_rollout_ref"
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_batch_size={options.prompts}",
        f"data.max_prompt_length={options.prompt}",
        f"data.max_response_length={options.response}",
        f"{policy}.rollout.n={options.samples}",
        f"{policy}.rollout.max_num_seqs={options.prompts * options.samples}",
        f"{policy}.actor.ppo_mini_batch_size={options.prompts // options.updates}",
        f"{policy}.actor.use_dynamic_bsz=True",
        f"{policy}.actor.ppo_max_token_len_per_gpu={tokens}",
        f"{policy}.actor.use_kl_loss={options.kl > 0}",
        f"trainer.n_gpus_per_node={gpus}",
        f"trainer.total_training_steps={options.steps}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
    ]


def add_work(parser: ArgumentParser) -> None:
    """Add the options that say how much work a step is."""
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2-0.5b")
    for name, default, meaning in (
        ("--prompts", 8, "of a step"),
        ("--samples", 8, "responses to a prompt"),
        ("--prompt", 4096, "tokens of a prompt"),
        ("--response", 512, "tokens of a response"),
        ("--updates", 1, "optimizer steps of a step"),
        ("--micro-batch", 8, "responses of a forward"),
        ("--steps", 4, "of each run, at least 2"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{meaning} (default %(default)s)")
    parser.set_defaults(lr=1e-6, kl=0.001)


def medians(metrics: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each phase and of `OTHERS` over all steps but the first, which compiles and plans.

    Of a run with `max_staleness` only the steps count whose queue is full and that train on its oldest samples.
    """
    steps = [metrics[step] for step in sorted(metrics) if f"{PHASE}step" in metrics[step]][1:]
    for name in ("partial/queued_prompts", "staleness/max"):
        most = max((step.get(name, 0.0) for step in steps), default=0.0)
        steps = [step for step in steps if step.get(name, 0.0) == most]
    names = {name for step in steps for name in step if name.startswith(PHASE) or name in OTHERS}
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in sorted(names)}
