"""Activation offloading in TRL's trainers, here SFTTrainer: three lines, marked with (*).

    pip install trl
    python examples/offload_trl.py

Trains the same small model with and without it: the weights are equal bit for bit. TRL's own `activation_offloading` stays
off. TRL switches transformers' gradient checkpointing on unless told otherwise; rlx recomputes the layers itself, so that
it would switch it off again and say so.
"""

import tempfile

import torch
from datasets import Dataset
from transformers import PreTrainedModel
from trl import SFTConfig, SFTTrainer

from rlx.config.schema import TinyModelConfig
from rlx.models.tiny import make_tiny
from rlx.offload import OffloadOptions, enable_activation_offloading  # (*)


def conversation(n: int) -> list[dict[str, str]]:
    question = f"Ann has {n} apples and buys as many again. How many has she?"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": f"She has {2 * n}."}]


def train(offload: bool) -> PreTrainedModel:
    model, tokenizer = make_tiny(TinyModelConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4))
    dataset = Dataset.from_list([{"messages": conversation(n)} for n in range(64)])
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder,
            max_steps=5,
            per_device_train_batch_size=8,
            gradient_checkpointing=False,
            bf16=True,
            use_cpu=True,  # leave it out where there is a GPU
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = SFTTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer)
        if offload:  # a small min_bytes, because this model is small; usually the default is right
            options = OffloadOptions(min_bytes=1024)
            handle = enable_activation_offloading(trainer.model, enable_ckpt=True, options=options)  # (*)
        trainer.train()
    if offload:
        print(handle.stats())  # (*)
    return model


if __name__ == "__main__":
    plain, offloaded = (train(offload).state_dict() for offload in (False, True))
    print("weights equal to those without offloading:", all(torch.equal(plain[key], offloaded[key]) for key in plain))
