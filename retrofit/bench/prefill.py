"""`retrofit bench prefill`: how long a patched model takes to read a prompt, beside `none` and full attention."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import retrofit
from patches.errors import RetrofitError
from retrofit.bench.decode import VOCABULARY, check_hidden, named_kinds, random_base
from retrofit.bench.timing import interleaved, ratios, spread

FULL = "full attention"
COLUMNS = {
    "name": ("", ""),
    "length": ("tokens", ",d"),
    "seconds": ("seconds", ".3f"),
    "seconds_low": ("quartile", ".3f"),
    "seconds_high": ("quartile", ".3f"),
    "to_none": ("x none", ".2f"),
    "to_half": ("x half the length", ".2f"),
}


@dataclass(frozen=True)
class Case:
    """A random Qwen2 of this shape, memories (or ``"all"``), and prompts from ``length``, doubled up to ``longest``."""

    memories: tuple[str, ...] = ("all",)
    window: int = 512
    sinks: int = 4
    layers: int = 4
    hidden: int = 256
    length: int = 8192
    longest: int = 8192

    def __post_init__(self) -> None:
        if not self.window + self.sinks < self.length <= self.longest:
            exact = self.window + self.sinks
            raise RetrofitError(f"prompts of {self.length} to {self.longest} tokens: both must be longer than {exact}")
        check_hidden(self.hidden)
        named_kinds(self.memories)


def run(case: Case, repeats: int = 3) -> list[dict[str, Any]]:
    """Seconds of one forward pass over the prompt without a cache to keep, ``repeats`` interleaved rounds.

    One more round, at the first length, comes before and is not counted.

    Returns:
        For full attention and each memory a row per length with ``seconds`` (median; ``_low``, ``_high``), ``to_none``
        and, from the second length on, ``to_half``: medians of the rounds' ratios.
    """
    base = random_base(case.layers, case.hidden, case.longest)
    models = {FULL: base} | {
        kind: retrofit.patch(base, kind, case.window, case.sinks) for kind in named_kinds(case.memories)
    }
    rows: list[dict[str, Any]] = []
    before: dict[str, list[float]] = {}
    length = case.length
    while length <= case.longest:
        seconds = interleaved({name: _reader(model, length) for name, model in models.items()}, repeats, not before)
        for name in models:
            row: dict[str, Any] = {"name": name, "length": length, **spread("seconds", seconds[name])}
            row["to_none"] = spread("x", ratios(seconds[name], seconds["none"]))["x"]
            row["to_half"] = spread("x", ratios(seconds[name], before[name]))["x"] if before else None
            rows.append(row)
        before, length = seconds, 2 * length
    return sorted(rows, key=lambda row: list(models).index(row["name"]))


def _reader(model: Any, length: int) -> Callable[[], None]:
    ids = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))

    def read() -> None:
        with torch.no_grad():
            model(ids, use_cache=False, logits_to_keep=1)

    return read
