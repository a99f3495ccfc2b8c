"""Text from a model on the terminal: a prompt in, its continuation streamed out."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, TextStreamer

from patches.errors import RetrofitError

from .adapter import load_adapter
from .loading import check_vocabulary, load_base, load_config, load_tokenizer


def load_for_generation(path: str, adapter: str | Path | None = None) -> tuple[Any, Any]:
    """Model (eval mode, on the GPU where there is one) and tokenizer of an exported model, or of a base and an adapter.

    Raises:
        RetrofitError: as :func:`retrofit.loading.load_base`, ``load_tokenizer`` and :func:`retrofit.load_adapter`.
    """
    config = load_config(path)  # no such model: said before its tokenizer is missed
    tokenizer = load_tokenizer(path)
    check_vocabulary(tokenizer, config)
    model = load_base(path) if adapter is None else load_adapter(path, adapter)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def generate_text(
    model: Any, tokenizer: Any, prompt: str, *, seed: int = 0, stream: bool = False, **sampling: Any
) -> str:
    """Continue ``prompt``.

    Args:
        model: a causal LM.
        tokenizer: its tokenizer.
        prompt: what to continue; not part of the result.
        seed: of sampling.
        stream: print the text to stdout as it comes.
        **sampling: ``max_new_tokens`` and ``temperature``, as for :func:`respond`.

    Returns:
        The continuation, special tokens left out.

    Raises:
        RetrofitError: an empty prompt, or a number out of range.
    """
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.device)
    if ids.shape[1] == 0:
        raise RetrofitError("the prompt is empty: give some text to continue")
    torch.manual_seed(seed)
    tokens = respond(model, tokenizer, ids, stream=stream, **sampling)
    return tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)


def respond(
    model: Any,
    tokenizer: Any,
    ids: Tensor,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    stream: bool = False,
    cache: Cache | None = None,
) -> Tensor:
    """The tokens ``ids`` (1, T) and those that follow (1, T + n).

    Args:
        max_new_tokens: the most tokens that are drawn.
        temperature: of sampling; 0 always takes the most likely token.
        cache: may hold the first of ``ids`` already.

    Raises:
        RetrofitError: a number out of range.
    """
    if max_new_tokens < 1:
        raise RetrofitError(f"max_new_tokens={max_new_tokens}: ask for 1 token or more")
    if not 0 <= temperature < float("inf"):
        raise RetrofitError(f"temperature={temperature}: it must be 0 (greedy) or more")
    return model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None,
        **({"do_sample": True, "temperature": temperature} if temperature else GREEDY),
    )


# a checkpoint's own sampling settings would only be warned about
GREEDY: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
