"""Learning rates of a run in two stages: the local steps and the others each warm up and decay on their own."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from distill.config import DistillConfig
from patches.errors import RetrofitError


def in_stages(args: DistillConfig, optimizer: Any, steps: int) -> LambdaLR:
    """A schedule for ``steps`` steps, of which the first ``args.local_steps`` go up to ``args.local_learning_rate``.

    Raises:
        RetrofitError: there are fewer steps, or ``args.lr_scheduler_type`` depends on more than the step's number.
    """
    local = args.local_steps
    if local > steps:
        raise RetrofitError(f"local_steps={local}: the run has only {steps} steps: set more steps or fewer local ones")
    first = _factor(args, local, args.learning_rate if args.local_learning_rate is None else args.local_learning_rate)
    second = _factor(args, steps - local, args.learning_rate)
    height = 1.0 if args.local_learning_rate is None else args.local_learning_rate / args.learning_rate
    return LambdaLR(optimizer, lambda step: height * first(step) if step < local else second(step - local))


def _factor(args: DistillConfig, steps: int, peak: float) -> Callable[[int], float]:
    """The learning rate at each of ``steps`` steps, as a share of its ``peak``."""
    schedule = get_scheduler(
        args.lr_scheduler_type,
        SGD([torch.zeros(1)], lr=peak),
        num_warmup_steps=args.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
    if not isinstance(schedule, LambdaLR):
        name = SchedulerType(args.lr_scheduler_type).value
        raise RetrofitError(f"lr_scheduler_type={name!r} does not work with local steps: use 'cosine' or 'linear'")
    (factor,) = schedule.lr_lambdas
    return factor
