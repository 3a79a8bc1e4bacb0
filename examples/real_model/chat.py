"""Ask a model: python examples/real_model/chat.py my-model "What is 37 + 45? Answer with the number alone." """

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    folder, question = sys.argv[1:]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**prompt, max_new_tokens=64, do_sample=False)
    print(tokenizer.decode(written[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
