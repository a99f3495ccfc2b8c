"""lm-evaluation-harness on several rows of one base: its tasks, with the lengths and the chat template they need."""

from collections.abc import Iterable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patches.errors import RetrofitError, first_line, nearest
from retrofit.chat import check_template
from retrofit.evaluation.scores import evaluating, hidden_states
from retrofit.files import write_json
from retrofit.lm_head import log_probs
from retrofit.table import finite

TASKS = Path(__file__).parent / "tasks"  # ours, beside the harness's own
RULER_LENGTH = 4096  # of RULER's tasks, unless asked for otherwise
# tokens that RULER's lengths leave out: a chat template, and the beginning of the answer that a prompt ends with
ROOM = 512
# LongBench's tasks that go on from examples or code: a chat template spoils them, its authors say
PLAIN = tuple(f"longbench_{name}" for name in ("trec", "triviaqa", "samsum", "lsht", "lcc", "repo"))
TEMPLATED = ("niah_", "ruler", "longbench_", "infinitebench_", "lveval_")


def run_harness(
    models: Mapping[str, Any],
    tokenizer: Any,
    tasks: Iterable[str],
    *,
    limit: int | None = None,
    max_length: int | None = None,
    apply_chat_template: bool | None = None,
    metadata: Mapping[str, Any] | None = None,
    batch_size: int = 1,
    include_path: str | Path | None = None,
    output: str | Path | None = None,
) -> dict[str, Any]:
    """Put tasks of lm-evaluation-harness to every model; each task's data is made or fetched once.

    Args:
        models: ``{row: model}``, each as it is to be run: a teacher with its memory off.
        tokenizer: of their base.
        tasks: names, groups or tags of tasks, or paths of their YAML files. Those of retrofit/evaluation/tasks are
            there besides the harness's own.
        limit: so many documents of each task at most, of RULER's at each length.
        max_length: tokens of a prompt and its answer, beyond which a prompt loses its beginning. None means the base's
            context; with RULER's tasks, what the longest of them needs.
        apply_chat_template: None means for :data:`TEMPLATED`, if the tokenizer has one. LongBench's few-shot and code
            tasks never get it.
        metadata: for the tasks: ``{"max_seq_lengths": [4096, 8192]}`` for RULER's.
        batch_size: documents per forward pass.
        include_path: a folder of further tasks.
        output: a JSON file, written anew after each model.

    Returns:
        ``{"settings": ..., "scores": [{"task", "metric", "chat", row: value, ...}, ...]}``.

    Raises:
        RetrofitError: the harness is not installed; an unknown task; data that cannot be had.
    """
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise RetrofitError(
            f"lm-evaluation-harness is not usable here ({error}): pip install 'retrofit-lm[eval]'"
        ) from error
    names = list(tasks)
    details = {"tokenizer": tokenizer.name_or_path, **(metadata or {})}
    if apply_chat_template:
        check_template(tokenizer)
    folders = [TASKS] if include_path is None else [TASKS, include_path]
    manager = TaskManager(include_path=folders, metadata=details)
    for name in names:
        if name not in manager.all_tasks and not Path(name).is_file():
            raise RetrofitError(f"the harness knows no task {name!r}{nearest(name, manager.all_tasks)}")
    loaded = _load(manager, names)
    of_ruler = {name: task for name, task in loaded.items() if name.startswith(("niah_", "ruler_"))}
    for task in of_ruler.values() if limit else ():  # the harness's own limit counts over all lengths together
        task.dataset["test"] = task.dataset["test"].filter(lambda index: index < limit, input_columns="index")
    if max_length is None and of_ruler:
        max_length = max(details.get("max_seq_lengths", [RULER_LENGTH])) + ROOM
    chat = {name: _wants_chat(name, tokenizer, apply_chat_template) for name in loaded}

    settings = {
        "tasks": names,
        "limit": limit,
        "max_length": max_length,
        "apply_chat_template": apply_chat_template,
        "metadata": details,
        "batch_size": batch_size,
        "lm_eval": version("lm_eval"),
    }
    scores: dict[tuple[str, str], dict[str, Any]] = {}
    for row, model in models.items():
        with evaluating(model):
            harness = HFLM(
                pretrained=model, backend="causal", tokenizer=tokenizer, batch_size=batch_size, max_length=max_length
            )
            harness._model_call = partial(_logits, model)  # its own likelihoods are rounded to the model's dtype
            for name, task in loaded.items():
                found = lm_eval.simple_evaluate(
                    model=harness,
                    tasks=[task],
                    task_manager=manager,
                    limit=None if name in of_ruler else limit,
                    apply_chat_template=chat[name],
                    log_samples=False,
                )
                for metric, value in _values(found["results"][name]):
                    entry = scores.setdefault((name, metric), {"task": name, "metric": metric, "chat": chat[name]})
                    entry[row] = value
        summary = {"settings": settings, "scores": list(scores.values())}
        if output is not None:
            write_json(output, finite(summary))
    return summary


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> Tensor:
    """Log-probabilities (B, T, V) of texts (B, T), in float32 for a 16-bit model too: the harness asks for logits."""
    head, states = model.get_output_embeddings(), hidden_states(model, {"input_ids": ids})
    return log_probs(states.flatten(0, 1), head.weight, head.bias).unflatten(0, ids.shape)


def _load(manager: Any, names: list[str]) -> dict[str, Any]:
    """``{name: task}`` of all tasks that ``names`` stand for."""
    try:
        return dict(manager.load(names)["tasks"])
    except ImportError as error:
        raise RetrofitError(
            f"the tasks {', '.join(names)} need more packages ({error}): pip install 'retrofit-lm[eval]'"
        ) from error
    except Exception as error:  # no network, no such dataset, a YAML file with a mistake
        raise RetrofitError(f"the tasks {', '.join(names)} cannot be loaded: {first_line(error)}") from error


def _wants_chat(name: str, tokenizer: Any, wanted: bool | None) -> bool:
    if name.startswith(PLAIN):
        return False
    return tokenizer.chat_template is not None and name.startswith(TEMPLATED) if wanted is None else wanted


def _values(figures: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """(metric, value) of every figure of a task; the harness writes ``"acc,none"`` for metric and filter."""
    for key, value in figures.items():
        metric, _, filtered = key.partition(",")
        # -1 stands for a length of RULER's that was not asked for
        if filtered and isinstance(value, int | float) and value != -1:
            yield metric if filtered == "none" else key, float(value)
