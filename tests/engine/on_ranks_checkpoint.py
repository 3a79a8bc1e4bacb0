"""Saving and loading."""

import logging

import torch
import torch.distributed as dist
from rank_tools import ROWS, build, make_batch, own_share, policy, value, weights_of

from rlx.models.loading import load_tokenizer

ALL = ("model", "optimizer", "extra")


def share():
    return own_share(make_batch(), (8,) if dist.get_world_size() == 1 else (5, 3))


def stopped(folder, strategy, out, lora=0, contents=ALL, updates=2, head="lm"):
    """Some updates, a checkpoint (saved twice, so that one replaces another), two more updates: metrics and weights."""
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    engine = build(folder, strategy=strategy, head=head, model={"lora_rank": lora}, tokenizer=tokenizer)
    objective = {"lm": policy, "value": value}[head]()
    engine.save(out, contents)
    for _ in range(updates):
        engine.update(share(), ROWS, objective)
    engine.save(out, contents)
    saved = weights_of(engine)
    metrics = [engine.update(share(), ROWS, objective) for _ in range(2)]
    return metrics, saved, weights_of(engine)


def never_saved(folder):
    """The first two updates of an engine that writes nothing."""
    engine = build(folder)
    return [engine.update(share(), ROWS, policy()) for _ in range(2)], weights_of(engine)


def resumed(folder, strategy, out, lora=0, used=False):
    """The same two updates by a new engine that loads the checkpoint; `used`: it has done other things before."""
    engine = build(folder, strategy=strategy, model={"lora_rank": lora})
    if used:
        for _ in range(3):
            engine.update(share(), ROWS, policy())
        engine.log_probs(share(), ROWS, 1.0)
    engine.load(out)
    log_probs = engine.log_probs(share(), ROWS, 1.0)["log_probs"]
    loaded = weights_of(engine)
    metrics = [engine.update(share(), ROWS, policy()) for _ in range(2)]
    return metrics, loaded, weights_of(engine), log_probs


def exported(folder, strategy, out, lora=0, head="lm"):
    """A checkpoint with a Hugging Face folder after an update, and what the engine says of a sequence."""
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    engine = build(folder, strategy=strategy, head=head, model={"lora_rank": lora}, tokenizer=tokenizer)
    engine.update(share(), ROWS, {"lm": policy, "value": value}[head]())
    engine.save(out, ("model", "hf_model"))
    engine.root.eval()
    with torch.no_grad():
        return engine.root(input_ids=torch.arange(3, 20)[None]).logits


def warnings_of_loading(folder, out):
    """What is logged when a checkpoint is loaded."""
    told = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("rlx").addHandler(handler)
    build(folder).load(out)
    logging.getLogger("rlx").removeHandler(handler)
    return told


def refusal(folder, out, head="lm"):
    """The message with which a checkpoint is refused."""
    engine = build(folder, head=head)
    try:
        engine.load(out)
    except ValueError as error:
        return str(error)
