"""One run from recipe to results: load the base, patch it, fit the memory, score it, write everything to one folder."""

import platform
import shlex
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from transformers import PrinterCallback, TrainerState, set_seed

import retrofit
from distill.arguments import CHECKPOINTING, DistillArguments
from distill.checkpoint import checkpoints, step_of
from distill.data import Split, load_rows, load_tokenizer
from distill.progress import ProgressCallback, RunLog, progress_bar, seconds
from distill.recipe import Recipe
from distill.stopping import EXIT_STATUS, StopOnSignal
from distill.trainer import DistillTrainer
from patches.errors import RetrofitError
from patches.kinds import find_kind
from retrofit.adapter import WEIGHTS, load_memory_weights
from retrofit.baselines import equal_memory_window, row_bytes, window_only
from retrofit.evaluate import evaluate, gap_closed
from retrofit.files import check_output, write_folder, write_json, write_text
from retrofit.loading import load_config
from retrofit.table import print_table

RECIPE_FILE = "recipe.yaml"
# what may differ between a run and its resumption without changing the result
FREE_ON_RESUME = {"output", "eval_steps", "save_steps", "save_total_limit"}
COLUMNS = {
    "name": ("", ""),
    "window": ("window", "d"),
    "kl": ("KL to teacher", ".4f"),
    "kl_gap_closed": ("gap closed", ".1%"),
    "nll": ("NLL", ".4f"),
    "state_bytes": ("state bytes", ",d"),
    "seconds": ("seconds", ".0f"),
}


def distill(recipe: Recipe, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Run ``recipe`` and return what ``metrics.json`` holds.

    Writes to ``recipe.output``: ``adapter/`` (the memory), ``model/`` (the whole model and its tokenizer),
    ``metrics.json``, ``log.jsonl`` (everything logged), ``recipe.yaml`` (this run's) and ``checkpoint-*/``. Ctrl-C and
    SIGTERM write a checkpoint, say how to resume and exit with status 130.

    Args:
        resume: continue the run in ``recipe.output`` from its last checkpoint.
        overwrite: replace an earlier run in ``recipe.output``.

    Raises:
        RetrofitError: base, data or output is not given, cannot be read, or does not fit the recipe.
        SystemExit: with status 130, when interrupted.
    """
    base, data, output = recipe.places()
    console = Console(stderr=True)
    earlier = checkpoints(output) if resume else []
    if resume:
        _check_same_run(recipe, output)
    else:
        check_output(output, overwrite)

    kind = find_kind(recipe.memory)
    kind.read_options(recipe.options)
    if not kind.trainable:
        raise RetrofitError(f"memory {recipe.memory!r} has nothing to fit: export it as it is with `retrofit patch`")
    load_config(base)  # no such base, or no family of ours: said before anything is tokenised
    tokenizer = load_tokenizer(base)
    console.print(f"reading {data}", highlight=False)
    split = load_rows(data, tokenizer, seq_len=recipe.seq_len, holdout=recipe.holdout)
    set_seed(recipe.seed)
    model = retrofit.patch(
        base,
        memory=recipe.memory,
        window=recipe.window,
        sinks=recipe.sinks,
        layers=recipe.layers,
        others=recipe.others,
        model_kwargs={"dtype": recipe.dtype},
        **recipe.options,
    )
    if not resume:
        _clear(output)
        write_text(output / RECIPE_FILE, yaml.safe_dump(recipe.to_dict(), sort_keys=False))

    try:
        state = _fit(model, recipe, split, output, earlier[-1] if earlier else None, console)
        rows = _compare(model, recipe, split, seconds(state), console)
    except KeyboardInterrupt:
        again = f"retrofit distill {shlex.quote(str(output / RECIPE_FILE))} --resume"
        at = (
            f"at step {step_of(saved[-1])} of {recipe.steps}"
            if (saved := checkpoints(output))
            else "before a checkpoint"
        )
        console.print(f"stopped {at}; continue with:\n  {again}", highlight=False, soft_wrap=True)
        raise SystemExit(EXIT_STATUS) from None

    metrics = {
        "recipe": recipe.to_dict(),
        "rows": rows,
        "tokens": {
            "all": split.tokens,
            "trained on": split.train.rows.numel(),
            "held out": split.held_out.rows.numel(),
        },
        "parameters": {"memory": sum(p.numel() for _, p in model.memory_parameters()), "all": model.num_parameters()},
        "curve": state.log_history,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")}
        | {"python": platform.python_version()},
    }
    retrofit.save_adapter(model, output / "adapter", overwrite=True)
    with write_folder(output / "model", overwrite=True) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    write_json(output / "metrics.json", metrics)
    scored = f"{min(recipe.eval_rows, len(split.held_out))} held-out rows of {recipe.seq_len} tokens, past the window"
    print_table(f"{scored}; state bytes of one layer", rows, COLUMNS)
    return metrics


def _check_same_run(recipe: Recipe, output: Path) -> None:
    """Refuse to resume with other settings: the result would be neither run's."""
    path = output / RECIPE_FILE
    if not path.is_file():
        raise RetrofitError(f"there is no run to resume in {output}: leave --resume away to start one")
    before = yaml.safe_load(path.read_text(encoding="utf-8"))
    changed = [key for key, value in recipe.to_dict().items() if key not in FREE_ON_RESUME and before.get(key) != value]
    if changed:
        what = ", ".join(f"{key} (was {before.get(key)!r})" for key in changed)
        raise RetrofitError(f"the run in {output} was started with other settings: {what}; resume it with {path}")


def _clear(output: Path) -> None:
    """Remove an earlier run, and nothing else, from the output folder."""
    for path in [output / "adapter", output / "model", *checkpoints(output)]:
        shutil.rmtree(path, ignore_errors=True)
    for name in (RECIPE_FILE, "metrics.json", "log.jsonl"):
        (output / name).unlink(missing_ok=True)


def _fit(
    model: Any, recipe: Recipe, split: Split, output: Path, checkpoint: Path | None, console: Console
) -> TrainerState:
    """Train the memory, from ``checkpoint`` if there is one.

    Raises:
        KeyboardInterrupt: asked to stop; a checkpoint was written.
    """
    if checkpoint is not None and step_of(checkpoint) >= recipe.steps:
        load_memory_weights(model, checkpoint / WEIGHTS)
        return TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    checkpointing: dict[str, Any] = {CHECKPOINTING: recipe.gradient_checkpointing}
    args = DistillArguments(
        output_dir=str(output),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch_size,
        per_device_eval_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.gradient_accumulation_steps,
        learning_rate=recipe.lr,
        warmup_steps=recipe.warmup,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        temperature=recipe.temperature,
        label_shift=recipe.label_shift,
        window_sampling=recipe.window_sampling,
        seed=recipe.seed,
        logging_steps=1,  # a loss is averaged since the last log: one per step stays the same across a resumption
        eval_strategy="steps",
        eval_steps=recipe.eval_steps,
        save_steps=recipe.save_steps,
        save_total_limit=recipe.save_total_limit,
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
        report_to="none",
        **checkpointing,
    )
    trainer = DistillTrainer(model, args, split.train, split.held_out.head(recipe.eval_rows))
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(RunLog(output / "log.jsonl"))
    tokens = recipe.seq_len * args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    done = step_of(checkpoint) if checkpoint else 0
    with progress_bar("distilling", recipe.steps, done, console) as bar, StopOnSignal(console) as stop:
        trainer.add_callback(ProgressCallback(bar, tokens))
        trainer.add_callback(stop)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if stop.received is not None:
        raise KeyboardInterrupt
    return trainer.state


def _compare(model: Any, recipe: Recipe, split: Split, fitted_in: float, console: Console) -> list[dict[str, Any]]:
    """The table's rows: teacher, window-only, window-only with as many bytes as the memory, and the memory."""
    wide = equal_memory_window(model)
    models = {
        "window-only": window_only(model),
        "window-only, equal memory": window_only(model, wide),
        recipe.memory: model,
    }
    sequences = split.held_out.head(recipe.eval_rows).rows.long()
    with progress_bar("scoring held-out rows", len(sequences), console=console) as bar:
        scores = evaluate(
            models,
            sequences,
            start=recipe.window + recipe.sinks,
            batch_size=recipe.batch_size,
            on_batch=lambda done, _: bar.update(done, tokens=recipe.seq_len),
        )
    gap = scores["window-only"].mean_kl
    state = retrofit.state_bytes(model)
    shape = {  # window, bytes a sequence keeps in a layer besides sinks and W tokens, seconds of fitting
        "teacher": (None, None, None),
        "window-only": (recipe.window, 0, 0.0),
        "window-only, equal memory": (wide, (wide - recipe.window) * row_bytes(model.config, model.dtype), 0.0),
        recipe.memory: (recipe.window, state, fitted_in),
    }
    return [
        {
            "name": name,
            "window": shape[name][0],
            "kl": score.mean_kl,
            "kl_gap_closed": gap_closed(score.mean_kl, gap),
            "nll": score.mean_nll,
            "state_bytes": shape[name][1],
            "seconds": shape[name][2],
        }
        for name, score in scores.items()
    ]
