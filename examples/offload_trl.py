"""Activation offloading in TRL's trainers, here SFTTrainer: one line after the constructor, marked with (*).

    pip install trl
    python examples/offload_trl.py

It needs torch, TRL and rlx.offload, and downloads nothing. It trains the same small model with and without offloading: the
weights are equal bit for bit. TRL's own `activation_offloading` stays off. TRL switches transformers' gradient checkpointing
on unless told otherwise; rlx recomputes the layers itself, so it would switch it off again and log that.
"""

import tempfile

import torch
from datasets import Dataset
from transformers import ByT5Tokenizer, Qwen3Config, Qwen3ForCausalLM
from trl import SFTConfig, SFTTrainer

from rlx.offload import OffloadOptions, enable_activation_offloading

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}"


def conversation(n: int) -> list[dict[str, str]]:
    question = f"Ann has {n} apples and buys as many again. How many has she?"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": f"She has {2 * n}."}]


def train(offload: bool) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    tokenizer = ByT5Tokenizer(chat_template=TEMPLATE)  # its tokens are bytes, so it needs no file
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), num_hidden_layers=4, **SIZES))
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
        print(handle.stats())
    return model


if __name__ == "__main__":
    plain, offloaded = (train(offload).state_dict() for offload in (False, True))
    print("weights equal to those without offloading:", all(torch.equal(plain[key], offloaded[key]) for key in plain))
