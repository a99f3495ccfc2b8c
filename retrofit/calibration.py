"""Calibration: what a memory measures on a few thousand tokens of text, without gradients and before any training."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from patches.errors import RetrofitError

from .evaluation.scores import evaluate, evaluating
from .families import is_retrofit
from .loading import load_tokenizer
from .observer import LayerCall, watch_layers
from .shares import TEXT, Needs, between
from .texts.tokens import read_sequences

TOKENS, LENGTH = 8192, 1024  # that are read of a user's text; of a row, where the window is short
LONGEST = 4096  # tokens of a row, however long the window is
PARTS = (1.0, 0.5, 0.0)  # of the way from the rows that were set, and from even ones, to those by need
ROUNDS = 2  # first what the queries are like, then how the keys stand to them


def calibrate(model: Any, texts: Iterable[Tensor]) -> None:
    """Show ``model``'s memories the queries, keys and values of its own teacher on some texts.

    ``expected`` then knows which keys queries look at, and with ``shares="need"`` how many of all rows each key/value
    head gets. ``joint`` gets a start that is calculated: maps, logits and openings are overwritten, so do it before you
    train.

    Args:
        model: a patched model whose memory ``calibrates`` (kinds ``expected``, ``joint`` and ``joint-rows``); changed
            in place.
        texts: token ids ``(B, T)`` each, not padded; read twice, with full attention. Some 6,000 tokens of all the
            kinds of text that the model will meet are enough. For ``joint`` let a text be twice as long as S + W.

    Raises:
        RetrofitError: not a patched model, or its memory has nothing to calibrate; no text, or one that is no token ids
            of this model; layers differ in ``shares``.
    """
    if not is_retrofit(model):
        raise RetrofitError(f"{type(model).__name__} has no memory to calibrate: give what retrofit.patch returned")
    texts = _checked(texts, model.config.vocab_size)
    body = model.get_decoder()
    memories = [memory for memory in body.memories().values() if memory.calibrates]
    if not memories:
        raise RetrofitError("this model's memory has nothing to calibrate: fit it with `retrofit distill`")
    (shares, *others) = {getattr(memory.options, "shares", "even") for memory in memories}
    if others:
        raise RetrofitError("shares divides the rows of all layers: set it for all of them, not in by_layer")
    needs = _needs(body, texts) if shares == "need" else None
    for again in range(ROUNDS):
        _read(model, texts, partial(_observe, body, bool(again)))
        for memory in memories:
            memory.settle()
    if needs is not None:
        _read(model, texts, partial(needs.add, body))
        _share(model, needs, texts)


def _checked(texts: Any, vocabulary: int) -> list[Tensor]:
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


def measure_needs(model: Any, texts: list[Tensor]) -> Needs:
    """What each key/value head of a calibrated model loses with so many rows; see :class:`retrofit.shares.Needs`."""
    needs = _needs(model.get_decoder(), texts)
    _read(model, texts, partial(needs.add, model.get_decoder()))
    return needs


def _share(model: Any, needs: Needs, texts: list[Tensor]) -> None:
    """Shares by need, even ones, those that were set, or halfway: whichever leave the model nearest to its base.

    What a head changes in the residual stream is not always what matters in the end. On texts of less than
    :data:`retrofit.shares.TEXT` windows too little would be dropped for a comparison, and shares go by need.
    """
    memories = model.get_decoder().memories()
    measured = [memories[index] for index in needs.windows]
    if [memory.window for memory in measured] != list(needs.windows.values()):
        needs.give(model)
        return
    start, found = min(memory.capacity for memory in measured), dict[tuple[int, ...], float]()
    own, need = needs.rows(model), needs.by_need(model)
    each, rest = divmod(sum(own), len(own))
    even = [each + (head < rest) for head in range(len(own))]
    for rows in dict.fromkeys(between(before, need, part) for before in (own, even) for part in PARTS):
        needs.give(model, rows)
        scores = (evaluate({"": model}, ids.to(model.device), start=start, batch_size=1)[""] for ids in texts)
        found[rows] = sum(score.mean_kl for score in scores)
    needs.give(model, min(found, key=lambda rows: found[rows]))


def _needs(body: Any, texts: list[Tensor]) -> Needs:
    chosen = {index: memory for index, memory in body.memories().items() if memory.calibrates}
    return Needs(chosen, min(ids.shape[1] for ids in texts))


def _read(model: Any, texts: list[Tensor], look: Callable[[LayerCall], None]) -> None:
    """Let the teacher read, and show ``look`` each layer that has something to calibrate."""
    body = model.get_decoder()
    layers = [index for index, memory in body.memories().items() if memory.calibrates]
    with torch.no_grad(), evaluating(model), model.memory_off(), watch_layers(body, layers, look):
        for ids in texts:
            body(input_ids=ids.to(model.device), use_cache=False)


def row_length(model: Any) -> int:
    """Tokens of a row to calibrate on: twice S + W of the layer that forgets last, and ``LENGTH`` at least.

    With ``shares="need"`` they are :data:`retrofit.shares.TEXT` windows.
    """
    memories = [memory for memory in model.get_decoder().memories().values() if memory.calibrates]
    by_need = any(getattr(memory.options, "shares", "even") == "need" for memory in memories)
    return max([LENGTH, *(TEXT * memory.window if by_need else 2 * memory.capacity for memory in memories)])


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


def _observe(body: Any, again: bool, call: LayerCall) -> None:
    call.attention.memory.observe(call.step(body), again)
