"""Around the steps of a run: checks of its numbers, the log file, the progress line, and stopping on a signal."""

import json
import math
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState

from distill.parallel.processes import any_of, wait_for_all
from distill.progress import Bar, peak_bytes
from patches.errors import RetrofitError
from retrofit.files import write_text
from retrofit.hub import push_folder
from retrofit.lm_head import gathered

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class FiniteOnly(TrainerCallback):
    """Stops the run of ``trainer``, a :class:`distill.trainer.DistillTrainer`, at a NaN or an infinite number."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look at the gradients before they are applied; DeepSpeed has applied them in its backward pass.

        Raises:
            RetrofitError: one is not finite; the step is named.
        """
        if self.trainer.is_deepspeed_enabled:
            norm = self.trainer.deepspeed.get_global_grad_norm()
            finite = norm is None or 0 <= float(norm) < math.inf  # DeepSpeed says -1 where there is none
        else:
            gradients = [parameter.grad for parameter in self._trained() if parameter.grad is not None]
            if self.trainer.is_fsdp_enabled:  # each process has a part of each
                gradients = [gradient.to_local() for gradient in gradients]
            finite = bool(torch.stack([gradient.isfinite().all() for gradient in gradients]).all())
            if self.trainer.is_fsdp_enabled:
                finite = not any_of(not finite, args.device)
        if not finite:
            raise RetrofitError(
                f"the gradient is not finite at step {state.global_step + 1}: the run stopped and saved nothing of "
                "this step; start again with a smaller learning rate, or look at the data it had reached"
            )

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look at the weights after the last step, and before each checkpoint and evaluation.

        Raises:
            RetrofitError: one is not finite; the step is named.
        """
        if not (control.should_save or control.should_evaluate or control.should_training_stop):
            return  # the loss of the next step would show it
        with gathered(self._model().model.memories().values()):
            finite = all(parameter.isfinite().all() for parameter in self._trained())
        if not finite:
            raise RetrofitError(
                f"the memory's weights are not finite after step {state.global_step}: the run stopped and saved "
                "nothing of this step; start again with a smaller learning rate"
            )

    def _trained(self) -> list[Any]:
        """The memory's parameters, and LoRA's."""
        return [parameter for parameter in self._model().parameters() if parameter.requires_grad]

    def _model(self) -> Any:
        return self.trainer.accelerator.unwrap_model(self.trainer.model)


class Patience(EarlyStoppingCallback):
    """Stops after so many evaluations without a smaller held-out KL; a resumed run counts those before it, too."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the evaluations since the best one."""
        super().on_train_begin(args, state, control, **kwargs)
        self.early_stopping_patience_counter = self.waited(state)

    @staticmethod
    def waited(state: TrainerState) -> int:
        """Evaluations since the one with the smallest KL."""
        kls = [entry["eval_kl"] for entry in state.log_history if "eval_kl" in entry]
        return len(kls) - 1 - kls.index(min(kls)) if kls else 0

    @classmethod
    def over(cls, recipe: Any, state: TrainerState) -> bool:
        """Whether the run of ``recipe`` has stopped in ``state``."""
        return recipe.patience is not None and cls.waited(state) >= recipe.patience


class PushAdapter(TrainerCallback):
    """Sends the adapter of each checkpoint to the Hub; a Hub that fails does not stop the run."""

    def __init__(self, args: Any, console: Console | None = None) -> None:
        """``args``: those of the trainer."""
        self.repo = args.hub_model_id or Path(args.output_dir).resolve().name
        self.how = {"private": args.hub_private_repo, "revision": args.hub_revision, "token": args.hub_token}
        self.console = console or Console(stderr=True)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """From the main process; the others wait, because in the next step it would seem to hang."""
        if state.is_world_process_zero:
            self.push(Path(args.output_dir) / f"checkpoint-{state.global_step}", f"Step {state.global_step}")
        wait_for_all()

    def push(self, folder: Path, message: str) -> None:
        """Send an adapter, or say why it was not sent."""
        try:
            push_folder(folder, self.repo, message=message, **self.how)
        except RetrofitError as error:
            self.console.print(f"{folder} was not pushed: {error}", highlight=False, soft_wrap=True)


class EndOfStage(TrainerCallback):
    """Logs and evaluates after the last local step and after the last step of all."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """Ask the trainer for it."""
        if state.global_step in (args.local_steps, state.max_steps):
            control.should_log = True
            control.should_evaluate = control.should_evaluate or args.eval_strategy != "no"
        return control


class StopOnSignal(TrainerCallback):
    """Turns the first SIGINT or SIGTERM into a checkpoint and the end of the run, after the step that is running.

    Use it as a context manager too. A second signal stops at once. A signal reaches the processes of a run in different
    steps, or only some of them: they agree at the end of each step.

    Attributes:
        received: whether this process was asked to stop.
        stopped: whether the run stops, because some process was asked to.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.received = self.stopped = False
        self._handlers: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> "StopOnSignal":
        self._handlers = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """Ask the trainer to save and stop, once a signal has come."""
        self.stopped = any_of(self.received, args.device)
        if self.stopped:
            control.should_save = control.should_training_stop = True
        return control

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a process that reads rows ahead: who trains will end it
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.received = True
        self._restore()
        self.console.print("The run stops after this step and writes a checkpoint. Press Ctrl-C again to stop at once.")

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


class ShowProgress(TrainerCallback):
    """Shows what the trainer logs in a :class:`distill.progress.Bar`."""

    def __init__(self, bar: Bar, step_tokens: float) -> None:
        """``step_tokens``: of a step, on average."""
        self.bar, self.step_tokens = bar, round(step_tokens)
        self.notes: dict[str, str] = {}

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Show the last loss, memory and, once there was an evaluation, the held-out share of the gap closed."""
        if "loss" in logs:
            self.notes["kl"] = f"KL {logs['loss']:.4f}"
        if "local_loss" in logs:
            self.notes["kl"] = f"layer by layer {logs['local_loss']:.0%} of the window's error"
        if "eval_kl_gap_closed" in logs:
            self.notes["gap"] = f"held out {logs['eval_kl']:.4f} ({logs['eval_kl_gap_closed']:.0%} closed)"
        notes = [*self.notes.values(), f"{peak_bytes() / 2**30:.1f} GiB"]
        self.bar.update(state.global_step, ", ".join(notes), self.step_tokens)


class RunLog(TrainerCallback):
    """Appends everything logged to a JSONL file, with the seconds of training so far and the peak of memory in bytes.

    The trainer's state holds the same entries, so that a resumed run first drops those after its checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._began = self._before = 0.0
        self._written = 0  # entries

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the clock, where the history in the trainer's state ends."""
        self._began, self._before = time.perf_counter(), seconds(state)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Write one line; with the first one, what came before it."""
        state.log_history[-1]["memory_bytes"] = peak_bytes()
        state.log_history[-1]["seconds"] = self._before + time.perf_counter() - self._began
        if state.is_world_process_zero:
            lines = "".join(json.dumps(entry) + "\n" for entry in state.log_history[self._written :])
            if self._written:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(lines)
            else:
                write_text(self.path, lines)
            self._written = len(state.log_history)


def seconds(state: TrainerState) -> float:
    """Seconds a run has trained for, without interruptions."""
    return state.log_history[-1]["seconds"] if state.log_history else 0.0
