"""Activation offloading in transformers' Trainer: one line after the constructor, marked with (*).

    python examples/offload_hf_trainer.py

Trains the same small model with and without it: the weights are equal bit for bit. `gradient_checkpointing` stays off in
TrainingArguments, because rlx recomputes the layers itself. If it is on, rlx switches it off and logs that. With
`bf16=True` the layers are recomputed under the autocast that their forward ran under.
"""

import tempfile

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

from rlx.offload import OffloadOptions, enable_activation_offloading

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def train(offload: bool) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=256, num_hidden_layers=4, **SIZES))
    texts = [torch.randint(256, (128,)) for _ in range(64)]
    dataset = [{"input_ids": text, "labels": text} for text in texts]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=5,
            per_device_train_batch_size=8,
            bf16=True,
            use_cpu=True,  # leave it out where there is a GPU
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=dataset)
        if offload:  # a small min_bytes, because this model is small; usually the default is right
            options = OffloadOptions(min_bytes=1024)
            handle = enable_activation_offloading(trainer.model, enable_ckpt=True, options=options)  # (*)
        trainer.train()
    if offload:
        print(handle.stats())
    return model


if __name__ == "__main__":
    plain, offloaded = (train(offload).state_dict() for offload in (False, True))
    print("weights equal to those without offloading:", all(torch.equal(plain[key], offloaded[key]) for key in plain))
