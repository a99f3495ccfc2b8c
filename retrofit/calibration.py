"""Calibration: what a memory measures on a few thousand tokens of text, without gradients and before any training."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from patches.errors import RetrofitError
from patches.memory import Step

from .evaluation.scores import evaluating
from .families import is_retrofit
from .loading import load_tokenizer
from .needs import TIMES, Needs, kept_tokens, weigh_outputs
from .observer import watch_layers
from .texts.tokens import read_sequences

TOKENS, LENGTH = 8192, 1024  # that are read of a user's text; of a row, where the window is short
LONGEST = 4096  # tokens of a row, however long the window is
REPEATED, FIRST = 16, 16  # so large a part of a text's end repeats its beginning, from this token on


def calibrate(model: Any, texts: Iterable[Tensor], *, repeat: bool = True, context: int | None = None) -> None:
    """Show ``model``'s memories the queries, keys and values of its own teacher on some texts.

    ``expected`` then knows which keys queries look at, and with ``shares="need"`` how many of all entries each
    key/value head gets. ``joint`` gets a calibrated initialisation: maps, logits and openings are overwritten, so do it
    before you train.

    Args:
        model: a patched model whose memory ``calibrates`` (kinds ``expected``, ``joint`` and ``joint-rows``); changed
            in place.
        texts: token ids ``(B, T)`` each, not padded; read two or three times, with full attention. Some 6,000 tokens of
            all the kinds of text that the model will meet are enough. For ``joint`` let a text be twice as long as
            S + W.
        repeat: with ``shares="need"``, let the end of each text repeat its beginning, so that heads which copy are
            measured while they copy.
        context: tokens of the longest input that the model will get, if that is known; for ``shares="need"``.

    Raises:
        RetrofitError: not a patched model, or its memory has nothing to calibrate; no text, or one that is no token ids
            of this model; layers differ in ``shares``.
    """
    if not is_retrofit(model):
        raise RetrofitError(f"{type(model).__name__} has no memory to calibrate: give what retrofit.patch returned")
    texts = check_texts(texts, model.config.vocab_size)
    memories = [memory for memory in model.get_decoder().memories().values() if memory.calibrates]
    if not memories:
        raise RetrofitError("this model's memory has nothing to calibrate: fit it with `retrofit distill`")
    (shares, *others) = {getattr(memory.options, "shares", "even") for memory in memories}
    if others:
        raise RetrofitError("shares divides the entries of all layers: set it for all of them, not in by_layer")
    costs = weigh_layers(model)
    needs = []
    if shares == "need":
        wanted = TIMES * kept_tokens(memories)
        scale = min(ids.shape[1] for ids in texts) / min(wanted, context or wanted)
        needs = [Needs(model, costs, texts, min(1.0, scale))]
    observe([model], texts, costs)
    if needs:
        measure(needs, repeat_beginnings(texts) if repeat else texts)
        needs[0].give()


def weigh_layers(model: Any) -> dict[int, Tensor]:
    """What :func:`retrofit.needs.weigh_outputs` says of each layer that has something to calibrate."""
    body = model.get_decoder()
    layers = [index for index, memory in body.memories().items() if memory.calibrates]
    with torch.no_grad():
        return {index: weigh_outputs(body.layers[index].self_attn, model.dtype) for index in layers}


def observe(models: Sequence[Any], texts: Sequence[Tensor], costs: dict[int, Tensor]) -> None:
    """Calibrate the memories of ``models``, retrofits of one base on the same layers, by what the base reads.

    Args:
        costs: as :func:`weigh_layers` has it.
    """
    memories = [model.get_decoder().memories() for model in models]

    def look(again: bool, index: int, step: Step, _: Tensor) -> None:
        for of_model in memories:
            of_model[index].observe(step, again)

    for again in (False, True):  # first what the queries are like, then how the keys stand to them
        _read(models[0], texts, partial(look, again))
        for of_model in memories:
            for index, cost in costs.items():
                of_model[index].settle(cost)


def measure(needs: Sequence[Needs], texts: Sequence[Tensor]) -> None:
    """Measure the needs of calibrated models, retrofits of one base on the same layers."""

    def look(index: int, step: Step, residual: Tensor) -> None:
        for one in needs:
            one.add(index, step, residual)

    _read(needs[0].model, texts, look)


def repeat_beginnings(texts: Sequence[Tensor]) -> list[Tensor]:
    """``texts`` whose last sixteenth is replaced by their beginning, but for the first tokens, which are often sinks.

    >>> repeat_beginnings([torch.arange(200).view(1, -1)])[0][0, 186:191].tolist()
    [186, 187, 16, 17, 18]
    """
    lengths = [ids.shape[1] // REPEATED for ids in texts]
    return [
        torch.cat([ids[:, : ids.shape[1] - length], ids[:, FIRST : FIRST + length]], 1)
        for ids, length in zip(texts, lengths, strict=True)
    ]


def _read(model: Any, texts: Sequence[Tensor], look: Callable[[int, Step, Tensor], None]) -> None:
    """Let the teacher read, and show ``look`` each layer that has something to calibrate: its index, step and input."""
    body = model.get_decoder()
    layers = [index for index, memory in body.memories().items() if memory.calibrates]
    show = lambda call: look(call.index, call.step(body), call.residual)  # noqa: E731
    with torch.no_grad(), evaluating(model), model.memory_off(), watch_layers(body, layers, show):
        for ids in texts:
            body(input_ids=ids.to(model.device), use_cache=False)


def check_texts(texts: Any, vocabulary: int) -> list[Tensor]:
    """``texts`` as they are, if each is token ids ``(B, T)`` below ``vocabulary``."""
    texts = list(texts) if isinstance(texts, Iterable) else []
    if not texts:
        raise RetrofitError("calibration needs texts to read: give one at least")
    for ids in texts:
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
            what = (
                f"a {type(ids).__name__}" if not isinstance(ids, Tensor) else f"{ids.dtype} of shape {tuple(ids.shape)}"
            )
            raise RetrofitError(f"calibration reads token ids (B, T), not {what}: let the base's tokenizer make them")
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise RetrofitError(f"the model has embeddings for ids 0 to {vocabulary - 1}: use its own tokenizer")
    return texts


def row_length(model: Any) -> int:
    """Tokens of a row to calibrate on: twice S + W of the layer that forgets last, and ``LENGTH`` at least.

    With ``shares="need"`` they are :data:`retrofit.needs.TIMES` times what the model keeps.
    """
    memories = [memory for memory in model.get_decoder().memories().values() if memory.calibrates]
    longest = max(2 * memory.capacity for memory in memories)
    if any(getattr(memory.options, "shares", "even") == "need" for memory in memories):
        longest = max(longest, TIMES * kept_tokens(memories))
    return max(LENGTH, longest)


def read_texts(source: str, base: str, length: int = LENGTH) -> list[Tensor]:
    """Rows (1, T) of token ids, ``TOKENS`` in all, spread evenly over ``source``.

    Args:
        source: anything :func:`retrofit.texts.sources.open_source` opens.
        base: whose tokenizer reads it.
        length: T, where a text has so many tokens; ``LONGEST`` at most. If none has, T is ``LENGTH``.

    Raises:
        RetrofitError: as :func:`retrofit.texts.tokens.read_sequences`, or ``base`` has no tokenizer.
    """
    tokenizer, length = load_tokenizer(base), min(length, LONGEST)
    try:
        rows = read_sequences(source, tokenizer, length=length)
    except RetrofitError:
        if length <= LENGTH:
            raise
        rows = read_sequences(source, tokenizer, length=LENGTH)
    return [rows[index : index + 1] for index in spread([rows.shape[1]] * len(rows))]


def spread(lengths: Sequence[int]) -> list[int]:
    """Indices of rows of these ``lengths``, evenly spread, that hold ``TOKENS`` tokens; all if they hold fewer."""
    for count in range(1, len(lengths)):
        chosen = [number * len(lengths) // count for number in range(count)]
        if sum(lengths[index] for index in chosen) >= TOKENS:
            return chosen
    return list(range(len(lengths)))
