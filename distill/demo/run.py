"""``retrofit demo``: the main job from end to end, on a model and a text made on the spot.

Train a teacher that recalls, patch it, distil its memory, compare it with what it has to beat, save adapter and export,
load the export in a process that does not have this package, and let it complete a prompt.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, PrinterCallback
from transformers.utils import logging as transformers_logging

import retrofit
from distill.callbacks import ShowProgress
from distill.config import DistillConfig
from distill.data.rows import pack_tokens
from distill.demo.recall import find_question, reload
from distill.demo.teacher import COPIED, LENGTH, RECALLED, train_teacher
from distill.demo.text import WORDS, documents, generator, recall_distance, tokenizer
from distill.model import calibrate_on
from distill.preflight import find_trainable
from distill.progress import Bar, progress_bar
from distill.trainer import DistillTrainer
from patches.errors import RetrofitError
from patches.kinds import find_kind
from retrofit.costs.held import row_bytes
from retrofit.evaluation.baselines import equal_memory_window, window_only
from retrofit.evaluation.scores import evaluate
from retrofit.export import export_model
from retrofit.files import check_replaced, write_folder
from retrofit.loading import check_tokenizer
from retrofit.table import print_table, write_rows

WINDOW, SINKS = 32, 4
STEPS, BATCH = 400, 8
HELD_OUT = 64  # documents
STAGES = {
    "copy": f"teacher 1/3, until {COPIED:.0%}",
    "short": f"teacher 2/3, until {RECALLED:.0%}",
    "full": "teacher 3/3",
}
COLUMNS = {
    "name": ("", ""),
    "far_recall": ("far\nrecall", ".3f"),
    "kl": ("KL to\nteacher", ".4f"),
    "kl_gap_closed": ("KL gap\nclosed", ".1%"),
    "nll": ("NLL", ".3f"),
    "kept_bytes": ("bytes beside\nthe window", ",d"),
    "seconds": ("seconds", ".0f"),
}


@dataclass(frozen=True)
class Setting:
    """How a kind of memory takes part: at AHN's state, which is 16 rows here, unless it cannot."""

    window: int = WINDOW
    lr: float = 3e-2
    options: dict[str, Any] = field(default_factory=dict)


SETTINGS = {
    # raw keys, as the paper has them; they diverge at the others' learning rate
    "tensor-cache": Setting(lr=2e-2, options={"normalize_keys": False}),
    "tova": Setting(window=WINDOW + 16),  # its rows are all of one sort
    "h2o": Setting(options={"heavy": 16}),
    "expected": Setting(options={"bits": 4, "rows": 93, "shares": "need"}),
}


def run_demo(
    *,
    memory: str = "ahn-gdn",
    seed: int = 0,
    output: str | Path,
    json_file: str | Path | None = None,
    overwrite: bool = False,
) -> list[dict[str, Any]]:
    """Run the demo and return the rows of its table.

    Writes ``output``/base (the teacher), ``output``/adapter and ``output``/model, all at once at the end.

    Args:
        memory: kind of memory to distil.
        seed: of the teacher, the texts, the memory's start and the order of its lessons.
        output: folder to write.
        json_file: also write the rows there.
        overwrite: replace what ``output`` holds.

    Returns:
        One mapping per row: ``name``; ``far_recall``, the share of the answers last mentioned more than S + W tokens
        ago that are the likeliest token; ``kl`` to the teacher and ``nll`` of the next token (nats, held-out positions
        from S + W on); ``kl_gap_closed``; ``kept_bytes`` that one sequence of 256 tokens holds in a layer besides
        S + W keys and values; ``seconds`` of training.

    Raises:
        RetrofitError: a memory that does not exist or has nothing to distil, an output that is taken, a teacher that
            did not learn, an export that does not compute what the model in memory computes.
    """
    find_trainable(memory)
    check_replaced(output, overwrite)
    output, began, console = Path(output), time.perf_counter(), Console()
    with quiet_on_one_thread():
        teacher, teacher_seconds = teach(seed)
        teacher.name_or_path = str(output / "base")
        model, distil_seconds = fit(teacher, memory, seed)
        held_out = documents(HELD_OUT, LENGTH, generator(seed, "held-out"))
        rows = compare({memory: model}, held_out, {"teacher": teacher_seconds, memory: distil_seconds})

        words = tokenizer()
        check_tokenizer(words, teacher.config)
        with write_folder(output, overwrite) as draft:
            teacher.save_pretrained(draft / "base")
            words.save_pretrained(draft / "base")
            retrofit.save_adapter(model, draft / "adapter")
            export_model(model, draft / "model", words)
        if json_file is not None:
            write_rows(json_file, rows)
        title = f"{HELD_OUT} held-out documents of {LENGTH} tokens, window {WINDOW}, {SINKS} sinks, seed {seed}"
        print_table(title, rows, COLUMNS, console)
        console.print(
            f"[dim]Far recall is that of surnames last seen more than {WINDOW + SINKS} tokens ago. "
            "Bytes are those that a layer keeps of a document besides sinks and window."
        )

        asked, ago = find_question(held_out, 2 * (WINDOW + SINKS))
        prompt, answer = " ".join(asked), asked[len(asked) - ago]
        logits, completion = reload(output / "model", held_out[:BATCH], prompt)
        with torch.no_grad():
            if not torch.equal(logits, model(held_out[:BATCH]).logits):
                raise RetrofitError(f"{output / 'model'} does not compute what the distilled model computes")
        console.print("\nIn a fresh process without this package, the export completes a held-out prompt:\n")
        console.print(f"[dim]{prompt}[/dim] → [bold green]{' '.join(WORDS[token] for token in completion)}")
        console.print(f"\nThe last name was followed by '{answer}' {ago} tokens before.")
    console.print(f"\nAdapter, base and model are in {output} ({time.perf_counter() - began:.0f} s in all).")
    return rows


@contextmanager
def quiet_on_one_thread() -> Iterator[None]:
    """One thread: at this size a second one gains little on an idle machine, loses much on a busy one, and with one the
    sums (and so the figures) do not depend on the number of cores."""
    threads, bars = torch.get_num_threads(), transformers_logging.is_progress_bar_enabled()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if bars:
            transformers_logging.enable_progress_bar()


def teach(seed: int) -> tuple[PreTrainedModel, float]:
    """A trained teacher, and how many seconds that took."""
    began, stage = time.perf_counter(), ""
    bar: Bar | None = None
    with ExitStack() as bars:

        def on_step(now: str, step: int, most: int, loss: float, accuracy: float) -> None:
            nonlocal stage, bar
            if bar is None or now != stage:
                bars.close()
                stage, bar = now, bars.enter_context(progress_bar(STAGES[now], most))
            bar.update(step, f"loss {loss:.2f}, recall {accuracy:.0%}")

        teacher = train_teacher(seed, on_step)
    return teacher, time.perf_counter() - began


def fit(teacher: PreTrainedModel, memory: str, seed: int) -> tuple[Any, float]:
    """``teacher`` with a memory, distilled if there is anything to distil, and how many seconds that took."""
    setting = SETTINGS.get(memory, Setting())
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        model = retrofit.patch(teacher, memory=memory, window=setting.window, sinks=SINKS, **setting.options)
        lessons = documents(STEPS * BATCH, LENGTH, generator(seed, "distil"))
        calibrate_on(model, pack_tokens(lessons.flatten(), LENGTH))
        if not find_kind(memory).trainable:
            return model.eval(), 0.0
        arguments = DistillConfig(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=setting.lr,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.05},
            seed=seed,
            logging_steps=5,
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            report_to="none",
        )
        trainer = DistillTrainer(model, arguments, pack_tokens(lessons.flatten(), LENGTH))
        trainer.remove_callback(PrinterCallback)
        began = time.perf_counter()
        with progress_bar(f"distilling {memory}", STEPS) as bar:
            trainer.add_callback(ShowProgress(bar, LENGTH * BATCH))
            trainer.train()
        return model.eval(), time.perf_counter() - began


def compare(memories: dict[str, Any], held_out: Tensor, seconds: dict[str, float]) -> list[dict[str, Any]]:
    """The table's rows, all on the same positions: those where window-only can differ from the teacher.

    The window of equal memory is that of the first of ``memories``.
    """
    first, start = next(iter(memories.values())), WINDOW + SINKS
    wide = equal_memory_window(first)
    models = {
        "window-only": window_only(first),
        "window-only, equal memory": window_only(first, wide),
        **memories,
    }
    kept = {name: retrofit.kept_bytes(model, WINDOW) for name, model in models.items()}
    kept["teacher"] = (LENGTH - start) * row_bytes(first.config, first.dtype)
    scores = evaluate(models, held_out, start=start)
    far = recall_distance(held_out)[:, start + 1 :] > start
    return [
        {
            "name": name,
            "far_recall": score.correct[far].double().mean().item(),
            **score.figures(scores["window-only"]),
            "kept_bytes": kept[name],
            "seconds": seconds.get(name, 0.0),
        }
        for name, score in scores.items()
    ]
