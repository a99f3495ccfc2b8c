"""The trainer: transformers' own, with the model's full-attention self as teacher and only the memory trained."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainerControl

from distill.arguments import DistillArguments
from distill.checkpoint import drop_oldest
from distill.loss import chunked_kl, scored_positions
from distill.windows import check_draws, draw_window
from patches.errors import RetrofitError
from retrofit.adapter import WEIGHTS, load_memory_weights, save_adapter
from retrofit.baselines import window_only
from retrofit.evaluate import gap_closed
from retrofit.families import is_retrofit

Batch = dict[str, Tensor]


class DistillTrainer(Trainer):
    """Fits a retrofitted model's memory to its own base with full attention.

    One copy of the weights serves both: the teacher is the module with its memory off. Rows of a dataset hold
    ``input_ids`` and ``labels`` (-100 where nothing is to be learned), right-padded with an ``attention_mask`` if they
    differ in length. Checkpoints hold the memory, the optimizer, the schedule and the random state, never the base.

    Args:
        model: a model of :func:`retrofit.patch`.
        args: :class:`DistillArguments`.
        train_dataset, eval_dataset, data_collator, callbacks: as for ``transformers.Trainer``.

    Raises:
        RetrofitError: the model has no memory to train, or one that cannot work with the windows to be drawn; while
            training, a loss that is NaN or infinite.
    """

    args: DistillArguments
    control: TrainerControl

    def __init__(
        self,
        model: Any,
        args: DistillArguments,
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
        if args.window_sampling == "ahn":
            check_draws(model)
        use_cache = model.config.use_cache
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
        # our loss is divided by the positions of the whole accumulated batch, so it must not be divided again
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self.window: tuple[int, int] = (model.config.memory["window"], model.config.memory["sinks"])  # W, S
        self._step_window = self.window
        self._draft = ""  # subfolder of the output folder in which a checkpoint is being written
        self._window_only_kl: dict[str, float] = {}

    # ---- the loss ----

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: Any) -> tuple[list[Batch], Any]:
        """The micro-batches of the next optimizer step, and how many positions they score on all ranks.

        Draws the step's window too, since the count depends on it.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if any("labels" not in batch for batch in batches):
            raise RetrofitError("rows need 'labels' beside 'input_ids': the same ids, -100 where nothing is learned")
        self._step_window = self.window
        if self.args.window_sampling == "ahn" and batches:
            longest = torch.tensor([max(batch["input_ids"].shape[1] for batch in batches)], device=device)
            length = int(self.accelerator.gather(longest).max())  # rows may be padded to another length elsewhere
            self._step_window = draw_window(self.args.seed, self.state.global_step, length)
        count = sum(self._scored(batch["labels"], self._step_window).sum() for batch in batches)
        return batches, self.accelerator.reduce(torch.as_tensor(count, device=device), reduction="sum")

    def training_step(self, model: Any, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        # around the backward pass too: gradient checkpointing runs the forward again there
        with self._windowed(self._step_window):
            return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """KL(teacher || student), the mean over the scored positions of the whole accumulated, distributed batch."""
        total, count = self._kl_sum(model, inputs, self._step_window)
        if num_items_in_batch is not None:
            # data parallelism averages gradients over ranks: undo it, the count is already that of all ranks
            total, count = total * self.accelerator.num_processes, num_items_in_batch
        loss = total / count.clamp(min=1)  # a batch without a scored position contributes zero
        if not loss.isfinite():
            raise RetrofitError(
                f"the loss is {loss.item()} at step {self.state.global_step + 1}: the run stopped before this step was "
                "applied; start again with a smaller learning rate, or look at the data it had reached"
            )
        return (loss, {}) if return_outputs else loss

    def _kl_sum(self, student: Any, inputs: Batch, window: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Sum of KL(teacher || student) over the batch's scored positions, and their number."""
        scored = self._scored(inputs["labels"], window)
        tokens: Batch = {key: inputs[key] for key in ("input_ids", "attention_mask") if key in inputs}
        model = self.accelerator.unwrap_model(student)
        teacher = self._teacher(model, tokens)[scored]  # (P, E)
        states = _hidden(student, model.get_decoder(), tokens)[scored]  # (P, E)
        head = model.get_output_embeddings()
        loss = chunked_kl(states, teacher, head.weight, head.bias, temperature=self.args.temperature)
        return loss, scored.sum()

    def _teacher(self, model: Any, tokens: Batch) -> Tensor:
        """(B, T, E) hidden states of the base with full attention, through the unwrapped module: nothing to reduce."""
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad(), model.memory_off():
                return model.get_decoder()(**tokens, use_cache=False).last_hidden_state
        finally:
            model.train(was_training)

    def _scored(self, labels: Tensor, window: tuple[int, int]) -> Tensor:
        return scored_positions(labels, sum(window), self.args.label_shift)

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
            ``{prefix}_kl``, ``{prefix}_kl_window_only`` (nats) and ``{prefix}_kl_gap_closed`` (1 is the teacher).
        """
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, dict):
            parts = {
                name: self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}") for name, part in data.items()
            }
            return {key: value for part in parts.values() for key, value in part.items()}
        if metric_key_prefix not in self._window_only_kl:
            bare = window_only(self.accelerator.unwrap_model(self.model))
            self._window_only_kl[metric_key_prefix] = self._mean_kl(bare, data)
        reference = self._window_only_kl[metric_key_prefix]
        kl = self._mean_kl(self.accelerator.unwrap_model(self.model), data)
        metrics = {"kl": kl, "kl_window_only": reference, "kl_gap_closed": gap_closed(kl, reference)}
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _mean_kl(self, model: Any, data: Dataset | None) -> float:
        """KL to the teacher over every scored position of ``data`` on all ranks, nats."""
        sums = torch.zeros(2, device=self.args.device)
        was_training = model.training
        model.eval()
        with torch.no_grad():
            for batch in self.get_eval_dataloader(data):
                sums += torch.stack(self._kl_sum(model, self._prepare_inputs(batch), self.window))
        model.train(was_training)
        total, count = self.accelerator.reduce(sums, reduction="sum").tolist()
        return total / max(count, 1)

    # ---- checkpoints ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the memory to ``output_dir``, as an adapter."""
        if self.args.should_save:
            folder = output_dir or self._get_output_dir(trial=None)
            save_adapter(self.accelerator.unwrap_model(self.model), folder, overwrite=True)
        self.accelerator.wait_for_everyone()  # the folder has just been replaced: other ranks write to it from here on

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any | None = None) -> None:
        load_memory_weights(self.accelerator.unwrap_model(model or self.model), Path(resume_from_checkpoint) / WEIGHTS)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write the checkpoint under another name first: a folder called ``checkpoint-N`` is a whole one."""
        home, name = Path(self._get_output_dir(trial)), f"checkpoint-{self.state.global_step}"
        self._draft = ".saving"
        draft = Path(self._get_output_dir(trial))
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                shutil.rmtree(home / name, ignore_errors=True)
                os.replace(draft / name, home / name)
                if self.args.save_total_limit:
                    drop_oldest(home, keep=self.args.save_total_limit)
        finally:
            self._draft = ""
            if self.args.should_save:
                shutil.rmtree(draft, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    def _get_output_dir(self, trial: Any) -> str:
        return os.path.join(super()._get_output_dir(trial), self._draft)


def _hidden(model: Any, decoder: Any, tokens: Batch) -> Tensor:
    """(B, T, E) last hidden states of a causal LM that may be wrapped (DDP, DeepSpeed), without its T x V logits.

    The wrapper must run the whole model, so the states are taken on their way to the head, which sees one position.
    """
    taken: list[Tensor] = []
    handle = decoder.register_forward_hook(lambda _module, _args, output: taken.append(output.last_hidden_state))
    try:
        model(**tokens, use_cache=False, logits_to_keep=1)
    finally:
        handle.remove()
    return taken[0]
