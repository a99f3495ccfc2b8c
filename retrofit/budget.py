"""A budget in bytes: the window, the bits and the entries of each head that leave a model nearest to its base.

What a window, a number of bits and entries by need are worth is measured on texts. For each window and coding that the
bytes allow, entries are divided among the heads (:mod:`retrofit.needs`), which says how much the heads lose in all;
whole models of the few best are then compared with full attention by their KL.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from patches.config import MemoryConfig
from patches.errors import RetrofitError
from patches.kinds import build_memory, new_memory
from patches.options import read_bytes, whole_number

from .calibration import check_texts, measure, observe, repeat_beginnings, weigh_layers
from .costs.held import cache_parts, layer_memories, row_bytes
from .evaluation.scores import evaluate
from .needs import TIMES, Needs
from .patching import patch

WINDOWS = tuple(2**power for power in range(2, 20))
WIDEST, NARROWEST = 0.7, 0.08  # parts of the bytes that sinks and window may take
BITS: tuple[Any, ...] = ([2, 2.5], [2.5, 3], [3, 3.5], [3.5, 4.5], [4.5, 5.5], [6, 7], 16)  # of keys and values
USUAL_BITS = 2  # the place in BITS of those in which windows are compared
COMPARED = 3  # texts that are read for each candidate
COLUMNS = {
    "chosen": ("", ""),
    "window": ("window", "d"),
    "key_bits": ("bits of a key", "g"),
    "value_bits": ("of a value", "g"),
    "entries": ("entries per head", ",.0f"),
    "bytes": ("bytes per layer", ",.0f"),
    "loss": ("error of the heads", ".4g"),
    "kl": ("KL to the base", ".4f"),
}
BEST = 3  # that are compared as whole models


def read_budget(
    budget: int | str,
    config: Any,
    dtype: torch.dtype,
    *,
    context: int | None = None,
    batch: int | None = None,
    layers: list[int] | None = None,
    others: str = "full",
) -> int:
    """Bytes that one sequence may keep in each layer that has the memory, from what a user writes.

    Args:
        budget: ``"64KiB"``, or a number of bytes: of such a layer, for one sequence. With ``context`` or ``batch``, of
            all layers and sequences: ``"2GiB"``. ``"5%"``: as large a part of the full cache of ``context`` tokens.
        config: of the base.
        dtype: of the base's cache.
        context: tokens of the longest input; by default as many as the base's positions were made for.
        batch: sequences at once; by default one.
        layers, others: as :func:`retrofit.patch` has them.

    Raises:
        RetrofitError: not understood, not above 0, less than the other layers take, or as much as the full cache.
    """
    for name, value in (("context", context), ("batch", batch)):
        if value is not None:
            whole_number(name, value)
    part = re.fullmatch(r"(\d+\.?\d*)\s*%", str(budget).strip())
    if part is None and context is None and batch is None:
        return read_bytes(budget)
    length = context or getattr(config, "max_position_embeddings", None)
    if length is None:
        raise RetrofitError("this base does not say how long its inputs may be: give the longest one's tokens, context")
    settings = MemoryConfig("none", 1, layers=layers, others=others)
    patched = settings.patched_layers(config)
    full = length * row_bytes(config, dtype)
    memories = enumerate(layer_memories(config, settings))
    apart = sum(cache_parts(config, memory, length, dtype)[0] for index, memory in memories if index not in patched)
    total = (
        float(part[1]) / 100 * full * len(patched) if part is not None else read_bytes(budget) / (batch or 1) - apart
    )
    size = int(total / len(patched))
    if size < 1:
        raise RetrofitError(
            f"budget={budget!r} holds nothing beside the layers that keep their own attention: give more"
        )
    if size >= full:
        raise RetrofitError(
            f"budget={budget!r} holds the full cache of {length:,} tokens, {full:,} bytes in each layer, so nothing "
            "needs to be left out: give less, or a longer context"
        )
    return size


def text_length(config: Any, size: int, dtype: torch.dtype, context: int | None) -> int:
    """Tokens of a text that shows what so many bytes per layer cannot keep."""
    with torch.device("meta"):
        memory: Any = build_memory(config, new_memory("expected", 1, 0, options={"bits": BITS[USUAL_BITS]}))
    wanted = TIMES * size // (memory.kv_heads * memory.entry_bytes(dtype))  # as if all bytes were entries
    return max(1, min(wanted, context or wanted))


def fit_budget(
    base: Any,
    texts: Iterable[Tensor],
    size: int,
    *,
    sinks: int = 4,
    window: int | None = None,
    bits: Any = None,
    context: int | None = None,
    dtype: torch.dtype | None = None,
    repeat: bool = True,
    say: Callable[[str], None] = lambda _: None,
    **settings: Any,
) -> tuple[Any, list[dict[str, Any]]]:
    """``base`` with the ``expected`` memory of at most ``size`` bytes per layer that loses least on ``texts``.

    Args:
        base: a loaded base.
        texts: token ids ``(B, T)`` each, see :func:`retrofit.calibrate`.
        size: bytes that one sequence keeps in a layer on average: sinks, window and entries.
        sinks: S.
        window, bits: taken as they are instead of measured.
        context: tokens of the longest input, if that is known.
        dtype: of the cache whose bytes are counted; by default the base's.
        repeat: as :func:`retrofit.calibrate` has it.
        say: called with what is being done.
        **settings: other arguments of :func:`retrofit.patch`.

    Returns:
        The calibrated model; and what it was chosen from: ``window``, ``bits``, ``entries`` of a head on average,
        ``bytes`` of a layer, ``loss`` of its heads by themselves, and, of the best, ``kl`` to the base in nats.

    Raises:
        RetrofitError: the bytes hold no window and entries; texts that are too short; as :func:`retrofit.patch`.
    """
    dtype = dtype or base.dtype
    texts = check_texts(texts, base.config.vocab_size)
    scale = min(1.0, min(ids.shape[1] for ids in texts) / text_length(base.config, size, dtype, context))
    some = texts[:: -(-len(texts) // COMPARED)]
    row = row_bytes(base.config, dtype)
    windows = [window] if window is not None else [one for one in WINDOWS if (one + sinks) * row <= WIDEST * size]
    windows = [one for one in windows if (one + sinks) * row >= NARROWEST * size] or windows[-1:]
    costs: dict[int, Tensor] = {}
    tried: list[tuple[float, Any, Needs]] = []

    def try_all(pairs: Iterable[tuple[int, Any]]) -> None:
        how = {"rows": 1, "shares": "need", **settings}
        models = [patch(base, "expected", window, sinks, bits=bits, **how).eval() for window, bits in pairs]
        models = [model for model in models if _fill(model, size, dtype)]
        if not models:
            return
        costs.update({} if costs else weigh_layers(models[0]))
        needs = [Needs(model, costs, some, scale) for model in models]
        observe(models, some, costs)
        measure(needs, repeat_beginnings(some) if repeat else some)
        tried.extend((one.give(), one.model, one) for one in needs)
        tried.sort(key=lambda one: one[0])

    say(f"comparing windows of {', '.join(map(str, windows))} tokens")
    try_all((one, BITS[USUAL_BITS] if bits is None else bits) for one in windows)
    if not tried:
        least = 2 * ((windows or WINDOWS)[0] + sinks) * row
        raise RetrofitError(f"{size:,} bytes per layer hold no window and entries beside it: give {least:,} or more")
    if bits is None:
        say("comparing bits")
        _, model, _ = tried[0]
        best, low, high = model.model.config.memory["window"], USUAL_BITS - 1, USUAL_BITS + 1
        try_all((best, BITS[at]) for at in (low, high))
        # further the same way as long as that is better
        for at, further in ((low, -1), (high, 1)):
            while 0 <= at + further < len(BITS) and tried[0][1].config.memory["options"]["bits"] == BITS[at]:
                at += further
                try_all([(best, BITS[at])])
    say(f"comparing the best {min(BEST, len(tried))} with full attention")
    kls = _compare([needs for _, _, needs in tried[:BEST]], some)
    found = [_describe(model, loss, dtype) for loss, model, _ in tried]
    for line, kl in zip(found, kls, strict=False):
        line["kl"] = kl
    at = min(range(len(kls)), key=lambda index: kls[index])
    found[at]["chosen"] = "*"
    model = tried[at][1]
    if len(some) < len(texts):
        say("calibrating on all texts")
        observe([model], texts, costs)
        needs = Needs(model, costs, texts, scale)
        measure([needs], repeat_beginnings(texts) if repeat else texts)
        needs.give()
    return model, found


def _fill(model: Any, size: int, dtype: torch.dtype) -> bool:
    """Give each head as many entries as the others, as ``size`` bytes per layer hold them; False if they hold none."""
    memories = model.model.memories()
    windows = sum(memory.capacity for memory in memories.values()) * row_bytes(model.config, dtype)
    total = (size * len(memories) - windows) // next(iter(memories.values())).entry_bytes(dtype)
    heads = [(index, head) for index, memory in memories.items() for head in range(memory.kv_heads)]
    if total < 1:
        return False
    rows: dict[int, list[int]] = {index: [] for index in memories}
    for at, (index, _) in enumerate(heads):
        rows[index].append(total // len(heads) + (at < total % len(heads)))
    model.model.set_entries(rows)
    return True


def _compare(needs: Sequence[Needs], texts: Sequence[Tensor]) -> list[float]:
    """The KL to the base of models of the size that their needs were measured at."""
    models = {str(at): _shrink(one) for at, one in enumerate(needs)}
    shortest = min(ids.shape[1] for ids in texts)
    start = max(memory.capacity for model in models.values() for memory in model.model.memories().values())
    start = min(start, shortest // 2)
    found = dict.fromkeys(models, 0.0)
    for ids in texts:
        scores = evaluate(models, ids.to(needs[0].model.device), start=start, batch_size=1)
        for name in models:
            found[name] += scores[name].mean_kl / len(texts)
    return list(found.values())


def _shrink(needs: Needs) -> Any:
    """The model, its window and entries made smaller where texts were too short to measure it as it is."""
    model = needs.model
    if needs.scale == 1:
        return model
    memory = {key: value for key, value in model.config.memory.items() if key in ("layers", "others", "sinks")}
    small = patch(model, "expected", max(needs.windows.values()), **memory, **model.config.memory["options"]).eval()
    own, other = model.model.memories(), small.model.memories()
    for index in needs.windows:
        other[index].load_state_dict(own[index].state_dict(), assign=True)  # shared, not copied
    small.model.set_entries(
        {index: [round(number * needs.scale) for number in own[index].rows] for index in needs.windows}
    )
    return small


def _describe(model: Any, loss: float, dtype: torch.dtype) -> dict[str, Any]:
    memories = list(model.model.memories().values())
    heads = sum(memory.kv_heads for memory in memories)
    bytes_ = sum(one.capacity * row_bytes(model.config, dtype) + one.state_bytes(dtype) for one in memories)
    keys, values = memories[0].options.key_and_value_bits
    return {
        "window": memories[0].window,
        "key_bits": keys,
        "value_bits": values,
        "entries": sum(sum(one.rows) for one in memories) / heads,
        "bytes": bytes_ / len(memories),
        "loss": loss,
    }
