"""The demo's last act: the exported model, loaded as a stranger would load it, completes a prompt."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from distill.demo import reload as reloader
from distill.demo.text import WORDS, recall_distance
from patches.errors import RetrofitError


def find_question(documents: Tensor, least: int) -> tuple[list[str], int]:
    """The first place in documents (N, T) where a surname is due that was last seen over ``least`` tokens ago.

    Returns:
        The words up to there, of which the last one is the name, and how many tokens ago its surname was seen.
    """
    distances = recall_distance(documents)
    document, at = (distances > least).nonzero()[0].tolist()
    return [WORDS[token] for token in documents[document, :at]], int(distances[document, at])


def reload(folder: Path, ids: Tensor, prompt: str) -> tuple[Tensor, Tensor]:
    """Load the exported ``folder`` in a fresh process without this package.

    Args:
        ids: (B, T), to compute logits for.
        prompt: text to continue greedily.

    Returns:
        logits (B, T, V) and the continuation's token ids.

    Raises:
        RetrofitError: that process failed, with its last words.
    """
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch, "answer.safetensors")
        done = subprocess.run(
            # -P: the script's own folder, which is part of this package, stays off the path
            [sys.executable, "-P", reloader.__file__, str(folder), str(answer)],
            env=os.environ
            | {
                "HF_HUB_OFFLINE": "1",
                "HF_MODULES_CACHE": str(Path(scratch, "modules")),
                "OMP_NUM_THREADS": str(torch.get_num_threads()),  # another number adds in another order
            },
            input=json.dumps({"ids": ids.tolist(), "prompt": prompt}),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RetrofitError(f"the exported model in {folder} does not load in a fresh process: {last}")
        result = load_file(answer)
    return result["logits"], result["completion"]
