"""An engine with an NF4 base, beside one whose base are the dequantised weights in full."""

import dataclasses
from pathlib import Path

import torch.distributed as dist
from rank_tools import ROWS, build, make_batch, policy, value, weights_of

from rlx.checkpoint.role import read_weights
from rlx.config.schema import ActivationOffloadConfig, FSDPConfig, MixedPrecisionConfig
from rlx.models.lora import adapters_off

LORA = {"lora_rank": 2, "lora_alpha": 8}
ENGINE = {"enable_activation_offload": True, "activation_offload": ActivationOffloadConfig(min_bytes=0)}
FP32 = FSDPConfig(model_dtype="fp32", mixed_precision=MixedPrecisionConfig(reduce_dtype="fp32"))


def per_token(engine, head):
    if head == "value":
        return {"values": engine.values(make_batch(), ROWS)}
    return engine.log_probs(make_batch(), ROWS, 0.7)


def written(engine, folder):
    """Write the base of an engine as a model folder, on every rank the same one."""
    weights = {name: tensor.cpu() for name, tensor in engine.weights.base()}
    if dist.get_rank() == 0:
        dataclasses.replace(engine.weights.folder_parts, head="lm").write_with_weights(Path(folder), weights)
    dist.barrier()
    return folder


def learned(engine, head):
    """Figures with and without adapters, metrics of two updates, and merged weights."""
    objective = {"lm": policy, "value": value}[head]()
    found = [per_token(engine, head)]
    for _ in range(2):
        found.append(engine.update(make_batch(), ROWS, objective))
    with adapters_off(engine.root):
        found.append(per_token(engine, head))
    return [*found, per_token(engine, head), weights_of(engine)]


def compared(folder, scratch, head, dtype, streams):
    """What engines learn: with NF4, with the dequantised base resident; and the first one from its checkpoint.

    Returns:
        Their results; merged weights of the engine, of its hf_model folder and of the export; bytes of the bases.
    """
    from transformers import AutoModelForCausalLM

    fsdp = dataclasses.replace(FP32, model_dtype=dtype, param_offload=True)
    small = LORA | ENGINE | {"quantization": "nf4", "layer_offload": streams}
    engine = build(folder, fsdp, model=small, head=head)
    full = folder if head == "value" else written(engine, f"{scratch}/full")
    results = [learned(engine, head)]
    plain = build(full, fsdp, model=LORA | ENGINE, head=head) if head == "lm" else None
    if plain is not None:
        results.append(learned(plain, head))
    engine.weights.save(f"{scratch}/saved", ("model", "optimizer", "extra", *(["hf_model"] * (head == "lm"))))
    other = build(folder, fsdp, model=small, head=head)
    other.weights.load(f"{scratch}/saved")
    again = [
        [per_token(each, head), each.update(make_batch(), ROWS, policy() if head == "lm" else value())]
        for each in (engine, other)
    ]
    engine.weights.load(f"{scratch}/saved")
    merged = [weights_of(engine), dict(read_weights(Path(scratch) / "saved"))]
    if head == "lm":
        merged.append(
            AutoModelForCausalLM.from_pretrained(
                f"{scratch}/saved/hf_model", dtype=merged[0]["model.norm.weight"].dtype
            ).state_dict()
        )
    held = [
        sum(p.nbytes for n, p in each.root.named_parameters() if "base_layer.weight" in n)
        for each in (engine, plain or engine)
    ]
    streamed = engine.memory.streaming.streamed_bytes if engine.memory.streaming else 0
    return results, again, merged, held, streamed


def on_two(folder, scratch):
    """What sharded engines learn with NF4 and with the dequantised base."""
    engine = build(folder, FP32, model=LORA | ENGINE | {"quantization": "nf4"})
    full = written(engine, f"{scratch}/full")
    sizes = {
        p.to_local().numel() for n, p in engine.root.named_parameters() if n.endswith("down_proj.base_layer.weight")
    }
    return learned(engine, "lm"), learned(build(full, FP32, model=LORA | ENGINE), "lm"), sizes
