r"""A trained model leaves: a checkpoint becomes a Hugging Face folder, and transformers answers with it.

    rlx train trainer.save_freq=20
    python examples/export_and_generate.py RUN/checkpoints/global_step_40/actor exported \
      "Tom has 3 apples. He buys 4 more. How many apples does Tom have?"

RUN is the folder that the run named at its end.
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from rlx.export import export


def answer(folder: Path, question: str) -> str:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**prompt, max_new_tokens=64, do_sample=False)
    return tokenizer.decode(written[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    checkpoint, exported, question = sys.argv[1:]
    export(Path(checkpoint), Path(exported))
    print(answer(Path(exported), question))
