"""Exporting: a folder that ``AutoModelForCausalLM.from_pretrained`` loads, with code, weights, tokenizer and card."""

from pathlib import Path
from typing import Any

from .adapter import check_finite
from .card import model_card
from .files import write_folder, write_text


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
        RetrofitError: the folder holds something else, or a weight of the memory is not finite.
    """
    check_finite(model)
    with write_folder(path, overwrite) as draft:
        model.save_pretrained(draft)
        if tokenizer is not None:
            tokenizer.save_pretrained(draft)
        write_text(draft / "README.md", model_card(model.config.memory, details))
