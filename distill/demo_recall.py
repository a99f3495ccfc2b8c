"""The demo's last act: the exported model, loaded as a stranger would load it, completes a prompt."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from safetensors.torch import load_file, save_file
from torch import Tensor

from distill import demo_reload
from distill.demo_reload import NEW_TOKENS
from distill.demo_text import WORDS, recall_distance
from patches.errors import RetrofitError
from retrofit.baselines import window_only

LONG_AGO = 2  # times S + W tokens: how far back the prompt's answer lies at least


def pick_prompt(documents: Tensor, exact: int) -> tuple[Tensor, int]:
    """The earliest prompt that asks for something long gone: chosen by place alone, whatever any model makes of it.

    Args:
        documents: (N, T).
        exact: tokens kept exactly, S + W.

    Returns:
        the first tokens of a document up to a name (P,), and how many tokens ago its surname was last seen.
    """
    distance = recall_distance(documents)
    asked = distance > LONG_AGO * exact
    place = torch.where(asked, torch.arange(documents.shape[1]), documents.shape[1])
    row = int(place.min(1).values.argmin())
    at = int(place[row].min())
    return documents[row, :at], int(distance[row, at])


def reload(folder: Path, ids: Tensor, prompt: Tensor) -> tuple[Tensor, Tensor]:
    """Load the exported ``folder`` in a fresh process without this package.

    Args:
        ids: (B, T), to compute logits for.
        prompt: (P,), to continue greedily.

    Returns:
        logits (B, T, V) and the continuation (NEW_TOKENS,).

    Raises:
        RetrofitError: that process failed, with its last words.
    """
    with tempfile.TemporaryDirectory() as scratch:
        request, answer = Path(scratch, "request.safetensors"), Path(scratch, "answer.safetensors")
        save_file({"ids": ids.clone(), "prompt": prompt.clone()}, request)
        done = subprocess.run(
            # -P: the script's own folder, which is part of this package, stays off the path
            [sys.executable, "-P", demo_reload.__file__, str(folder), str(request), str(answer)],
            env=os.environ
            | {
                "HF_HUB_OFFLINE": "1",
                "HF_MODULES_CACHE": str(Path(scratch, "modules")),
                "OMP_NUM_THREADS": str(torch.get_num_threads()),  # another number adds in another order
            },
            capture_output=True,
            text=True,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RetrofitError(f"the exported model in {folder} does not load in a fresh process: {last}")
        result = load_file(answer)
    return result["logits"], result["continuation"]


def print_recall(console: Console, model: Any, prompt: Tensor, ago: int, continuation: Tensor) -> None:
    """Print a prompt and how the export, the teacher and the window-only model go on.

    Args:
        model: the distilled model in memory.
        prompt: (P,).
        ago: how many tokens ago the next token was last seen.
        continuation: (NEW_TOKENS,) of the export.
    """
    memory = model.config.memory
    words = [WORDS[token] for token in prompt]
    text = Text(" ".join(words[: memory["sinks"]]), style="cyan")
    for at, word in enumerate(words[memory["sinks"] :], start=memory["sinks"]):
        asked = at + 1 == len(words) or len(words) - at in (ago, ago + 1)
        style = "bold reverse" if asked else "cyan" if at >= len(words) - memory["window"] else "dim"
        text.append(" ").append(word, style)
    binding = " ".join(words[len(words) - ago - 1 : len(words) - ago + 1])
    console.print(f"\nA held-out prompt; '{binding}' was last seen {ago} tokens ago. Cyan: sinks and window.")
    console.print(text)
    plain = window_only(model)
    with model.memory_off():
        teacher = _continue(model, prompt)
    goes_on = {
        "teacher": teacher,
        "window-only": _continue(plain, prompt),
        f"{memory['kind']}, loaded from the export": continuation,
    }
    width = max(map(len, goes_on))
    for name, tokens in goes_on.items():
        console.print(f"  {name:>{width}}: [bold]{' '.join(WORDS[token] for token in tokens)}", highlight=False)


def _continue(model: Any, prompt: Tensor) -> Tensor:
    """(P,) -> (NEW_TOKENS,), greedily."""
    tokens = model.generate(prompt[None], max_new_tokens=NEW_TOKENS, do_sample=False)
    return tokens[0, len(prompt) :]
