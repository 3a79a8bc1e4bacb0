"""Engines of a mixture of experts, and the same by transformers and by formulas."""

from pathlib import Path

import torch
from rank_tools import Gradients, P, build, grouped, make_batch, own_share, policy
from torch.nn import functional as F
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter, load_balancing_loss_func

from rlx.config.schema import ActivationOffloadConfig, FSDPConfig, ModelConfig, RolloutConfig
from rlx.config.schema.training import RouterReplayConfig
from rlx.data.batch import Batch
from rlx.engine.experts import ExpertOptions
from rlx.engine.micro_batches import MicroBatchRule
from rlx.models.loading import load_model
from rlx.rollout.protocol import Sampling
from rlx.rollout.sampler import build_rollout, generate_batch

LAYERS, EXPERTS, CHOSEN = 3, 8, 2
WEIGHT = 0.7


def with_experts(batch, seed=1):
    """The batch with random experts, the same for the same tokens of equal prompts."""
    g = torch.Generator().manual_seed(seed)
    rows, width = batch["input_ids"].shape
    order = torch.rand(rows, width, LAYERS, EXPERTS, generator=g).argsort(dim=-1)[..., :CHOSEN]
    order[:, :P] = order[[0, 0, 0, 3, 3, 5, 6, 6][:rows], :P]
    order[:, :, 0] = 0
    return batch.with_(routed_experts=order.masked_fill(~batch["attention_mask"][..., None, None], 0).to(torch.uint8))


def engine_of(folder, strategy="fsdp2", replays=False, balance=0.0, offload=None, model=None):
    model = dict(model or {})
    if offload:
        options = ActivationOffloadConfig(save=offload, min_bytes=0)
        model |= {"enable_activation_offload": True, "activation_offload": options}
    return build(folder, strategy=strategy, lr=0.0, model=model, experts=ExpertOptions(replays, balance))


def objective(replays, mode="token-mean"):
    return policy(mode, router_replay=RouterReplayConfig("R3" if replays else "disabled"))


def gradients(folder, strategy, cases, replays=False, balance=0.0, offload=None, model=None):
    """Gradients and metrics of an update for each case (shares, cut)."""
    engine = engine_of(folder, strategy, replays, balance, offload, model)
    seen, batch = Gradients(engine), with_experts(grouped(make_batch()))
    found, metrics = [], []
    for shares, cut in cases:
        steps = len(seen.seen)
        metrics.append(engine.update(own_share(batch, shares), cut, objective(replays)))
        found.append(seen.seen[steps])  # an update steps in parts
    return torch.stack(found), metrics


def balance_by_transformers(folder):
    """The load-balancing loss of all rows, each alone and without padding, and its gradient."""
    model, batch = load_model(ModelConfig(path=folder), "lm", torch.float64), grouped(make_batch())
    logits = []
    for ids, real in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        if real.sum() > 1:
            output = model(input_ids=ids[real][None, :-1], output_router_logits=True, use_cache=False)
            logits.append(output.router_logits)
    loss = load_balancing_loss_func(tuple(torch.cat(layer) for layer in zip(*logits, strict=True)), EXPERTS, CHOSEN)
    loss.backward()
    every = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return loss.item(), torch.cat([every[name].flatten() for name in sorted(every)])


def figures(folder, replays, padded=False, rows=3):
    """What `log_probs` returns for rows with given experts."""
    engine = engine_of(folder, replays=replays, model={"use_remove_padding": not padded})
    return engine.log_probs(with_experts(grouped(make_batch())), MicroBatchRule(rows=rows), 0.7)


@torch.no_grad()
def figures_by_hand(folder, replays):
    """Log-probs, and shares of layers in which routers choose other experts than the given ones, row by row."""
    model, batch = load_model(ModelConfig(path=folder), "lm", torch.float64), with_experts(grouped(make_batch()))
    width = batch.response_length
    log_probs, differing = torch.zeros(2, *batch["response_mask"].shape, dtype=torch.float64)
    original = Qwen3MoeTopKRouter.forward
    for row, real in enumerate(batch["attention_mask"]):
        given, calls = batch["routed_experts"][row][real][:-1].long(), []

        def forward(self, hidden, given=given, calls=calls):
            logits = F.linear(hidden, self.weight)
            layer = 1 + len(calls)
            own = logits.topk(CHOSEN).indices
            calls.append(
                torch.tensor([set(a.tolist()) != set(b.tolist()) for a, b in zip(own, given[:, layer], strict=True)])
            )
            used = given[:, layer] if replays else own
            # Normalised over the chosen ones, softmax needs the chosen logits alone.
            return logits, logits.gather(1, used).float().softmax(-1).to(hidden.dtype), used

        length = int(real[-width:].sum())
        if length == 0:
            continue
        Qwen3MoeTopKRouter.forward = forward
        try:
            logits = model(input_ids=batch["input_ids"][row][real][None, :-1], use_cache=False).logits[0, -length:]
        finally:
            Qwen3MoeTopKRouter.forward = original
        chosen = batch.responses()[row, :length, None]
        log_probs[row, :length] = (logits / 0.7).log_softmax(-1).gather(-1, chosen)[:, 0]
        differing[row, :length] = torch.stack(calls).double().mean(dim=0)[-length:]
    return log_probs, differing


def mismatch(folder, sampler_dtype):
    """The mean difference of log-probs, and shares of differing experts, of a sampler of another dtype, without and with replay."""
    made = [build(folder, FSDPConfig(), experts=ExpertOptions(replays)) for replays in (False, True)]
    settings = RolloutConfig(name="hf", dtype=sampler_dtype, enable_rollout_routing_replay=True, max_num_seqs=24)
    sampler = build_rollout(settings, ModelConfig(path=folder), torch.device("cpu"), 24)
    sampler.update_weights(made[0].weights.full(), 1)
    g = torch.Generator().manual_seed(0)
    mask = torch.arange(6) >= torch.randint(0, 6, (16, 1), generator=g).repeat_interleave(2, 0)
    ids = torch.randint(3, 250, (16, 6), generator=g).repeat_interleave(2, 0).masked_fill(~mask, 0)
    prompts = Batch.of({"prompt_ids": ids, "prompt_mask": mask, "seed": torch.arange(32)})
    stops = tuple(range(3, 40))
    batch = generate_batch(sampler, prompts, Sampling(12, stop_token_ids=stops, with_experts=True), 0, 12)
    found = []
    for engine in made:
        figures = engine.log_probs(batch, MicroBatchRule(rows=8), 1.0)
        real = batch["response_mask"]
        off = (figures["log_probs"] - batch["rollout_log_probs"]).abs()[real].mean().item()
        shares = [figures[name][real].mean().item() for name in ("differing_experts", "differing_experts_used")]
        found.append((off, *shares))
    return found


def in_ways(folder, device, adapters, saves):
    """How far gradients are from those of grouped products without recomputation: of eager experts, and in ways to save memory."""

    def gradient(**model):
        options = {"device": device, "lr": 0.0, "experts": ExpertOptions(True, 0.5)}
        engine = build(folder, FSDPConfig(), model=adapters | model, **options)
        seen, batch = Gradients(engine), with_experts(grouped(make_batch()))
        engine.update(batch, MicroBatchRule(rows=4), objective(replays=True))
        return engine.root.get_experts_implementation()[""], seen.seen[0]

    kept = {"enable_gradient_checkpointing": False}
    default, want = gradient(**kept)
    other, eager = gradient(experts_implementation="eager", **kept)
    assert (default, other) == ("grouped_mm", "eager") and want.norm() > 0
    ways = {"recomputed": {}}
    for save in saves:
        options = {"enable_activation_offload": True, "activation_offload": ActivationOffloadConfig(save, min_bytes=0)}
        ways[save] = options | (kept if save == "all" else {})
    found = {name: (gradient(**model)[1] - want).abs().max().item() for name, model in ways.items()}
    return ((eager - want).norm() / want.norm()).item(), found


def adapted(folder, scratch, adapters):
    """Log-probs and merged weights of engines with adapters, before and after an update.

    Returns:
        With resident and with streamed weights: log-probs before and after, and all weights in a row. Log-probs of the merged
        model; those and the weights of an engine from the checkpoint; log-probs of the start from exported adapters.
    """
    from rlx.export import export

    fsdp, rows, batch, results = FSDPConfig(model_dtype="fp32"), MicroBatchRule(rows=4), make_batch(), []
    for streams in (False, True):
        options = {"layer_offload": streams, "enable_activation_offload": streams}
        engine = build(folder, fsdp, lr=0.1, model=adapters | options)
        before = engine.log_probs(batch, rows, 1.0)["log_probs"]
        engine.update(batch, rows, objective(replays=False))
        engine.update(batch, rows, objective(replays=False))
        after, weights = engine.log_probs(batch, rows, 1.0)["log_probs"], dict(engine.weights.full())
        results.append((before, after, torch.cat([tensor.flatten() for tensor in weights.values()])))
    engine.weights.save(f"{scratch}/saved", ("model", "extra", "hf_model"))
    merged = build(f"{scratch}/saved/hf_model", fsdp, optim=None).log_probs(batch, rows, 1.0)["log_probs"]
    engine = build(folder, fsdp, model=adapters)
    engine.weights.load(f"{scratch}/saved")
    weights = torch.cat([tensor.flatten() for tensor in dict(engine.weights.full()).values()])
    loaded = engine.log_probs(batch, rows, 1.0)["log_probs"], weights
    export(Path(scratch) / "saved", Path(scratch) / "adapters", only_adapters=True)
    started = build(folder, fsdp, model=adapters | {"lora_adapter_path": f"{scratch}/adapters"})
    return results, merged, loaded, started.log_probs(batch, rows, 1.0)["log_probs"]
