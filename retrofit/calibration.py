"""Calibration: what a memory measures on a few thousand tokens of text, without gradients and before any training."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from patches.errors import RetrofitError
from patches.padding import Starts
from patches.step import Pass, Step

from .evaluation.perplexity import read_sequences
from .loading import load_tokenizer

TEXTS, LENGTH = 8, 1024  # rows and tokens of a row that are read of a user's text
ROUNDS = 2  # first what the queries are like, then how the keys stand to them


def calibrate(model: Any, texts: Iterable[Tensor]) -> None:
    """Show ``model``'s memories the queries, keys and values of its own teacher on some texts.

    Args:
        model: a patched model whose memory ``calibrates`` (kinds ``expected`` and ``joint-rows``); changed in place.
        texts: token ids ``(B, T)`` each, not padded; read twice, with full attention. Some 6,000 tokens of all the
            kinds of text that the model will meet are enough.

    Raises:
        RetrofitError: the memory has nothing to calibrate, or there is no text.
    """
    body, texts = model.get_decoder(), list(texts)
    memories = [memory for memory in body.memories().values() if memory.calibrates]
    if not memories:
        raise RetrofitError("this model's memory has nothing to calibrate: fit it with `retrofit distill`")
    if not texts:
        raise RetrofitError("calibration needs texts to read: give one at least")
    for again in range(ROUNDS):
        hooks = [
            layer.self_attn.register_forward_pre_hook(_observing(body, bool(again)), with_kwargs=True)
            for layer in body.layers
            if getattr(getattr(layer.self_attn, "memory", None), "calibrates", False)
        ]
        try:
            with torch.no_grad(), model.memory_off():
                for ids in texts:
                    body(input_ids=ids.to(model.device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        for memory in memories:
            memory.settle()


def read_texts(source: str, base: str) -> list[Tensor]:
    """``TEXTS`` rows (1, LENGTH) of token ids, spread evenly over ``source`` (a text file or a folder of them).

    Raises:
        RetrofitError: as :func:`retrofit.evaluation.perplexity.read_sequences`, or ``base`` has no tokenizer.
    """
    rows = read_sequences(source, load_tokenizer(base), length=LENGTH)
    return list(rows[:: -(-len(rows) // TEXTS)].split(1))


def _observing(body: Any, again: bool) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    """What an attention's memory does before that attends to a text."""

    def observe(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        now = Pass(0, x.shape[1], Starts(), False, body.turn, x.device, x.device)
        now = now if attention.use_rope else now.still()
        q, k, v = attention.plain_heads(x)
        attention.memory.observe(Step(now, x, q, k, v, layer=None, scale=attention.scaling), again)

    return observe
