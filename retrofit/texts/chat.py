"""Conversations: messages in either notation, through the tokenizer's chat template, with the answers labelled."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from patches.errors import RetrofitError, nearest
from retrofit.untrusted import checked_text

# OpenAI's names and ShareGPT's
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
KEYS = (("role", "from"), ("content", "value"))
MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
IGNORED = -100  # the label of positions that do not count, in transformers and everywhere else

Record = tuple[str, Any]  # where it stands, to be named in errors; what its column holds
Message = dict[str, str]
Span = tuple[int, int]


def read_messages(value: Any, where: str) -> list[Message]:
    """The messages of one conversation as ``[{"role": ..., "content": ...}]``.

    Takes ``role`` and ``content`` or ``from`` and ``value`` as keys, whatever the column is called. Other keys of a
    message are not read. Several turns of one role in a row are fine if the chat template takes them.

    Args:
        where: names the conversation in errors.

    Raises:
        RetrofitError: it is not a list, it is empty, a message has no role or text, a role is unknown, a message
            is a tool call, or no question has an answer.
    """
    parts = [*value.values()] if isinstance(value, dict) else []
    if parts and all(isinstance(part, list) and len(part) == len(parts[0]) for part in parts):
        # older datasets hold a list of messages as a mapping of lists
        value = [dict(zip(value, message, strict=True)) for message in zip(*parts, strict=True)]
    if not isinstance(value, list) or not value:
        raise RetrofitError(f"{where}: a conversation must be a list of at least one message")
    messages = [_message(message, f"{where}, message {number}") for number, message in enumerate(value, start=1)]
    if messages[0]["role"] == "assistant":
        raise RetrofitError(f"{where}: the conversation begins with an answer: put a user's message before it")
    if all(message["role"] != "assistant" for message in messages):
        raise RetrofitError(
            f"{where}: no message is the assistant's, so there is nothing to learn from it: leave the conversation out"
        )
    return messages


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise RetrofitError(f"{where} is not an object with a role and a content: write it as one")
    for key in ("tool_calls", "function_call"):
        if message.get(key):
            raise RetrofitError(f"{where} holds {key!r}: conversations with tools are not supported, leave them out")
    role, content = (_text(message, pair, where) for pair in KEYS)
    if role not in ROLES:
        raise RetrofitError(f"{where}: {role!r} is not one of the roles {', '.join(ROLES)}{nearest(role, ROLES)}")
    return {"role": ROLES[role], "content": content}


def _text(message: dict[str, Any], keys: tuple[str, str], where: str) -> str:
    """The text under the first of ``keys`` that a message has."""
    for key in keys:
        if message.get(key) is not None:
            return checked_text(message[key], where, repr(key))
    raise RetrofitError(f"{where} has neither {keys[0]!r} nor {keys[1]!r}: write one of them")


class ChatTokenizer:
    """A tokenizer with its chat template, which knows which tokens are the assistant's.

    Where the template marks them (``{% generation %}``), what it marks is labelled. Elsewhere an answer is what a
    conversation up to it has more than the conversation before it with the generation prompt: its text and the tokens
    that end the turn, but not the header.

    Raises:
        RetrofitError: the tokenizer has no chat template, or cannot say which characters a token stands for.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer: Any = tokenizer
        try:
            self.template: Any = self.tokenizer.get_chat_template()
        except ValueError as error:
            raise RetrofitError(
                "the base's tokenizer has no chat template, so it cannot read conversations: take "
                "an instruction-tuned base, or set tokenizer.chat_template and save it beside the checkpoint"
            ) from error
        if not tokenizer.is_fast:
            raise RetrofitError(
                "conversations need a fast tokenizer, and this one cannot say where its tokens are in a text: choose "
                "another base"
            )
        self.marked = MARKED.search(self.template) is not None

    def encode(self, records: Sequence[Record]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Token ids (n,) int32 and whether each is the assistant's (n,) bool, for every conversation.

        Raises:
            RetrofitError: as :func:`read_messages`; the template refuses a conversation, rewrites its earlier turns or
                marks nothing in it.
        """
        rendered = [self.render(read_messages(value, where), where) for where, value in records]
        # no special tokens: the template has written them. verbose=False: long conversations are no mistake here
        encoded = self.tokenizer(
            [text for text, _ in rendered],
            add_special_tokens=False,
            return_attention_mask=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        parts = zip(records, rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        for (where, _), (_, spans), ids, offsets in parts:
            # a token that begins before the answer belongs to the prompt
            starts = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)[:, 0]
            answer = np.zeros(len(ids), dtype=bool)
            for start, end in spans:
                answer |= (start <= starts) & (starts < end)
            if not answer.any():
                raise RetrofitError(
                    f"{where}: the chat template leaves no token of an answer: change the template or leave the "
                    "conversation out"
                )
            yield np.asarray(ids, dtype=np.int32), answer

    def render(self, messages: list[Message], where: str) -> tuple[str, list[Span]]:
        """The conversation as text, and which characters of it (start, end) are the assistant's."""
        try:
            if self.marked:
                texts, spans = render_jinja_template(
                    conversations=[messages],
                    chat_template=self.template,
                    return_assistant_tokens_mask=True,
                    **self.tokenizer.special_tokens_map,
                )
                return texts[0], [(start, end) for start, end in spans[0]]
            return self._render_by_prefixes(messages, where)
        except RetrofitError:
            raise
        except Exception as error:  # templates are programs: they raise what they like
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RetrofitError(f"{where}: the chat template refuses this conversation ({reason})") from error

    def _render_by_prefixes(self, messages: list[Message], where: str) -> tuple[str, list[Span]]:
        def text(count: int, prompt: bool = False) -> str:
            return self.tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=prompt)

        whole, spans = text(len(messages)), []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before, after = text(number, prompt=True), text(number + 1)
                if not (after.startswith(before) and whole.startswith(after)):
                    raise RetrofitError(
                        f"{where}: the chat template writes earlier turns differently once a later one follows, so the "
                        "answers cannot be found: mark them in the template with {% generation %}, or give single turns"
                    )
                spans.append((len(before), len(after)))
        return whole, spans


def cut(answer: np.ndarray, limit: int) -> np.ndarray:
    """Which tokens stay when a conversation is cut to ``limit`` tokens, as LLaMA-Factory (AHN's trainer) cuts them.

    Turns are taken in order, each a prompt and its answer, while there is room. Of a turn that does not fit, an answer
    shorter than half the room stays whole and the prompt loses its end; a prompt shorter than half stays whole and the
    answer loses its end; if neither is short, each keeps its share. Turns after it are left out. (Facts:
    ``infer_seqlen`` of LLaMA-Factory, which AHN's recipes run on.)

    Args:
        answer: (n,) bool, the assistant's tokens.

    Returns:
        (n,) bool with at most ``limit`` true.
    """
    if len(answer) <= limit:
        return np.ones(len(answer), dtype=bool)
    edges = np.flatnonzero(np.diff(answer, prepend=False, append=False))  # where answers begin and end, in turns
    keep, room, start = np.zeros(len(answer), dtype=bool), limit, 0
    for middle, end in edges.reshape(-1, 2).tolist():
        prompt, reply = middle - start, end - middle
        if 2 * reply < room:
            reply_kept = reply
        elif 2 * prompt < room:
            reply_kept = min(reply, room - prompt)
        else:
            reply_kept = min(reply, room * reply // (prompt + reply))
        prompt_kept = min(prompt, room - reply_kept)
        keep[start : start + prompt_kept] = keep[middle : middle + reply_kept] = True
        room, start = room - prompt_kept - reply_kept, end
    return keep
