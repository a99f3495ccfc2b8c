"""Run by the demo as a script in a fresh process: uses the exported folder as somebody would who never heard of us.

Arguments: the exported folder; a safetensors file with ``ids`` (B, T) and ``prompt`` (P,); the file to write ``logits``
(B, T, V) and ``continuation`` (NEW_TOKENS,) to. Imports nothing of this package.
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

NEW_TOKENS = 8


def main(folder: str, request: str, answer: str) -> None:
    # importing these now fails, so what runs is the code inside the folder
    sys.modules.update(dict.fromkeys(("cli", "distill", "patches", "retrofit")))  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = load_file(request)
    prompt = tokenizer(tokenizer.decode(given["prompt"]), return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    with torch.no_grad():
        logits = model(given["ids"]).logits
    continuation = tokens[0, prompt["input_ids"].shape[1] :]
    save_file({"logits": logits.contiguous(), "continuation": continuation.contiguous()}, answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
