"""Run by the demo as a script in a fresh process: uses the exported folder as somebody would who never heard of us.

Arguments: the exported folder; a JSON file with ``ids`` (rows of one length) and ``prompts`` (texts); the safetensors
file to write ``logits`` (B, T, V) and ``completions`` (prompts, NEW_TOKENS) to. Imports nothing of this package.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

NEW_TOKENS = 8


def complete(model: Any, tokenizer: Any, prompts: list[str]) -> Tensor:
    """Continue all prompts in one left-padded batch, greedily: (prompts, NEW_TOKENS) token ids."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    tokens = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    return tokens[:, -NEW_TOKENS:].contiguous()


def main(folder: str, request: str, answer: str) -> None:
    # importing these now fails, so what runs is the code inside the folder
    sys.modules.update(dict.fromkeys(("cli", "distill", "patches", "retrofit")))  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = json.loads(Path(request).read_text(encoding="utf-8"))
    with torch.no_grad():
        logits = model(torch.tensor(asked["ids"])).logits
    completions = complete(model, tokenizer, asked["prompts"])
    save_file({"logits": logits.contiguous(), "completions": completions}, answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
