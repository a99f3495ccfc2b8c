"""Text from a model: conversations on one cache, transformers' pipeline, torch.compile, and the word of warning."""

import copy
import io
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from patches.errors import RetrofitError
from patches.kinds import KINDS
from retrofit.chat import Chat, talk
from retrofit.export import export_model
from retrofit.generation import generate_text
from tests.helpers import awake, feed, fresh_process, logits, tokens

MakeBase = Callable[..., PreTrainedModel]
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
FORGETFUL = "{{ messages[-1].content + '\n' }}"
SHORT = {"max_new_tokens": 12}


@pytest.fixture
def tokenizer(byte_tokenizer: PreTrainedTokenizerFast) -> Any:
    own = copy.deepcopy(byte_tokenizer)
    own.chat_template = TEMPLATE
    return own


@pytest.fixture
def base(make_base: MakeBase, tokenizer: Any) -> PreTrainedModel:
    """A base that answers in capital letters: bytes that are no text would be read back as other bytes."""
    base = make_base("Qwen2", vocab_size=len(tokenizer))
    letters = torch.tensor(tokenizer.convert_tokens_to_ids(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")))
    with torch.no_grad():
        keep = torch.zeros(len(tokenizer), 1)
        keep[letters] = 1
        base.lm_head.weight.mul_(keep)
    return base


def lengths_read(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each forward pass from now on."""
    read: list[int] = []
    forward = model.model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        read.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", counted)
    return read


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_is_one_cache(
    kind: str, base: PreTrainedModel, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = awake(base, kind)
    chat = Chat(model, tokenizer, **SHORT)
    replies = [chat.say("hello"), chat.say("and then, after a while?"), chat.say("well")]
    assert [message["role"] for message in chat.messages] == 3 * ["user", "assistant"]
    assert [message["content"] for message in chat.messages[1::2]] == replies
    assert chat.cached.shape[1] == chat.cache.get_seq_length(), "the last token of a reply was never read"
    # the same conversation, each turn read from its beginning
    for turn, reply in enumerate(replies):
        alone = Chat(model, tokenizer, **SHORT)
        alone.messages = chat.messages[: 2 * turn]
        assert alone.say(chat.messages[2 * turn]["content"]) == reply
    read = lengths_read(model, monkeypatch)
    chat.say("?")
    assert read == [len("Z\nu:?\na:"), *[1] * 11], "the last letter was not read yet, what comes before it was"


def test_a_template_that_rewrites_what_was_said(base: PreTrainedModel, tokenizer: Any) -> None:
    tokenizer.chat_template = FORGETFUL
    model = awake(base, "ahn-gdn")
    chat = Chat(model, tokenizer, **SHORT)
    chat.say("a long beginning that is not said again")
    assert chat.say("hello") == Chat(model, tokenizer, **SHORT).say("hello")


def test_no_template_or_one_that_refuses(base: PreTrainedModel, tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(RetrofitError, match="no chat template: do not pass --chat"):
        Chat(base, tokenizer)
    for broken in ("{{ raise_exception('only one turn') }}", "{% for %}"):
        tokenizer.chat_template = broken
        with pytest.raises(RetrofitError, match="chat template cannot be used"):
            Chat(base, tokenizer).say("hello")


def test_talking(
    base: PreTrainedModel, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = awake(base, "ahn-gdn")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nand then?\n"))
    talk(Chat(model, tokenizer, **SHORT))
    chat = Chat(model, tokenizer, **SHORT)
    assert capsys.readouterr().out.split() == [chat.say("hello"), chat.say("and then?")]


def test_sampling_is_repeatable_for_a_whole_conversation(base: PreTrainedModel, tokenizer: Any) -> None:
    model = awake(base, "ahn-gdn")

    def turns(seed: int) -> list[str]:
        chat = Chat(model, tokenizer, seed, temperature=2.0, **SHORT)
        return [chat.say("hello"), chat.say("hello")]

    assert turns(1) == turns(1) != turns(2)


def test_numbers_out_of_range(base: PreTrainedModel, tokenizer: Any) -> None:
    with pytest.raises(RetrofitError, match="max_new_tokens=0"):
        generate_text(base, tokenizer, "x", max_new_tokens=0)
    with pytest.raises(RetrofitError, match="temperature=-1"):
        Chat(base, tokenizer, temperature=-1).say("x")


def test_transformers_pipeline(base: PreTrainedModel, tokenizer: Any, tmp_path: Path) -> None:
    """On an export, in a process that has never heard of this package; chat messages too."""
    model = awake(base, "ahn-gdn")
    export_model(model, tmp_path / "model", tokenizer)
    code = (
        "import json\nfrom transformers import pipeline\n"
        "write = pipeline('text-generation', model='model', trust_remote_code=True)\n"
        "how = {'max_new_tokens': 12, 'do_sample': False, 'return_full_text': False}\n"
        "texts = write(['a prompt that is longer than the window', 'short'], batch_size=2, **how)\n"
        "chat = write([{'role': 'user', 'content': 'hello'}], **how)\n"
        "print(json.dumps([*(one[0]['generated_text'] for one in texts), chat[0]['generated_text']]))"
    )
    said = json.loads(fresh_process(code, tmp_path, hide=["retrofit", "patches"]).splitlines()[-1])
    assert said == [
        generate_text(model, tokenizer, "a prompt that is longer than the window", max_new_tokens=12),
        generate_text(model, tokenizer, "short", max_new_tokens=12),
        Chat(model, tokenizer, **SHORT).say("hello"),
    ]


def test_a_compiled_decode_step_gives_the_same_tokens(make_base: MakeBase) -> None:
    model = awake(make_base("Qwen2"), "ahn-gdn")
    torch._dynamo.reset()

    @torch.no_grad()
    def decode(step: Any) -> list[int]:
        cache = DynamicCache(config=model.config)
        out = [model(tokens(1, 20), past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)]
        for _ in range(12):
            out.append(step(out[-1], past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True))
        return torch.cat(out, 1).tolist()

    assert decode(torch.compile(model, backend="aot_eager")) == decode(model)


@pytest.mark.parametrize("off", [False, True])
def test_longer_than_the_base_was_made_for(off: bool, make_base: MakeBase, caplog: pytest.LogCaptureFixture) -> None:
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    model = awake(make_base("Qwen2", max_position_embeddings=40), "ahn-gdn")
    said = "longer than the 40 tokens that the base's positions were made for"

    def run(length: int) -> int:
        if off:
            with model.memory_off():
                logits(model, tokens(1, length))
        else:
            feed(model, tokens(1, length), [30, *[1] * (length - 30)])
        return sum(said in record.getMessage() for record in caplog.records)

    assert run(40) == 0
    assert run(41) == 1
    assert run(45) == 1, "once is enough"


def test_rotary_scaling_makes_room(make_base: MakeBase, caplog: pytest.LogCaptureFixture) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
    model = awake(make_base("Llama", max_position_embeddings=16, rope_parameters=rope), "ahn-gdn")
    logits(model, tokens(1, 64))
    assert not caplog.records
    logits(model, tokens(1, 65))
    assert "longer than the 64 tokens" in caplog.text
