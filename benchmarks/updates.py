"""Compare forms of AdamW at RL's learning rates: what is learned, and how far the weights move.

python -m benchmarks.updates --lr 3e-6 --steps 120 --seeds 2

Each form trains the same model on the same batches by imitation of generated arithmetic, in an `Engine` whose forward and backward
are in bf16. `fp32` keeps fp32 weights, `masters` bf16 weights with fp32 masters in host memory, `stochastic` and `8 bit` are
torchao's AdamW with stochastic rounding, the latter with moments in 8 bits (`--forms "fp32,8 bit"`), and `bf16` rounds to nearest. A row has the mean
log-prob of held-out solutions' tokens before and after, `length`, the distance between first and last weights relative to that
of `fp32`, and `share`, the mean share of weights that a step changed. Seeds choose the weights and the order of problems.
"""

import math
import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from benchmarks.common import benchmark_parser, chosen_device, join_alone, title, write_json
from benchmarks.offload.device import clock
from rlx.config import schema
from rlx.config.schema import ArithmeticConfig, FSDPConfig, ModelConfig, OptimConfig, TinyModelConfig
from rlx.data.arithmetic import make_problems
from rlx.data.batch import Batch, left_padded
from rlx.engine.engine import Engine
from rlx.engine.forward import Distribution
from rlx.engine.micro_batch import MicroBatchRule
from rlx.engine.objectives import Objective, Share, Totals
from rlx.models.tiny import make_tiny

BF16 = FSDPConfig(model_dtype="bf16")
STRATEGIES = {"8 bit": "fsdp"}  # torchao's 8-bit tensors cannot be in FSDP2's DTensors
UPDATE_FORMS: dict[str, tuple[FSDPConfig, dict[str, Any]]] = {
    "fp32": (FSDPConfig(mixed_precision=schema.MixedPrecisionConfig(param_dtype="bf16")), {}),
    "masters": (replace(BF16, optimizer_state="host"), {}),
    "stochastic": (BF16, {"optimizer": "_AdamW"}),
    "8 bit": (BF16, {"optimizer": "AdamW8bit"}),
    "bf16": (BF16, {"master_weights": False}),
}
MODELS = {  # weights -> the model of experiment=arithmetic_1gpu, and one that a CPU trains in seconds
    "38m": TinyModelConfig(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=4
    ),
    "small": TinyModelConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2),
}
ROWS, HELD_OUT = 64, 256


class Imitation(Objective):
    """The objective whose loss is the mean negative log-prob of the response tokens."""

    distribution = Distribution(1.0, False)

    def share(self, outputs: dict[str, Tensor], batch: Batch, totals: Totals) -> Share:
        """As `Objective.share`."""
        return Share(-(outputs["log_probs"] * batch["response_mask"]).sum() / totals.denominator, {})


def batch_of(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> Batch:
    """Return problems with their worked solutions as responses."""
    prompts = [tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True, return_dict=False) for r in rows]
    solutions = [tokenizer(r["extra_info"]["answer"], add_special_tokens=False).input_ids for r in rows]
    right = [torch.tensor([*ids, tokenizer.eos_token_id]) for ids in solutions]
    prompt_ids, prompt_mask = left_padded(prompts)
    response_mask = pad_sequence([torch.ones_like(ids, dtype=torch.bool) for ids in right], batch_first=True)
    return Batch.of(
        {
            "input_ids": torch.cat([prompt_ids, pad_sequence(right, batch_first=True)], 1),
            "attention_mask": torch.cat([prompt_mask, response_mask], 1),
            "response_mask": response_mask,
        }
    )


def batches(tokenizer: PreTrainedTokenizerBase, seed: int, rows: int) -> Iterator[Batch]:
    """Yield endless batches of training problems."""
    problems, rng = make_problems(ArithmeticConfig(train_size=4096), "train"), random.Random(seed)
    while True:
        yield batch_of(rng.sample(problems, rows), tokenizer)


def train(
    form: str,
    model: TinyModelConfig,
    lr: float,
    steps: int,
    device: torch.device,
    rows: int = ROWS,
    held_out_rows: int = HELD_OUT,
) -> dict[str, Any]:
    """Return held-out log-probs `before` and `after`, the `way` from first to last weights, and the mean `share` of a step."""
    fsdp, changes = UPDATE_FORMS[form]
    with tempfile.TemporaryDirectory(prefix="rlx-updates-") as folder:
        made, tokenizer = make_tiny(model)
        made.bfloat16().float().save_pretrained(folder)  # all forms start from the same numbers
        tokenizer.save_pretrained(folder)
        optim = OptimConfig(lr=lr, weight_decay=0.0, allow_lossy_updates=True, **changes)
        strategy = STRATEGIES.get(form, "fsdp2")
        engine = Engine(ModelConfig(path=folder), fsdp, strategy=strategy, device=device, optim=optim, name=form)
    held_out = batch_of(make_problems(ArithmeticConfig(val_size=held_out_rows), "val"), tokenizer)
    rule, data = MicroBatchRule(rows=held_out_rows), batches(tokenizer, model.seed, rows)

    def likelihood() -> float:
        found = engine.log_probs(held_out, rule, 1.0, with_entropy=False)["log_probs"]
        return float(found[held_out["response_mask"]].double().mean())

    first, before = {name: w.to("cpu", torch.float64) for name, w in engine.weights()}, likelihood()
    torch.manual_seed(model.seed)  # of stochastic rounding
    metrics = [engine.update(next(data), rule, Imitation()) for _ in range(steps)]
    moved = (w.to("cpu", torch.float64) - first[name] for name, w in engine.weights())
    way = math.sqrt(sum(float(distance.square().sum()) for distance in moved))
    return {"before": before, "after": likelihood(), "way": way, "share": mean(m["update_share"] for m in metrics)}


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = benchmark_parser("updates", __doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="38m")
    usual = ",".join(form for form in UPDATE_FORMS if form != "8 bit")
    parser.add_argument("--forms", default=usual, type=lambda text: text.split(","), help="to compare")
    parser.add_argument("--lr", type=float, default=3e-6)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args(arguments)
    if unknown := set(given.forms) - set(UPDATE_FORMS):
        parser.error(f"--forms: got {', '.join(sorted(unknown))}, expected some of {', '.join(UPDATE_FORMS)}")
    device, figures = chosen_device(given.device), {}
    join_alone(device)
    print(f"{title(device)}: {given.model}, lr {given.lr:g}, {given.steps} steps of {ROWS} problems")
    print(f"{'form':>12}{'seed':>6}{'before':>10}{'after':>10}{'length':>10}{'share':>9}{'seconds':>9}")
    for seed in range(given.seeds):
        reference = None
        for form in given.forms:
            began = clock(device)
            found = train(form, replace(MODELS[given.model], seed=seed), given.lr, given.steps, device)
            seconds = clock(device) - began
            reference = reference or found["way"]
            found["length"] = found["way"] / reference
            figures[f"{form} {seed}"] = found
            log_probs = f"{found['before']:10.4f}{found['after']:10.4f}"
            moved = f"{found['length']:10.3f}{found['share']:9.3f}"
            print(f"{form:>12}{seed:>6}{log_probs}{moved}{seconds:9.1f}", flush=True)
    write_json(given, device, figures)


if __name__ == "__main__":
    main()
