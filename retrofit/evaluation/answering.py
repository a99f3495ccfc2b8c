"""Long inputs in pieces: a cache filled chunk by chunk, so that a bounded memory stays bounded while it reads."""

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import DynamicCache

from retrofit.evaluation.settings import Settings
from retrofit.lm_head import log_probs

CHUNK: int = Settings.chunk


def pieces(length: int, chunk: int = CHUNK) -> Iterator[slice]:
    """``[0, length)`` in slices of ``chunk``, the last one shorter."""
    for at in range(0, length, chunk):
        yield slice(at, min(at + chunk, length))


def prefill(model: Any, ids: Tensor, chunk: int = CHUNK) -> tuple[Tensor, Any]:
    """Read ``ids`` (1, T); returns the last position's logits ``(V,)`` and the cache."""
    cache = DynamicCache(config=model.config)
    logits = None
    for piece in pieces(ids.shape[1], chunk):
        logits = model(ids[:, piece], past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
    assert logits is not None, "there is no token to read"
    return logits, cache


def answer(
    model: Any,
    tokenizer: Any,
    ids: Tensor,
    *,
    max_new_tokens: int,
    stop: tuple[str, ...] = (),
    chunk: int = CHUNK,
) -> str:
    """What the model says after ``ids`` (1, T), taking the likeliest token each time.

    Ends at an end-of-sequence token, at one of the strings of ``stop`` (left out), or after ``max_new_tokens``.
    """
    ends = _end_tokens(model, tokenizer)
    logits, cache = prefill(model, ids, chunk)
    said: list[int] = []
    while len(said) < max_new_tokens:
        token = int(logits.argmax())
        if token in ends:
            break
        said.append(token)
        text = tokenizer.decode(said, skip_special_tokens=True)
        found = [text.index(word) for word in stop if word in text]
        if found:
            return text[: min(found)]
        if len(said) < max_new_tokens:
            step = ids.new_tensor([[token]])
            logits = model(step, past_key_values=cache, use_cache=True).logits[0, -1]
    return tokenizer.decode(said, skip_special_tokens=True)


def choose(model: Any, tokenizer: Any, prompt: str, choices: tuple[str, ...], chunk: int = CHUNK) -> str:
    """The one of ``choices`` that is likeliest after ``prompt``, by log-likelihood per character."""
    ids = tokenizer(prompt, return_tensors="pt", verbose=False)["input_ids"].to(model.device)
    last, cache = ids.shape[1] - 1, DynamicCache(config=model.config)
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    for piece in pieces(last, chunk):
        decoder(input_ids=ids[:, piece], past_key_values=cache, use_cache=True)
    scores = []
    for choice in choices:
        whole = tokenizer(prompt + choice, return_tensors="pt", verbose=False)["input_ids"].to(model.device)
        rest = decoder(input_ids=whole[:, last:-1], past_key_values=copy.deepcopy(cache), use_cache=True)
        likely = log_probs(rest.last_hidden_state[0], head.weight, head.bias).gather(-1, whole[:, last + 1 :].T)
        scores.append(likely.sum().item() / len(choice))
    return choices[scores.index(max(scores))]


def _end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end an answer: the tokenizer's, and those the generation settings add."""
    configured = model.generation_config.eos_token_id
    listed = configured if isinstance(configured, list) else [configured]
    return {token for token in [*listed, tokenizer.eos_token_id] if token is not None}
