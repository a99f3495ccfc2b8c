"""One run from recipe to results: load the base, patch it, fit the memory, score it, write everything to one folder."""

import math
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Callable, Sized
from contextlib import nullcontext
from copy import copy
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from rich.console import Console
from transformers import PrinterCallback, TrainerCallback, TrainerState
from transformers.utils import logging

import retrofit
from distill.callbacks import Patience, PushAdapter, RunLog, ShowProgress, StopOnSignal, seconds
from distill.checkpoint import (
    DATA_FILE,
    RECIPE_FILE,
    STATE,
    began_by,
    check_same_data,
    check_same_recipe,
    checkpoints,
    describe_data,
    last_whole,
    step_of,
)
from distill.config import DistillConfig, reporters
from distill.data.split import Split, load_rows
from distill.lora import FOLDER as LORA
from distill.lora import load_lora, merge_lora, save_lora
from distill.model import build_model, calibrate_on
from distill.parallel import EXIT_STATUS
from distill.parallel.processes import Processes, join, launch_of
from distill.parallel.zero import agreeing, find_config, whole
from distill.preflight import budgets, check_recipe
from distill.progress import progress_bar
from distill.results import COLUMNS, card_details, compare, layer_errors, title
from distill.trainer import DRAFT, DistillTrainer
from patches.errors import RetrofitError
from retrofit.adapter import WEIGHTS, load_memory_weights, read_adapter_config
from retrofit.export import export_model
from retrofit.families import refuse_retrofit
from retrofit.files import (
    check_ours,
    check_output,
    no_empty_folders,
    only_writer,
    tidy,
    write_folder,
    write_json,
    write_text,
)
from retrofit.fingerprint import difference
from retrofit.lm_head import gathered, is_shared
from retrofit.loading import check_tokenizer, check_vocabulary, load_config, load_tokenizer
from retrofit.plain_yaml import dump_yaml
from retrofit.quantised_bases import quantisation
from retrofit.table import finite, print_table

RESULTS = ("adapter", LORA, "model")


def distill(recipe: DistillConfig, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Run ``recipe`` and return what ``metrics.json`` holds.

    Writes to ``recipe.output_dir``: ``adapter/`` (the memory), ``model/`` (the whole model and its tokenizer),
    ``metrics.json``, ``log.jsonl`` (everything logged), ``recipe.yaml`` (this run's) and ``checkpoint-*/``. Ctrl-C and
    SIGTERM write a checkpoint, say how to resume and exit with status 130.

    Under torchrun (``retrofit distill --nproc N`` is that) every process calls it; the first one prints and writes, and
    the others return nothing.

    Args:
        resume: continue the run in ``recipe.output_dir`` from its last checkpoint.
        overwrite: replace an earlier run in ``recipe.output_dir``.

    Raises:
        RetrofitError: base, data or output is not given, cannot be read, or does not fit the recipe; another process is
            writing to the output.
        SystemExit: with status 130, when interrupted.
    """
    recipe = copy(recipe)  # the run completes it; the caller's stays as it is
    _, _, output = recipe.places()
    ours = began_by(output, launch_of(first=False))
    resume = resume or (ours and (output / RECIPE_FILE).is_file())
    engine = find_config(recipe.deepspeed)
    processes = join(deepspeed=engine is not None)
    with only_writer(output) if processes.main else nullcontext():
        return _distill(recipe, engine, processes, resume, overwrite or ours)


def _distill(
    recipe: DistillConfig, engine: dict[str, Any] | None, processes: Processes, resume: bool, overwrite: bool
) -> dict[str, Any]:
    base, data, output = recipe.places()
    console = Console(stderr=True, quiet=not processes.main)
    if not processes.main:
        logging.disable_progress_bar()
    if resume:
        check_same_recipe(recipe, output)
    elif processes.main:
        read = [name for name in (base, recipe.init_adapter, recipe.deepspeed) if name is not None]
        check_output(output, overwrite, inputs=read, data=recipe.sources)
        _check_ours(output)
    # the main process looks for all: what one finds while another is at work would differ
    checkpoint = processes.same(last_whole(output, console) if resume and processes.main else None)
    check_recipe(recipe)
    reporters(recipe.report_to)
    with processes.main_first():
        config = load_config(base)  # no such base, or no family of ours: said before anything is tokenised
        if recipe.init_adapter is None:
            refuse_retrofit(config, base)
        tokenizer = load_tokenizer(base)
        check_vocabulary(tokenizer, config)
        beyond, _ = budgets(recipe, config)
        console.print(f"reading {data}", highlight=False)
        split = load_rows(recipe, tokenizer)
    if recipe.max_steps < 1 and isinstance(split.train, Sized):
        recipe.max_steps = steps_of(recipe, len(split.train), processes.count)
    split.check_scored(beyond, recipe.eval_rows)
    if not recipe.streaming:
        console.print(split.sentence(), highlight=False, soft_wrap=True)
    found = describe_data(split.train, split.held_out.select(slice(recipe.eval_rows)), processes.count)
    if resume:
        check_same_data(output, found)
    model = build_model(recipe, fresh=checkpoint is not None)
    check_tokenizer(tokenizer, model.config)
    if checkpoint is None and recipe.init_adapter is None:
        # ZeRO-3 and FSDP2 take the model from the CPU; a quantised one stays where it was loaded
        stays = recipe.fsdp or (engine or {}).get("zero_optimization", {}).get("stage") == 3
        calibrate_on(model, split.train, None if stays or quantisation(model) else processes.device)
    if checkpoint is not None and (other := difference(read_adapter_config(checkpoint)["fingerprint"], model)):
        raise RetrofitError(
            f"the base of the run in {output} is not the one that it was started with ({other}): give that base"
        )
    torch.set_float32_matmul_precision("high" if recipe.tf32 else "highest")  # of the backward pass, too
    for memory in model.model.memories().values():
        memory.tf32 = recipe.tf32
    sizes = {"memory": sum(p.numel() for _, p in model.memory_parameters()), "all": model.num_parameters()}
    processes.wait()  # each has loaded the base at its own pace
    if resume and processes.main:
        _remove_drafts(output)

    def begin() -> None:
        """Write the first files, when nothing can be refused any more."""
        if processes.main and not resume:
            _clear(output)
            write_json(output / DATA_FILE, found | {"launch": launch_of()})  # first: whose the folder is from here on
            write_text(output / RECIPE_FILE, dump_yaml(recipe.to_recipe()))

    try:
        with no_empty_folders(output):
            trainer, state = _train(model, recipe, split, checkpoint, processes, console, begin)
        if recipe.streaming:  # only now is it known
            console.print(split.sentence(), highlight=False, soft_wrap=True)
        rows = compare(model, recipe, split, seconds(state), console, processes)
    except KeyboardInterrupt:
        if not (output / RECIPE_FILE).is_file():
            raise  # before the first step: there is nothing to resume
        saved = checkpoints(output)
        at = f"at step {step_of(saved[-1])} of {recipe.max_steps}" if saved else "before its first checkpoint"
        again = how_to_resume(output, processes.count)
        console.print(f"stopped {at}; continue with:\n  {again}", highlight=False, soft_wrap=True)
        processes.leave()
        raise SystemExit(EXIT_STATUS) from None

    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    metrics = {
        "recipe": recipe.to_recipe() | {"max_steps": recipe.max_steps},
        "rows": rows,
        "tokens": split.tokens,
        "data": asdict(split.counts),
        "parameters": sizes,
        "layers": layer_errors(state.log_history),
        "curve": state.log_history,
        "command": command,
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")}
        | {"python": platform.python_version()},
    }
    details = card_details(recipe, split, rows, command)
    with gathered(model.model.memories().values()):
        if processes.main:
            of_base = trainer.of_base if trainer else None
            retrofit.save_adapter(model, output / "adapter", overwrite=True, details=details, of_base=of_base)
    if processes.main:
        if recipe.lora:
            with write_folder(output / LORA, overwrite=True) as draft:
                save_lora(model, draft)
            merge_lora(model)
        if is_shared(model):
            model = whole(base, output / "adapter", recipe.dtype)
        export_model(model, output / "model", tokenizer, overwrite=True, details=details)
        write_json(output / "metrics.json", finite(metrics))  # a gradient's norm in the curve may be infinite
        if recipe.push_to_hub:
            PushAdapter(recipe, console).push(output / "adapter", "The trained memory")
        print_table(title(recipe, split), rows, COLUMNS)
    processes.leave()
    return metrics if processes.main else {}


def steps_of(recipe: DistillConfig, rows: int, processes: int) -> int:
    """Optimizer steps of ``recipe.num_train_epochs`` passes over so many rows, as transformers counts them."""
    assert recipe.num_train_epochs is not None
    batches = rows / (recipe.per_device_train_batch_size * processes)
    batches = math.floor(batches) if recipe.dataloader_drop_last else math.ceil(batches)
    return max(1, math.ceil(recipe.num_train_epochs * -(-batches // recipe.gradient_accumulation_steps)))


def how_to_resume(output: Path, processes: int) -> str:
    """The command that continues the run in ``output`` in so many processes on all machines."""
    command = f"retrofit distill {shlex.quote(str(output / RECIPE_FILE))} --resume"
    if processes == 1:
        return command
    if int(os.environ.get("LOCAL_WORLD_SIZE", processes)) < processes:
        return f"{command}   (by the launcher of all {processes} processes)"
    return f"{command} --nproc {processes}"


def _of_a_run(output: Path) -> list[Path]:
    """What a run writes, as far as it is there."""
    names = (*RESULTS, RECIPE_FILE, DATA_FILE, "metrics.json", "log.jsonl")
    return [*(output / name for name in names if (output / name).exists()), *checkpoints(output)]


def _check_ours(output: Path) -> None:
    """Refuse to remove what no run of ours wrote."""
    there = [path for path in _of_a_run(output) if path.name not in RESULTS]
    if there and not {output / DATA_FILE, output / RECIPE_FILE} & {*there}:
        raise RetrofitError(f"{there[0]} was not written by `retrofit distill`: move it away, or choose another folder")
    for name in RESULTS:
        check_ours(output / name)


def _clear(output: Path) -> None:
    """Remove an earlier run, and nothing else, from the output folder."""
    _remove_drafts(output)
    for path in _of_a_run(output):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _remove_drafts(output: Path) -> None:
    """Remove what a run left that was killed while it saved."""
    shutil.rmtree(output / DRAFT, ignore_errors=True)
    for name in RESULTS:
        tidy(output / name)


class _Begin(TrainerCallback):
    """Calls a function when the first step's gradients are there: the trainer has refused by then what it would."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self.begin = begin

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Once: the data could be read, the step fitted into memory, and its loss was finite."""
        self.begin()
        self.begin = lambda: None


def _train(
    model: Any,
    recipe: DistillConfig,
    split: Split,
    checkpoint: Path | None,
    processes: Processes,
    console: Console,
    begin: Callable[[], None],
) -> tuple[DistillTrainer | None, TrainerState]:
    """Train ``model`` from ``checkpoint``, if there is one; there is no trainer if that is the last step's.

    Args:
        begin: called when nothing can be refused any more, right before the first step is applied if there is one.

    Raises:
        KeyboardInterrupt: asked to stop; a checkpoint was written.
    """
    done = step_of(checkpoint) if checkpoint else 0
    if checkpoint is not None:
        state = TrainerState.load_from_json(str(checkpoint / STATE))
        if done >= recipe.max_steps or Patience.over(recipe, state):
            begin()
            if (recipe.patience or recipe.load_best_model_at_end) and state.best_model_checkpoint:
                checkpoint = Path(str(recipe.output_dir)) / Path(state.best_model_checkpoint).name
            load_memory_weights(model.to(processes.device), checkpoint / WEIGHTS)
            if recipe.lora:
                load_lora(model, checkpoint / LORA)
            return None, state
    held_out = split.held_out.select(slice(recipe.eval_rows))
    trainer = DistillTrainer(model, recipe, split.train, held_out, split.collator)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_Begin(begin))
    if recipe.patience:
        trainer.add_callback(Patience(recipe.patience))
    trainer.add_callback(RunLog(Path(str(recipe.output_dir)) / "log.jsonl"))
    per_step: float = recipe.train_batch_size * recipe.gradient_accumulation_steps * recipe.world_size
    if isinstance(split.train, Sized):  # the last step of a pass reads fewer rows
        per_step = len(split.train) / math.ceil(len(split.train) / per_step)
    with (
        progress_bar("distilling", recipe.max_steps, done, console) as bar,
        StopOnSignal(console) as stop,
        agreeing(recipe.to_recipe()["deepspeed"]),
    ):
        trainer.add_callback(ShowProgress(bar, split.row_tokens * per_step))
        trainer.add_callback(stop)
        if recipe.torch_compile:
            console.print("compiling: the first step takes minutes, however small the base")
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except UnpicklingError:  # the Trainer reads a checkpoint's optimizer and random states with weights_only
            raise RetrofitError(
                f"{checkpoint} holds objects other than tensors, which could run code when they are read: delete "
                "it, and --resume from the one before"
            ) from None
    # what is saved is scored, without the autocast that bf16 and fp16 train with
    trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    if stop.stopped:
        raise KeyboardInterrupt
    return trainer, trainer.state
