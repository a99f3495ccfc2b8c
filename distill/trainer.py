"""The trainer: transformers' own, with the model's full-attention self as teacher and only the memory trained."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import Trainer, TrainerCallback, TrainerControl
from transformers.trainer_utils import IntervalStrategy

from distill.callbacks import EndOfStage, FiniteOnly, PushAdapter
from distill.checkpoint import STATE, drop_oldest, write_checksums
from distill.config import DistillConfig
from distill.data.rows import ByLength, even_rows, longer_than
from distill.local_fit import LocalFit
from distill.lora import FOLDER as LORA
from distill.lora import load_lora, lora_layers, save_lora
from distill.objective import Batch, Objective, labels_of, tokens_of
from distill.offload import offloaded
from distill.parallel import fsdp
from distill.parallel.zero import keep_base_out, partition, window_only
from distill.preflight import refuse_unsupported
from distill.schedules import in_stages
from distill.windows import check_draws, draw_window, reach
from patches.errors import RetrofitError, first_line
from retrofit.adapter import WEIGHTS, load_memory_weights, save_adapter
from retrofit.evaluation.baselines import narrowest_window
from retrofit.evaluation.scores import evaluating, gap_closed
from retrofit.families import is_retrofit
from retrofit.fingerprint import fingerprint
from retrofit.lm_head import gathered, is_shared

DISTANCES = 20  # powers of two times the window: evaluation tells them apart up to W 2^20 tokens
TORCH_WRITER = ("inline_container", "PytorchStreamWriter", "iostream")  # in what torch.save says of a full disk
DRAFT = ".saving"  # folder, inside that of the run, in which a checkpoint is written


class DistillTrainer(Trainer):
    """Fits a retrofitted model's memory to its own base with full attention.

    One copy of the weights serves both: the teacher is the module with its memory off. Rows of a dataset hold
    ``input_ids`` and ``labels`` (-100 where nothing is to be learned), right-padded with an ``attention_mask`` if they
    differ in length. Checkpoints hold the memory, the optimizer, the schedule and the random state, never the base.

    Args:
        model: a model of :func:`retrofit.patch`.
        args: :class:`DistillConfig`.
        train_dataset, eval_dataset, data_collator, callbacks: as for ``transformers.Trainer``.

    Raises:
        RetrofitError: the model has no memory to train, or one that cannot work with the windows to be drawn; while
            training, a loss that is NaN or infinite.
    """

    args: DistillConfig
    control: TrainerControl
    lr_scheduler: Any

    def __init__(
        self,
        model: Any,
        args: DistillConfig,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        data_collator: Any = None,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        if not is_retrofit(model):
            raise RetrofitError(f"{type(model).__name__} has no memory to train: patch it first with retrofit.patch")
        if not any(parameter.requires_grad for _, parameter in model.memory_parameters()):
            kind = model.config.memory["kind"]
            raise RetrofitError(f"memory {kind!r} has no parameters to train: use the patched model as it is")
        args.start()
        if eval_dataset is None:
            args.eval_strategy = IntervalStrategy.NO
        self.objective = Objective.of(args)
        self.objective.check(model)
        if args.window_sampling == "ahn":
            check_draws(model)
        refuse_unsupported(model, args)
        use_cache = model.config.use_cache
        self.of_base = fingerprint(model)  # while the weights are whole: ZeRO-3 is about to part them
        args._n_gpu = min(args.n_gpu, 1)  # several GPUs want a process each: nn.DataParallel would copy the model
        engine = getattr(args, "hf_deepspeed_config", None)
        if engine is not None and engine.is_zero3() and not is_shared(model):
            partition(model, engine.config, args.device)
        if args.fsdp:
            fsdp.name_units(model)
            if args.device.type == "cpu":
                fsdp.allow_on_cpu()
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=callbacks,
        )
        # the Trainer switches it off for training, where we pass it anyway; the exported config must not remember
        model.config.use_cache = use_cache
        # rows of a stream differ in length and cannot be handed out from one process: each reads the stream for itself
        if self.accelerator.dataloader_config.dispatch_batches is None:
            self.accelerator.dataloader_config.dispatch_batches = False
        # our loss is divided by the positions of the whole accumulated batch, so it must not be divided again
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        if self.is_deepspeed_enabled:
            keep_base_out(self.accelerator)
        self.add_callback(FiniteOnly(self))
        if args.local_steps:
            self.add_callback(EndOfStage())
        if args.push_to_hub:
            self.add_callback(PushAdapter(args))
        self.window: tuple[int, int] = (narrowest_window(model), model.config.memory["sinks"])  # W, S
        self._step_window = self.window
        self._draft = ""  # subfolder of the output folder in which a checkpoint is being written
        self._window_only_kl: dict[str, tuple[Any, dict[str, float]]] = {}  # of which rows, what

    # ---- the stages ----

    @cached_property
    def _local(self) -> LocalFit:
        return LocalFit(self.accelerator.unwrap_model(self.model))

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's.

        Raises:
            RetrofitError: the optimizer is not installed, or refuses one of its settings.
        """
        try:
            return super().create_optimizer(*args, **kwargs)
        except (ValueError, ImportError) as error:
            name = getattr(self.args.optim, "value", self.args.optim)
            raise RetrofitError(f"optim: {name} cannot be made ({first_line(error)}): correct its settings") from None

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As the Trainer's; with local steps, each stage has a warm-up and a schedule of its own."""
        if not self.args.local_steps or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        self.lr_scheduler = in_stages(self.args, optimizer or self.optimizer, num_training_steps)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the Trainer's; the loss of a local step is no KL and is called ``local_loss``."""
        if self.state.global_step <= self.args.local_steps:
            logs = {"local_loss" if key == "loss" else key: value for key, value in logs.items()}
        super().log(logs, *args, **kwargs)

    # ---- the loss ----

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: Any) -> tuple[list[Batch], Any]:
        """The micro-batches of the next optimizer step, and how many positions they score on all ranks.

        Draws the step's window too, since the count depends on it.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.state.global_step == self.args.local_steps > 0:
            self.optimizer.state.clear()  # how large the layers' gradients were says nothing about the KL's
        self._step_window = self.window
        if self.args.window_sampling == "ahn" and batches:
            longest = torch.tensor([max(batch["input_ids"].shape[1] for batch in batches)], device=device)
            length = int(self.accelerator.gather(longest).max())  # rows may be padded to another length elsewhere
            self._step_window = draw_window(self.args.seed, self.state.global_step, length)
        lossless = sum(self._step_window)
        count = sum(self.objective.scored(labels_of(batch), lossless).sum() for batch in batches)
        return batches, self.accelerator.reduce(torch.as_tensor(count, device=device), reduction="sum")

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        data: Any = self.train_dataset if train_dataset is None else train_dataset
        if not self.args.group_by_length:
            return super()._get_train_sampler(train_dataset)
        batch = self.args.train_batch_size * self.args.gradient_accumulation_steps
        assert self.args.data_seed is not None
        return ByLength(batch, data, self.args.data_seed)

    def get_train_dataloader(self) -> DataLoader:
        """As transformers', with rows by length in the order of their pass in every process, resumed or not.

        Raises:
            RetrofitError: a layer would learn nothing from the rows.
        """
        if self.args.window_sampling == "fixed":
            self.objective.check_rows(self.train_dataset, reach(self.accelerator.unwrap_model(self.model)))
        loader = super().get_train_dataloader()
        inner = loader.batch_sampler
        while hasattr(inner, "batch_sampler"):
            inner = inner.batch_sampler
        sampler = getattr(inner, "sampler", None)
        if isinstance(sampler, ByLength) and loader.batch_sampler is not inner:
            loader.batch_sampler.sampler = sampler  # accelerate looks for it here, to say which pass begins
        return loader

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if "row" not in self._signature_columns:
            self._signature_columns.append("row")  # ours, not the model's: for messages

    def training_step(self, model: Any, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        # around the backward pass too: gradient checkpointing runs the forward again there
        with self._windowed(self._step_window):
            loss = super().training_step(model, inputs, num_items_in_batch)
        return loss

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The stage's loss, averaged over the scored positions of the whole accumulated, distributed batch."""
        inputs = longer_than(inputs, reach(self.accelerator.unwrap_model(self.model)))
        scored = self.objective.scored(inputs["labels"], sum(self._step_window))
        with offloaded(model) if self.args.activation_offloading else nullcontext():
            if self.state.global_step < self.args.local_steps:
                total = self._local.total(model, tokens_of(inputs), scored)
            else:
                total = self.objective.losses(model, self.accelerator.unwrap_model(model), inputs, scored).sum()
        count = scored.sum()
        if num_items_in_batch is not None:
            # data parallelism averages gradients over ranks: undo it, the count is already that of all ranks
            total, count = total * self.accelerator.num_processes, num_items_in_batch
        loss = total / count.clamp(min=1)  # a batch without a scored position contributes zero
        if not loss.isfinite():
            raise RetrofitError(
                f"the loss is {loss.item()} at step {self.state.global_step + 1}{_named(inputs)}: the run stopped "
                "before this step was applied; look at these rows, or start again with a smaller learning rate"
            )
        return (loss, {}) if return_outputs else loss

    @contextmanager
    def _windowed(self, window: tuple[int, int]) -> Iterator[None]:
        """The model at another window inside the block; its own, the one that is saved, outside."""
        if window == self.window:
            yield
            return
        model = self.accelerator.unwrap_model(self.model)
        model.set_window(window=window[0], sinks=window[1])
        try:
            yield
        finally:
            model.set_window(window=self.window[0], sinks=self.window[1])

    # ---- evaluation ----

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Held-out KL at the model's own window, beside that of the same model without a memory.

        Returns:
            ``{prefix}_kl``, ``{prefix}_kl_window_only`` (nats) and ``{prefix}_kl_gap_closed`` (1 is the teacher); both
            KLs also by how far past the window a position lies: ``{prefix}_kl_beyond_{tokens}`` is the mean from that
            distance up to the next key's. After local steps also ``{prefix}_layer_error_{index}``: a layer's squared
            error, as a share of that of its window alone, and ``{prefix}_layer_error``, their mean.
        """
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, dict):
            parts = {
                name: self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}") for name, part in data.items()
            }
            return {key: value for part in parts.values() for key, value in part.items()}
        rows, reference = self._window_only_kl.get(metric_key_prefix, (None, {}))
        if rows is not data or not reference:  # the base stays as it is: once for the same rows
            bare = window_only(self.accelerator.unwrap_model(self.model))
            reference = self._kl_by_distance(bare, data)
            self._window_only_kl[metric_key_prefix] = data, reference
        kl = self._kl_by_distance(self.accelerator.unwrap_model(self.model), data)
        metrics = {f"kl{key}": value for key, value in kl.items()}
        metrics |= {f"kl_window_only{key}": value for key, value in reference.items()}
        metrics["kl_gap_closed"] = gap_closed(kl[""], reference[""])
        if self.args.local_steps:
            metrics |= self._errors_of_layers(data)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _kl_by_distance(self, model: Any, data: Dataset | None) -> dict[str, float]:
        """Mean KL to the teacher over ``data`` on all ranks, nats: of all scored positions under the key ``""``, and of
        those from W 2^i to W 2^(i + 1) past the window, the first also nearer, under ``"_beyond_{first}"``."""
        objective = replace(self.objective, loss="kl", mse_weight=0.0, temperature=1.0)
        window, sinks = self.window
        sums = torch.zeros(2, DISTANCES, dtype=torch.float64, device=self.args.device)
        with torch.no_grad(), evaluating(model):
            for batch, scored in self._scored_batches(data):
                losses = objective.losses(model, model, batch, scored).double()
                beyond = scored.nonzero()[:, 1] - (window + sinks)
                at = (beyond / window).clamp(min=1).log2().long().clamp(max=DISTANCES - 1)
                sums[0].index_add_(0, at, losses)
                sums[1].index_add_(0, at, torch.ones_like(losses))
        totals, counts = self.accelerator.reduce(sums, reduction="sum").tolist()
        means = {"": sum(totals) / max(sum(counts), 1)}
        for i, (total, count) in enumerate(zip(totals, counts, strict=True)):
            if count:
                means[f"_beyond_{window * 2**i if i else 0}"] = total / count
        return means

    def _errors_of_layers(self, data: Dataset | None) -> dict[str, float]:
        """Each layer's squared error over ``data`` on all ranks, as a share of that of its window alone."""
        model = self.accelerator.unwrap_model(self.model)
        sums = torch.zeros(len(self._local.layers) + 1, dtype=torch.float64, device=self.args.device)
        with torch.no_grad():
            for batch, scored in self._scored_batches(data):
                counts = scored.sum(1)
                errors = self._local.errors(model, tokens_of(batch), scored).double()  # (layers, B)
                sums += torch.cat([(errors * counts).sum(1), counts.sum()[None]])
        *totals, count = self.accelerator.reduce(sums, reduction="sum").tolist()
        means = [total / max(count, 1) for total in totals]
        by_layer = {f"layer_error_{index}": mean for index, mean in zip(self._local.layers, means, strict=True)}
        return {"layer_error": sum(means) / len(means), **by_layer}

    def _scored_batches(self, data: Dataset | None) -> Iterator[tuple[Batch, Tensor]]:
        """This process's batches of ``data``, and which of their positions count."""
        if data is not None and self.args.world_size > 1 and hasattr(data, "__len__"):
            data = even_rows(data, self.args.eval_batch_size * self.args.world_size)
        for batch in map(self._prepare_inputs, self.get_eval_dataloader(data)):
            yield batch, Objective(label_shift=self.args.label_shift).scored(batch["labels"], sum(self.window))

    # ---- checkpoints ----

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        best = super()._determine_best_metric(metrics, trial)
        if best and self.args.load_best_model_at_end:
            self.control.should_save = True  # an evaluation between two checkpoints may be the best one, too
        return best

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the memory to ``output_dir``, as an adapter. Every process calls it, the main one writes."""
        model = self.accelerator.unwrap_model(self.model)
        with gathered(model.model.memories().values()):
            if self.args.should_save:
                folder = output_dir or self._get_output_dir(trial=None)
                save_adapter(model, folder, overwrite=True, of_base=self.of_base)
                if lora_layers(model):
                    save_lora(model, Path(folder) / LORA)
        self.accelerator.wait_for_everyone()  # the folder has just been replaced: other ranks write to it from here on

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the callback makes the repository when it sends the first adapter."""

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Nothing: the callback sends the adapter, without the optimizer, once the checkpoint is whole."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any | None = None) -> None:
        model = self.accelerator.unwrap_model(model or self.model)
        load = fsdp.load_memory if is_shared(model) else load_memory_weights
        load(model, Path(resume_from_checkpoint) / WEIGHTS)
        if lora_layers(model):
            load_lora(model, Path(resume_from_checkpoint) / LORA)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.is_fsdp_enabled:  # the Trainer would write the base's weights as well
            fsdp.save_optimizer(self, output_dir)
        else:
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_best_model(self) -> None:
        if self.is_deepspeed_enabled:
            super()._load_best_model()
        else:  # the Trainer looks for a whole model, or for an adapter in a PeftModel
            best = Path(str(self.state.best_model_checkpoint)).name  # the folder may have moved since
            self._load_from_checkpoint(os.path.join(super()._get_output_dir(None), best))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write the checkpoint under another name first: a folder called ``checkpoint-N`` is a whole one."""
        home, name = Path(self._get_output_dir(trial)), f"checkpoint-{self.state.global_step}"
        self._draft = DRAFT
        draft = Path(self._get_output_dir(trial))
        try:
            super()._save_checkpoint(model, trial)
            best = home / f"checkpoint-{self.state.best_global_step}"
            if best.name == name or best.is_dir():  # the Trainer has looked for it among the drafts
                self.state.best_model_checkpoint = str(best)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self.state.save_to_json(str(draft / name / STATE))
                write_checksums(draft / name)
                shutil.rmtree(home / name, ignore_errors=True)
                os.replace(draft / name, home / name)
                if self.args.save_total_limit:
                    drop_oldest(home, self.args.save_total_limit, self.state.best_model_checkpoint)
        except (OSError, RuntimeError, RetrofitError) as error:
            cause = error.__cause__ if isinstance(error.__cause__, SafetensorError) else error
            reason = first_line(cause)
            if any(word in reason for word in TORCH_WRITER):  # with a file of torch's own source in it
                reason = "the disk or a quota is full"
            elif not isinstance(cause, OSError | SafetensorError):
                raise
            raise RetrofitError(
                f"the checkpoint of step {self.state.global_step} cannot be written to {home} ({reason}): "
                "the run stopped; make room there and continue with --resume from the checkpoint before"
            ) from error
        finally:
            self._draft = ""
            if self.args.should_save:
                shutil.rmtree(draft, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    def _get_output_dir(self, trial: Any) -> str:
        return os.path.join(super()._get_output_dir(trial), self._draft)


def _named(batch: Batch) -> str:
    """Which rows of the data a batch holds, where the data set tells."""
    if "row" not in batch:
        return ""
    return f", rows {', '.join(str(row) for row in sorted(batch['row'].tolist()))} of the training data"
