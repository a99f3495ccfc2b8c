"""The rows of every evaluation: the teacher, the window-only model, the memory, and any other adapters of that base."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patches.errors import RetrofitError
from retrofit.adapter import load_adapter
from retrofit.costs.held import kept_bytes
from retrofit.evaluation.baselines import equal_memory_window, narrowest_window, window_only
from retrofit.evaluation.scores import evaluating
from retrofit.evaluation.settings import EQUAL, TEACHER, WINDOW_ONLY
from retrofit.families import is_retrofit
from retrofit.loading import check_vocabulary, load_base, load_config, load_tokenizer
from retrofit.patching import patch


@dataclass(frozen=True)
class Contender:
    """One row: a name and a patched model; all rows share the base's storage.

    Attributes:
        teacher: the model is run with its memory off: the base itself, full attention.
    """

    name: str
    model: Any
    teacher: bool = False

    @property
    def window(self) -> int | None:
        """W, the narrowest where layers have windows of their own; None for the teacher."""
        return None if self.teacher else narrowest_window(self.model)


def contenders(memories: dict[str, Any]) -> list[Contender]:
    """Teacher, window-only at the narrowest window and at the window that costs as many bytes, then the memories.

    With several memories there is a window for each number of bytes, named after the first memory of so many.

    Args:
        memories: ``{name: patched model}`` on one base; at least one.
    """
    narrow = min(memories.values(), key=narrowest_window)
    bare = window_only(narrow)
    # a model of its own: its memory stays off for as long as the evaluation runs, whatever its caches hold
    teacher = Contender(TEACHER, window_only(narrow), teacher=True)
    named = [Contender(name, model) for name, model in memories.items() if model.config.memory["kind"] != "none"]
    windows = {equal_memory_window(row.model): row for row in reversed(named)}
    equal = [
        Contender(EQUAL if len(windows) == 1 else f"{EQUAL} as {row.name}", window_only(row.model, window))
        for window, row in reversed(windows.items())
        if kept_bytes(row.model)
    ]
    return [teacher, Contender(WINDOW_ONLY, bare), *equal, *named]


def load_contenders(
    path: str,
    adapters: Sequence[str] = (),
    *,
    window: int | None = None,
    sinks: int | None = None,
    dtype: str = "auto",
) -> tuple[list[Contender], Any]:
    """The rows for a checkpoint, and its tokenizer.

    Args:
        path: an exported retrofit, or a base together with ``adapters``, or a base with a window alone.
        adapters: folders or Hub ids; each becomes a row named after its folder.
        window, sinks: W and S of all rows, instead of the saved ones.
        dtype: of the base.

    Raises:
        RetrofitError: as the loaders; nothing to compare; two adapters of one name; W or S out of range.
    """
    config, tokenizer = load_config(path), load_tokenizer(path)
    check_vocabulary(tokenizer, config)
    base = load_base(path, dtype=dtype)
    base.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    memories: dict[str, Any] = {base.config.memory["kind"]: base} if is_retrofit(base) else {}
    for adapter in adapters:
        name = _name(adapter)
        if name in memories or name in (TEACHER, WINDOW_ONLY):
            raise RetrofitError(f"two rows would be called {name!r}: rename the folder of {adapter}")
        memories[name] = load_adapter(base, adapter).eval()
    if not memories:
        if window is None:
            raise RetrofitError(
                f"{path} has no memory to evaluate: give an exported retrofit, an --adapter, or a --window alone"
            )
        memories = {"none": patch(base, "none", window, sinks or 0)}
    for model in memories.values():
        if window is not None or sinks is not None:
            model.set_window(window=window or model.config.memory["window"], sinks=sinks)
    return contenders(memories), tokenizer


def identity(rows: Sequence[Contender], tokenizer: Any, seed: int = 0, longest: int = 8192) -> dict[str, bool]:
    """Whether each row's states equal the teacher's, bit for bit, on as many random tokens as it keeps exactly.

    Args:
        longest: tokens at most.

    Returns:
        ``{row: True or False}``, the teacher left out. LoRA beside a memory makes it False, as it should.
    """
    teacher, others = rows[0], rows[1:]
    found = {}
    with ready(rows):
        for row in others:
            budget = min(memory.capacity for memory in row.model.model.memories().values())
            vocabulary = plain_tokens(tokenizer, row.model.config.vocab_size)
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randint(len(vocabulary), (1, min(budget, longest)), generator=generator)
            ids = vocabulary[drawn].to(row.model.device)
            expected, got = (one.get_decoder()(ids, use_cache=False)[0] for one in (teacher.model, row.model))
            found[row.name] = torch.equal(expected, got)
    return found


def plain_tokens(tokenizer: Any, size: int) -> Tensor:
    """The ids below ``size`` that are none of the tokenizer's special ones."""
    ids = torch.arange(min(size, len(tokenizer)))
    return ids[~torch.isin(ids, torch.tensor(sorted(set(tokenizer.all_special_ids)), dtype=torch.long))]


@contextmanager
def ready(rows: Sequence[Contender]) -> Iterator[None]:
    """Every row in eval mode and the teacher's memory off inside the block; no gradients."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(evaluating(*(row.model for row in rows)))
        for row in rows:
            if row.teacher:
                stack.enter_context(row.model.memory_off())
        yield


def lossless(rows: Sequence[Contender]) -> int:
    """S + W of the narrowest window: what comes before it all rows compute alike."""
    return min(row.window + row.model.config.memory["sinks"] for row in rows if row.window is not None)


def _name(adapter: str) -> str:
    """``runs/first/adapter`` is called ``first``, ``user/name`` ``name``."""
    path = Path(adapter)
    return path.parent.name if path.name == "adapter" and path.parent.name else path.name
