"""Calibration: what a memory measures on a few thousand tokens of text, without gradients and before any training."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from patches.errors import RetrofitError
from patches.padding import Starts
from patches.step import Pass, Step

from .evaluation.perplexity import read_sequences
from .evaluation.scores import evaluate
from .loading import load_tokenizer
from .shares import TEXT, Needs, between

TEXTS, LENGTH = 8, 1024  # rows and tokens of a row that are read of a user's text, where the window is short
LONGEST = 4096  # tokens of a row, however long the window is
Watch = Callable[[int, Any, Step, Tensor], None]
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
        RetrofitError: the memory has nothing to calibrate, there is no text, or layers differ in ``shares``.
    """
    body, texts = model.get_decoder(), list(texts)
    memories = [memory for memory in body.memories().values() if memory.calibrates]
    if not memories:
        raise RetrofitError("this model's memory has nothing to calibrate: fit it with `retrofit distill`")
    if not texts:
        raise RetrofitError("calibration needs texts to read: give one at least")
    (shares, *others) = {getattr(memory.options, "shares", "even") for memory in memories}
    if others:
        raise RetrofitError("shares divides the rows of all layers: set it for all of them, not in by_layer")
    needs = _needs(body, texts) if shares == "need" else None
    for again in range(ROUNDS):
        _read(model, texts, partial(_observe, bool(again)))
        for memory in memories:
            memory.settle()
    if needs is not None:
        _read(model, texts, needs.add)
        _share(model, needs, texts)


def measure_needs(model: Any, texts: list[Tensor]) -> Needs:
    """What each key/value head of a calibrated model loses with so many rows; see :class:`retrofit.shares.Needs`."""
    needs = _needs(model.get_decoder(), texts)
    _read(model, texts, needs.add)
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


def _read(model: Any, texts: list[Tensor], watch: Watch) -> None:
    """Let the teacher read, and show ``watch`` each layer that has something to calibrate: its index, its attention,
    its step and the lengths ``(B, T)`` of the vectors that it is given."""
    body, hooks = model.get_decoder(), []
    lengths: dict[str, Tensor] = {}

    def measure(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        lengths["x"] = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]).norm(dim=-1)

    for index, layer in enumerate(body.layers):
        attention = layer.self_attn
        if getattr(getattr(attention, "memory", None), "calibrates", False):
            hooks.append(layer.register_forward_pre_hook(measure, with_kwargs=True))
            hooks.append(attention.register_forward_pre_hook(_watching(body, index, lengths, watch), with_kwargs=True))
    try:
        with torch.no_grad(), model.memory_off():
            for ids in texts:
                body(input_ids=ids.to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()


def row_length(model: Any) -> int:
    """Tokens of a row to calibrate on: twice S + W of the layer that forgets last, and ``LENGTH`` at least.

    With ``shares="need"`` they are :data:`retrofit.shares.TEXT` windows.
    """
    memories = [memory for memory in model.get_decoder().memories().values() if memory.calibrates]
    by_need = any(getattr(memory.options, "shares", "even") == "need" for memory in memories)
    return max([LENGTH, *(TEXT * memory.window if by_need else 2 * memory.capacity for memory in memories)])


def read_texts(source: str, base: str, length: int = LENGTH) -> list[Tensor]:
    """Rows (1, T) of token ids, ``TEXTS * LENGTH`` in all, spread evenly over ``source`` (a text file or a folder).

    Args:
        source: what to read.
        base: whose tokenizer reads it.
        length: T, where a text has so many tokens; ``LONGEST`` at most. If none has, T is ``LENGTH``.

    Raises:
        RetrofitError: as :func:`retrofit.evaluation.perplexity.read_sequences`, or ``base`` has no tokenizer.
    """
    tokenizer, length = load_tokenizer(base), min(length, LONGEST)
    try:
        rows = read_sequences(source, tokenizer, length=length)
    except RetrofitError:
        if length <= LENGTH:
            raise
        rows = read_sequences(source, tokenizer, length=LENGTH)
    count = -(-TEXTS * LENGTH // rows.shape[1])
    return list(rows[:: -(-len(rows) // count)].split(1))


def _observe(again: bool, index: int, attention: Any, step: Step, lengths: Tensor) -> None:
    attention.memory.observe(step, again)


def _watching(
    body: Any, index: int, lengths: dict[str, Tensor], watch: Watch
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    """What is done before an attention attends to a text: ``watch`` is shown its step, queries and keys unrotated."""

    def hook(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        now = Pass(0, x.shape[1], Starts(), False, body.turn, x.device, x.device)
        now = now if attention.use_rope else now.still()
        q, k, v = attention.plain_heads(x)
        watch(index, attention, Step(now, x, q, k, v, layer=None, scale=attention.scaling), lengths["x"])

    return hook
