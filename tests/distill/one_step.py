"""One distillation step of a random model in a process of its own: prints by how many bytes it raised the peak RSS.

python tests/distill/one_step.py ahn-gdn 0 4096       memory, checkpointing, tokens
"""

import sys
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import retrofit
from distill.objective import Objective
from distill.simulate import checkpoint_layers
from retrofit.bench.machine import peak_of_this_process

CONFIG: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
SETTINGS = {"window": 480, "sinks": 32}


def step(model: Any, tokens: int) -> None:
    ids = torch.zeros(1, tokens, dtype=torch.long)
    scored = torch.arange(tokens)[None] >= sum(SETTINGS.values())
    Objective().losses(model, model, {"input_ids": ids, "labels": ids}, scored).sum().backward()


def main(kind: str, checkpointing: bool, tokens: int) -> None:
    torch.set_num_threads(1)
    model = retrofit.patch(Qwen2ForCausalLM(Qwen2Config(**CONFIG)), kind, **SETTINGS).train()
    if checkpointing:
        checkpoint_layers(model)
    step(model, 600)  # what the first step ever loads and allocates
    # not getrusage's peak: that of the process which started this one counts there, too
    print(peak_of_this_process(lambda: lambda: step(model, tokens)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "1", int(sys.argv[3]))
