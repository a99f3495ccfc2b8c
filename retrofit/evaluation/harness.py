"""lm-evaluation-harness on several rows of one base: its tasks, with the lengths and the chat template they need."""

from collections.abc import Iterable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patches.errors import RetrofitError, nearest
from retrofit.chat import check_template
from retrofit.evaluation.scores import evaluating, hidden_states
from retrofit.files import write_json
from retrofit.hub_errors import first_line
from retrofit.lm_head import log_probs
from retrofit.table import finite

# RULER's tasks there have a column for each of these lengths, and none for others
RULER_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
# tokens that RULER's lengths leave out: a chat template, and the beginning of the answer that a prompt ends with
ROOM = 512
# LongBench's tasks that go on from examples or code: a chat template spoils them, its authors say
PLAIN = (
    "longbench_trec",
    "longbench_triviaqa",
    "longbench_samsum",
    "longbench_lsht",
    "longbench_lcc",
    "longbench_repo",
)


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
        tasks: names, groups or tags of tasks, or paths of their YAML files.
        limit: so many documents of each task at most.
        max_length: tokens of a prompt and its answer, beyond which a prompt loses its beginning. None means the base's
            context; with RULER's tasks, what the longest of them needs.
        apply_chat_template: None means for RULER and LongBench, if the tokenizer has one. LongBench's few-shot and code
            tasks never get it.
        metadata: for the tasks: ``{"max_seq_lengths": [4096, 8192]}`` for RULER's.
        batch_size: documents per forward pass.
        include_path: a folder of further tasks.
        output: a JSON file, written anew after each model.

    Returns:
        ``{"settings": ..., "scores": [{"task", "metric", "chat", row: value, ...}, ...]}``.

    Raises:
        RetrofitError: the harness is not installed; an unknown task; lengths that RULER's tasks there do not have; data
            that cannot be had.
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
    lengths = list(details.get("max_seq_lengths", RULER_LENGTHS[:1]))
    _check_ruler(names, lengths)  # before the tasks are looked for, which takes seconds
    if apply_chat_template:
        check_template(tokenizer)
    manager = TaskManager(include_path=include_path, metadata=details)
    for name in names:
        if name not in manager.all_tasks and not Path(name).is_file():
            raise RetrofitError(f"the harness knows no task {name!r}{nearest(name, manager.all_tasks)}")
    loaded = _load(manager, names)
    _check_ruler(loaded, lengths)  # of a group or tag, too
    if max_length is None and any(map(_is_ruler, loaded)):
        max_length = max(lengths) + ROOM
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
            for template in (False, True):
                asked = [task for name, task in loaded.items() if chat[name] is template]
                if asked:
                    found = lm_eval.simple_evaluate(
                        model=harness,
                        tasks=asked,
                        task_manager=manager,
                        limit=limit,
                        apply_chat_template=template,
                        log_samples=False,
                    )
                    for task, metric, value in _values(found["results"]):
                        entry = scores.setdefault((task, metric), {"task": task, "metric": metric, "chat": template})
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


def _is_ruler(name: str) -> bool:
    return name.startswith(("niah_", "ruler"))


def _check_ruler(names: Iterable[str], lengths: list[int]) -> None:
    """Refuse lengths that RULER's tasks would be made for, in minutes, and then not be scored at."""
    wrong = [length for length in lengths if length not in RULER_LENGTHS]
    if wrong and any(map(_is_ruler, names)):
        raise RetrofitError(
            f"max_seq_lengths={wrong}: the harness has RULER at {', '.join(map(str, RULER_LENGTHS))} only: for "
            "other lengths use the built-in needle probes"
        )


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
    if wanted is None:
        return tokenizer.chat_template is not None and (_is_ruler(name) or name.startswith("longbench_"))
    return wanted


def _values(results: Mapping[str, Mapping[str, Any]]) -> Iterable[tuple[str, str, float]]:
    """(task, metric, value) of every figure; the harness writes ``"acc,none"`` for metric and filter."""
    for task, figures in results.items():
        for key, value in figures.items():
            metric, _, filtered = key.partition(",")
            # -1 stands for a length of RULER's that was not asked for
            if filtered and isinstance(value, int | float) and value != -1:
                yield task, metric if filtered == "none" else key, float(value)
