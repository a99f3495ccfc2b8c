"""Run by the demo as a script in a fresh process: uses the exported folder as somebody would who has never heard of us.

Arguments: the exported folder; a safetensors file with ``ids`` and ``prompt``; the file to write ``logits`` and
``continuation`` to.
"""

import sys

# importing any of these now fails, so what runs is the code inside the export
sys.modules.update(dict.fromkeys(("cli", "distill", "patches", "retrofit")))

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

NEW_TOKENS = 12


def main(folder: str, request: str, answer: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = load_file(request)
    with torch.no_grad():
        logits = model(given["ids"]).logits
    text = tokenizer.decode(given["prompt"])
    prompt = tokenizer(text, return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    save_file({"logits": logits.contiguous(), "continuation": tokens[0, prompt["input_ids"].shape[1] :].clone()}, answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
