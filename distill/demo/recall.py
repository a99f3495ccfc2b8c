"""The demo's last act: the exported model, loaded as a stranger would load it, completes prompts."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from safetensors.torch import load_file
from torch import Tensor

from distill.demo import reload as reloader
from distill.demo.reload import complete
from distill.demo.text import WORDS, recall_distance, tokenizer
from patches.errors import RetrofitError
from retrofit.evaluation.baselines import window_only
from retrofit.table import print_table

LONG_AGO = 2  # times S + W tokens: how far back a question's answer lies at least


@dataclass(frozen=True)
class Question:
    """A held-out document up to a name whose surname is due.

    Attributes:
        words: the prompt; the last one is the name.
        ago: how many tokens before its place the surname was last seen.
    """

    words: list[str]
    ago: int

    @property
    def answer(self) -> str:
        return self.words[len(self.words) - self.ago]


def pick_questions(documents: Tensor, exact: int, count: int) -> list[Question]:
    """The first long-gone question of each document, for the first ``count`` documents (N, T) that have one.

    Chosen by place alone, whatever any model makes of it; ``exact`` is S + W.
    """
    questions: list[Question] = []
    for ids, distance in zip(documents, recall_distance(documents), strict=True):
        places = (distance > LONG_AGO * exact).nonzero()
        if len(places) and len(questions) < count:
            at = int(places[0])
            questions.append(Question([WORDS[token] for token in ids[:at]], int(distance[at])))
    return questions


def reload(folder: Path, ids: Tensor, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """Load the exported ``folder`` in a fresh process without this package.

    Args:
        ids: (B, T), to compute logits for.
        prompts: texts to continue greedily.

    Returns:
        logits (B, T, V) and the continuations' token ids (prompts, NEW_TOKENS).

    Raises:
        RetrofitError: that process failed, with its last words.
    """
    with tempfile.TemporaryDirectory() as scratch:
        request, answer = Path(scratch, "request.json"), Path(scratch, "answer.safetensors")
        request.write_text(json.dumps({"ids": ids.tolist(), "prompts": prompts}), encoding="utf-8")
        done = subprocess.run(
            # -P: the script's own folder, which is part of this package, stays off the path
            [sys.executable, "-P", reloader.__file__, str(folder), str(request), str(answer)],
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
    return result["logits"], result["completions"]


def print_recall(console: Console, model: Any, questions: list[Question], completions: Tensor) -> None:
    """Print the first prompt with the export's continuation, and what each model answers to every question.

    Args:
        model: the distilled model in memory, for the teacher and window-only.
        completions: (questions, NEW_TOKENS) of the export.
    """
    memory = model.config.memory
    prompts = [" ".join(question.words) for question in questions]
    with model.memory_off():
        teacher = complete(model, tokenizer(), prompts)
    answers = {
        "teacher": teacher,
        "window_only": complete(window_only(model), tokenizer(), prompts),
        "export": completions,
    }

    first, text = questions[0], Text()
    for at, word in enumerate(first.words):
        left = len(first.words) - at
        asked = left in (first.ago + 1, first.ago, 1)
        kept = at < memory["sinks"] or left <= memory["window"]
        text.append(word, "bold reverse" if asked else "cyan" if kept else "dim").append(" ")
    text.append("→ " + " ".join(WORDS[token] for token in completions[0]), "bold green")
    console.print("\nIn a fresh process without this package, the export completes a held-out prompt")
    console.print("(cyan: sinks and window; reversed: the question and its last mention):\n")
    console.print(text)

    rows = [
        {"name": question.words[-1], "ago": question.ago, "answer": question.answer}
        | {model: WORDS[tokens[index, 0]] for model, tokens in answers.items()}
        for index, question in enumerate(questions)
    ]
    columns = {
        "name": ("name", ""),
        "ago": ("tokens ago", "d"),
        "answer": ("surname", ""),
        "teacher": ("teacher", ""),
        "window_only": ("window-only", ""),
        "export": (f"{memory['kind']} export", ""),
    }
    print_table(f"\nThe first {len(rows)} such questions, and the answers", rows, columns, console)
