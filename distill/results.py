"""How good a run's memory is on held-out rows, compared with its teacher and with windows without a memory."""

from typing import Any

import torch
from rich.console import Console

from distill.config import DistillConfig
from distill.data.split import Split
from distill.parallel.processes import Processes
from distill.parallel.zero import window_only
from distill.progress import progress_bar
from retrofit.costs.held import kept_bytes
from retrofit.evaluation.baselines import equal_memory_window, narrowest_window
from retrofit.evaluation.scores import Scores, evaluate
from retrofit.table import markdown

COLUMNS = {
    "name": ("", ""),
    "window": ("window", "d"),
    "kl": ("KL to teacher", ".4f"),
    "kl_gap_closed": ("KL gap closed", ".1%"),
    "nll": ("NLL", ".4f"),
    "kept_bytes": ("bytes beside the window", ",d"),
    "seconds": ("seconds", ".0f"),
}


ALONE = Processes()


def compare(
    model: Any,
    recipe: DistillConfig,
    split: Split,
    fitted_in: float,
    console: Console | None = None,
    processes: Processes = ALONE,
) -> list[dict[str, Any]]:
    """Score the model, its teacher and its two baselines on the same positions, those past its own window.

    Args:
        model: the fitted model, at the recipe's window.
        fitted_in: seconds its training took.
        processes: each scores its share of the rows, and all get the same table.

    Returns:
        One row each for the teacher, the window-only model, the window-only model whose window costs as many bytes as
        window and memory together, and the memory: ``name``, ``window``, ``kl`` and ``nll`` (nats, means),
        ``kl_gap_closed``, ``kept_bytes`` (what a sequence keeps in one layer besides the sinks and as many
        tokens as the narrowest window has) and ``seconds`` of fitting.
    """
    wide, narrow = equal_memory_window(model), narrowest_window(model)
    models = {  # name: model, window, seconds
        "window-only": (window_only(model), narrow, 0.0),
        "window-only, equal memory": (window_only(model, wide), wide, 0.0),
        recipe.memory: (model, narrow, fitted_in),
    }
    sequences, labels = split.held_out.select(slice(recipe.eval_rows)).batch()
    # as many for each process, since ZeRO-3's weights are gathered by all at once; what is too much is cut off again
    count, share = len(sequences), -(-len(sequences) // processes.count)
    mine = [(processes.rank + processes.count * index) % count for index in range(share)]
    with progress_bar("scoring held-out rows", share, console=console) as bar:
        scores = evaluate(
            {name: one for name, (one, *_) in models.items()},
            sequences[mine],
            start=narrow + recipe.sinks,
            labels=None if labels is None else labels[mine],
            batch_size=recipe.per_device_train_batch_size,
            chunk=recipe.segment,
            on_batch=lambda done, _: bar.update(done, tokens=round(split.row_tokens * processes.count)),
        )
    shares = processes.all_of(scores)
    scores = {name: _together([each[name] for each in shares], count) for name in scores}
    rows = []
    for name, score in scores.items():
        one, window, seconds = models.get(name, (None, None, None))  # the teacher has none of them
        kept = None if one is None else kept_bytes(one, narrow)
        measured = {"name": name, "window": window, **score.figures(scores["window-only"])}
        rows.append({**measured, "kept_bytes": kept, "seconds": seconds})
    return rows


def _together(shares: list[Scores], count: int) -> Scores:
    """The scores of ``count`` rows from those of each process: process r of n scored rows r, r + n and so on."""

    def rows(part: str) -> torch.Tensor:
        return torch.stack([getattr(each, part) for each in shares], 1).flatten(0, 1)[:count]  # (N, P)

    return Scores(rows("nll"), rows("kl"), rows("correct"), shares[0].start, rows("scored"))


def layer_errors(curve: list[dict[str, Any]]) -> dict[str, float]:
    """By layer, the last held-out squared error of a run with local steps, as a share of that of the window alone."""
    key = "eval_layer_error_"
    last: dict[str, Any] = next((entry for entry in reversed(curve) if "eval_layer_error" in entry), {})
    return {name.removeprefix(key): value for name, value in last.items() if name.startswith(key)}


def title(recipe: DistillConfig, split: Split) -> str:
    """What the table's figures were measured on."""
    count = min(recipe.eval_rows, len(split.held_out))
    what = f"rows of {recipe.max_length} tokens,"
    if split.collator is not None:
        what = f"{split.unit} of at most {recipe.max_length} tokens, {split.learned}"
    return f"{count} held-out {what} past the window; bytes of one layer"


def card_details(recipe: DistillConfig, split: Split, rows: list[dict[str, Any]], command: str) -> str:
    """The run in Markdown, for the model cards: data, command, figures."""
    return "\n".join(
        [
            "## How it was made",
            "",
            f"{recipe.max_steps} steps on `{recipe.data}`, {split.held_out_part} held out:",
            "",
            "```",
            command,
            "```",
            "",
            "On held-out rows, at positions past the window:",
            "",
            markdown(rows, COLUMNS),
        ]
    )
