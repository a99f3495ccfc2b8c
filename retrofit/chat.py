"""Prompts in a tokenizer's chat template, and talking to a model in the terminal with one cache for all turns."""

import sys
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import DynamicCache

from patches.errors import RetrofitError, first_line

from .generation import respond


def check_template(tokenizer: Any) -> None:
    """Refuse a tokenizer without a chat template.

    Raises:
        RetrofitError: it has none.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise RetrofitError(
            "this tokenizer has no chat template: do not pass --chat, or take the model's instruction-tuned version"
        )


def chat_prompt(tokenizer: Any, text: str, begun: str = "") -> str:
    """``text`` as a user's message, up to where the answer begins; ``begun`` is the answer's beginning.

    Tokenising the prompt gives the token that begins a text once, as the template has it. Reasoning is switched off
    where a template knows how.

    Raises:
        RetrofitError: the tokenizer has no chat template, or its template refuses the message.
    """
    prompt = _rendered(tokenizer, [{"role": "user", "content": text}], enable_thinking=False)
    begin = tokenizer.bos_token
    if begin and prompt.startswith(begin) and tokenizer("", verbose=False)["input_ids"][:1] == [tokenizer.bos_token_id]:
        prompt = prompt.removeprefix(begin)  # the tokenizer writes it as well
    return prompt + begun


def _rendered(tokenizer: Any, messages: list[dict[str, str]], **variables: Any) -> str:
    """A conversation as the template writes it, up to where the model's next answer begins."""
    check_template(tokenizer)
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables))
    except TemplateError as error:
        raise RetrofitError(f"the tokenizer's chat template cannot be used: {first_line(error)}") from None


class Chat:
    """A conversation: each turn reads only what is new, the rest is in the cache and in the memory.

    Args:
        model: a causal LM.
        tokenizer: its tokenizer, with a chat template.
        seed: of sampling, for the whole conversation.
        **sampling: ``max_new_tokens`` and ``temperature`` of replies, as for :func:`retrofit.generation.respond`.

    Raises:
        RetrofitError: the tokenizer has no chat template.
    """

    def __init__(self, model: Any, tokenizer: Any, seed: int = 0, **sampling: Any):
        check_template(tokenizer)
        self.model, self.tokenizer, self.sampling = model, tokenizer, sampling
        self.messages: list[dict[str, str]] = []
        self.cache = DynamicCache(config=model.config)
        self.cached = torch.empty(1, 0, dtype=torch.long, device=model.device)  # the tokens that are in the cache
        torch.manual_seed(seed)

    def say(self, text: str, stream: bool = False) -> str:
        """One turn: the reply to ``text``, printed as it comes if ``stream``.

        Raises:
            RetrofitError: the template refuses the conversation, or a number is out of range.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = _rendered(self.tokenizer, messages)
        # no special tokens: the template has written them
        ids = self.tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"].to(self.model.device)
        known = self.cached.shape[1]
        # some templates rewrite earlier turns (they drop a reply's thoughts): then everything is read again
        if not torch.equal(ids[:, :known], self.cached):
            self.cache = DynamicCache(config=self.model.config)
        tokens = respond(self.model, self.tokenizer, ids, stream=stream, cache=self.cache, **self.sampling)
        self.cached = tokens[:, : self.cache.get_seq_length()]
        reply = self.tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": reply}]
        return reply


def talk(chat: Chat) -> None:
    """Turns typed at the terminal (or piped, one to a line), until the input ends."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            text = input(prompt)
        except EOFError:
            return
        if text.strip():
            chat.say(text, stream=True)
