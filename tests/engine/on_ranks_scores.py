"""Scores of whole sequences by an engine of a reward model."""

from rank_tools import build, make_batch, own_share

from rlx.engine.micro_batches import MicroBatchRule


def scores(folder, strategy, shares):
    """This rank's scores, cut by rows and by tokens, with the parameters offloaded in between."""
    engine = build(folder, strategy=strategy, head="score", optim=None, model={"enable_gradient_checkpointing": False})
    share = own_share(make_batch(), shares)
    found = [engine.scores(share, MicroBatchRule(rows=3))]
    engine.memory.to_host()
    return [*found, engine.scores(share, MicroBatchRule(tokens=20))]
