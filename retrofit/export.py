"""Exporting: a folder that ``AutoModelForCausalLM.from_pretrained`` loads, with code, weights, tokenizer and card."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .adapter import check_finite
from .card import model_card
from .files import write_folder, write_text
from .loading import check_tokenizer


def export_model(
    model: Any, path: str | Path, tokenizer: Any = None, *, overwrite: bool = False, details: str = ""
) -> None:
    """Write a patched model as a custom architecture to the folder ``path``.

    Args:
        model: a retrofitted model.
        path: folder to write; must be empty or new unless ``overwrite``.
        tokenizer: saved beside it, if given.
        overwrite: replace what is there.
        details: Markdown for the card: the data, the command and the figures of the run that made it.

    Raises:
        RetrofitError: the folder holds something else, a weight of the memory is not finite, or the tokenizer does not
            fit the model or would load as another one.
    """
    check_finite(model)
    if tokenizer is not None:
        check_tokenizer(tokenizer, model.config)
    with write_folder(path, overwrite) as draft:
        with _no_search_for_engines():
            model.save_pretrained(draft)
        if tokenizer is not None:
            tokenizer.save_pretrained(draft)
        write_text(draft / "README.md", model_card(model.config.memory, details))


@contextmanager
def _no_search_for_engines() -> Iterator[None]:
    """Keep accelerate from importing DeepSpeed, for seconds, only to learn that a model is no engine of its."""
    other: Any = sys.modules.get("accelerate.utils.other")
    if other is None or "deepspeed" in sys.modules:
        yield
        return
    before, other.is_deepspeed_available = other.is_deepspeed_available, lambda: False
    try:
        yield
    finally:
        other.is_deepspeed_available = before
