"""Run by the demo as a script in a fresh process: uses the exported folder as somebody would who never heard of us.

Arguments: the exported folder, and the safetensors file to write ``logits`` (B, T, V) and ``completion`` (tokens) to.
Standard input has JSON with ``ids`` (rows of one length) and ``prompt`` (text). Imports nothing of this package.
"""

import json
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str, answer: str) -> None:
    asked = json.load(sys.stdin)
    # importing these now fails, so what runs is the code inside the folder
    sys.modules.update(dict.fromkeys(("cli", "distill", "patches", "retrofit")))  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.tensor(asked["ids"])).logits
    prompt = tokenizer(asked["prompt"], return_tensors="pt")["input_ids"]
    completion = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
    save_file({"logits": logits.contiguous(), "completion": completion.contiguous()}, answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
