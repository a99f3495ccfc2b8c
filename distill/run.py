"""One run from recipe to results: load the base, patch it, fit the memory, score it, write everything to one folder."""

import platform
import shlex
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import yaml
from rich.console import Console
from transformers import PrinterCallback, TrainerCallback, TrainerState
from transformers.utils import logging

import retrofit
from distill import same_run
from distill.arguments import CHECKPOINTING, DistillArguments
from distill.checkpoint import STATE, checkpoints, damage, step_of
from distill.data import Split, load_rows
from distill.lora import FOLDER as LORA
from distill.lora import load_lora, merge_lora, save_lora
from distill.outcome import EXIT_STATUS
from distill.processes import Processes, join, trainer_settings
from distill.progress import ProgressCallback, RunLog, progress_bar, seconds
from distill.recipe import Recipe, read_recipe
from distill.reporting import reporters
from distill.results import COLUMNS, card_details, compare, title
from distill.start import build_model
from distill.stopping import StopOnSignal
from distill.trainer import DRAFT, DistillTrainer
from distill.zero import agreeing, find_config, is_partitioned, whole
from patches.errors import RetrofitError
from patches.kinds import find_kind
from retrofit.adapter import WEIGHTS, load_memory_weights, read_adapter_config
from retrofit.export import export_model
from retrofit.files import check_output, no_empty_folders, write_folder, write_json, write_text
from retrofit.fingerprint import difference
from retrofit.head import gathered
from retrofit.loading import load_config, load_tokenizer
from retrofit.settings import settings
from retrofit.table import finite, print_table

RECIPE_FILE = "recipe.yaml"
# what may differ between a run and its resumption without changing the result
FREE_ON_RESUME = {"output", "report_to", "eval_steps", "save_steps", "save_total_limit"}


def distill(recipe: Recipe, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Run ``recipe`` and return what ``metrics.json`` holds.

    Writes to ``recipe.output``: ``adapter/`` (the memory), ``model/`` (the whole model and its tokenizer),
    ``metrics.json``, ``log.jsonl`` (everything logged), ``recipe.yaml`` (this run's) and ``checkpoint-*/``. Ctrl-C and
    SIGTERM write a checkpoint, say how to resume and exit with status 130.

    Under torchrun (``retrofit distill --nproc N`` is that) every process calls it; the first one prints and writes, and
    the others return nothing.

    Args:
        resume: continue the run in ``recipe.output`` from its last checkpoint.
        overwrite: replace an earlier run in ``recipe.output``.

    Raises:
        RetrofitError: base, data or output is not given, cannot be read, or does not fit the recipe.
        SystemExit: with status 130, when interrupted.
    """
    base, data, output = recipe.places()
    processes = join(deepspeed=find_config(recipe.deepspeed) is not None)
    console = Console(stderr=True, quiet=not processes.main)
    if not processes.main:
        logging.disable_progress_bar()
    if resume:
        _check_same_run(recipe, output)
    elif processes.main:
        read = [name for name in (base, recipe.init_adapter, recipe.deepspeed) if name is not None]
        check_output(output, overwrite, inputs=read, data=[data])
    # the main process looks for all: what one finds while another is at work would differ
    found = _last_whole(recipe, output, console, processes.count) if resume and processes.main else None
    checkpoint = processes.same(found)

    kind = find_kind(recipe.memory)
    kind.read_options(recipe.options)
    if not kind.trainable:
        raise RetrofitError(f"memory {recipe.memory!r} has nothing to fit: export it as it is with `retrofit patch`")
    reporters(recipe.report_to)
    with processes.main_first():
        load_config(base)  # no such base, or no family of ours: said before anything is tokenised
        tokenizer = load_tokenizer(base)
        console.print(f"reading {data}", highlight=False)
        split = load_rows(
            data,
            tokenizer,
            seq_len=recipe.seq_len,
            holdout=recipe.holdout,
            eval_rows=recipe.eval_rows,
            name=recipe.data_name,
            revision=recipe.data_revision,
            split=recipe.data_split,
            data_format=recipe.data_format,
            min_length=recipe.min_length,
            max_samples=recipe.max_samples,
            streaming=recipe.streaming,
        )
    split.check_scored(recipe.window + recipe.sinks, recipe.eval_rows)
    if not recipe.streaming:
        console.print(split.sentence(), highlight=False, soft_wrap=True)
    this_run = same_run.describe(split.train, split.held_out.head(recipe.eval_rows), processes.count)
    if resume:
        same_run.check(output, this_run)
    model = build_model(recipe, fresh=checkpoint is not None)
    if checkpoint is not None and (other := difference(read_adapter_config(checkpoint)["fingerprint"], model)):
        raise RetrofitError(f"the base of the run in {output} is another one than it was started with: {other}")
    sizes = {"memory": sum(p.numel() for _, p in model.memory_parameters()), "all": model.num_parameters()}

    def begin() -> None:
        """Write the first files, when nothing can be refused any more."""
        if not processes.main:
            return
        shutil.rmtree(output / DRAFT, ignore_errors=True)  # of a run that was killed while it saved
        if not resume:
            _clear(output)
            write_text(output / RECIPE_FILE, yaml.safe_dump(recipe.to_dict(), sort_keys=False))
            same_run.write(output, this_run)

    try:
        with no_empty_folders(output):
            trainer, state = _fit(model, recipe, split, output, checkpoint, begin, console, processes)
        if recipe.streaming:  # only now is it known
            console.print(split.sentence(), highlight=False, soft_wrap=True)
        rows = compare(model, recipe, split, seconds(state), console, processes)
    except KeyboardInterrupt:
        saved = checkpoints(output)
        if not (output / RECIPE_FILE).is_file():
            raise  # before the first step: there is nothing to resume
        at = f"at step {step_of(saved[-1])} of {recipe.steps}" if saved else "before its first checkpoint"
        again = f"retrofit distill {shlex.quote(str(output / RECIPE_FILE))} --resume"
        if processes.count > 1:
            again += f" --nproc {processes.count}"
        console.print(f"stopped {at}; continue with:\n  {again}", highlight=False, soft_wrap=True)
        processes.leave()
        raise SystemExit(EXIT_STATUS) from None

    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    metrics = {
        "recipe": recipe.to_dict(),
        "rows": rows,
        "tokens": split.tokens,
        "data": split.counts.to_dict(),
        "parameters": sizes,
        "curve": state.log_history,
        "command": command,
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")}
        | {"python": platform.python_version()},
    }
    details = card_details(recipe, split, rows, command)
    with gathered(parameter for _, parameter in model.memory_parameters()):
        if processes.main:
            of_base = trainer.of_base if trainer else None
            retrofit.save_adapter(model, output / "adapter", overwrite=True, details=details, of_base=of_base)
    if processes.main:
        if recipe.lora:
            with write_folder(output / LORA, overwrite=True) as draft:
                save_lora(model, draft)
            merge_lora(model)
        if is_partitioned(model):
            model = whole(base, output / "adapter", recipe.dtype)
        export_model(model, output / "model", tokenizer, overwrite=True, details=details)
        write_json(output / "metrics.json", finite(metrics))  # a gradient's norm in the curve may be infinite
        print_table(title(recipe, split), rows, COLUMNS)
    processes.leave()
    return metrics if processes.main else {}


def _check_same_run(recipe: Recipe, output: Path) -> None:
    """Refuse to resume with other settings: the result would be neither run's."""
    path = output / RECIPE_FILE
    if not path.is_file():
        raise RetrofitError(f"there is no run to resume in {output}: leave --resume away to start one")
    before = Recipe.from_dict(read_recipe(path), where=str(path)).to_dict()
    changed = [key for key, value in recipe.to_dict().items() if key not in FREE_ON_RESUME and before[key] != value]
    if changed:
        what = ", ".join(f"{key} (was {before.get(key)!r})" for key in changed)
        raise RetrofitError(f"the run in {output} was started with other settings: {what}; resume it with {path}")


def _last_whole(recipe: Recipe, output: Path, console: Console, processes: int) -> Path | None:
    """The last checkpoint of a run that can be gone on from; those after it are named."""
    for checkpoint in reversed(checkpoints(output)):
        reason = damage(checkpoint, processes, recipe.deepspeed is not None, bool(recipe.lora))
        if not reason:
            return checkpoint
        said = f"{checkpoint} cannot be used, {reason}: going back to the one before it"
        console.print(said, highlight=False, soft_wrap=True)
    return None


def _clear(output: Path) -> None:
    """Remove an earlier run, and nothing else, from the output folder."""
    for path in [output / "adapter", output / LORA, output / "model", *checkpoints(output)]:
        shutil.rmtree(path, ignore_errors=True)
    for name in (RECIPE_FILE, same_run.FILE, "metrics.json", "log.jsonl"):
        (output / name).unlink(missing_ok=True)


class _Begin(TrainerCallback):
    """Calls a function right before the first step: the trainer has refused by then what it would."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self.begin = begin

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Once, after the optimizer and the engine are made."""
        self.begin()


def _fit(
    model: Any,
    recipe: Recipe,
    split: Split,
    output: Path,
    checkpoint: Path | None,
    begin: Callable[[], None],
    console: Console,
    processes: Processes,
) -> tuple[DistillTrainer | None, TrainerState]:
    """Train the memory, from ``checkpoint`` if there is one; no trainer if that is the last step's.

    ``begin`` is called right before the first step.

    Raises:
        KeyboardInterrupt: asked to stop; a checkpoint was written.
    """
    if checkpoint is not None and step_of(checkpoint) >= recipe.steps:
        load_memory_weights(model.to(processes.device), checkpoint / WEIGHTS)
        if recipe.lora:
            load_lora(model, checkpoint / LORA)
        return None, TrainerState.load_from_json(str(checkpoint / STATE))
    checkpointing: dict[str, Any] = {CHECKPOINTING: recipe.gradient_checkpointing}
    args = DistillArguments(
        output_dir=str(output),
        per_device_eval_batch_size=recipe.batch_size,
        logging_steps=1,  # a loss is averaged since the last log: one per step stays the same across a resumption
        eval_strategy="steps",
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
        report_to=reporters(recipe.report_to),
        **{key.argument: getattr(recipe, key.name) for key in settings(Recipe).values() if key.argument},
        **checkpointing,
        **trainer_settings(find_config(recipe.deepspeed)),
    )
    trainer = DistillTrainer(model, args, split.train, split.held_out.head(recipe.eval_rows), split.collator)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_Begin(begin))
    trainer.add_callback(RunLog(output / "log.jsonl"))
    rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    done = step_of(checkpoint) if checkpoint else 0
    with progress_bar("distilling", recipe.steps, done, console) as bar, StopOnSignal(console) as stop:
        trainer.add_callback(ProgressCallback(bar, round(split.row_tokens * rows)))
        trainer.add_callback(stop)
        try:
            with agreeing(find_config(recipe.deepspeed)):
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except UnpicklingError:  # the Trainer reads a checkpoint's optimizer and random states with weights_only
            raise RetrofitError(
                f"{checkpoint} holds more than tensors, which is not read: delete it, and --resume from the one before"
            ) from None
    if stop.stopped:
        raise KeyboardInterrupt
    return trainer, trainer.state
