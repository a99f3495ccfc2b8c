"""Malformed checkpoints, adapters, exports, AHN folders, tokenizers and cards: each is refused in one sentence."""

import json
import struct
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

import retrofit
from patches.config import MemoryConfig
from patches.kinds import KINDS, find_kind
from retrofit.card import complete_card
from retrofit.hub import _contents
from retrofit.loading import load_base, load_config, load_tokenizer
from tests.robustness.inputs import JUNK, damaged, documents, put, refusal, safetensors, share

CopyOf = Callable[[str], Path]
MEMORY = {
    "kind": "kvm",
    "window": 8,
    "sinks": 2,
    "layers": [0],
    "others": "full",
    "options": {"rows": 8, "chunk": 4, "budget": "fixed"},
    "base": "x",
    "base_revision": None,
    "rotary_dtype": None,
}


@share(0.12)
@given(documents(MEMORY))
def test_a_memory_configuration(data: Any) -> None:
    def read() -> None:
        config = MemoryConfig.from_dict(data)
        config.patched_layers(LlamaConfig(num_hidden_layers=2))
        find_kind(config.kind).read_options(config.options)

    refusal("memory configuration", read)


@share(0.12)
@given(st.data())
def test_options_of_every_kind(base: Any, data: st.DataObject) -> None:
    """On a model too: some values only show to be wrong beside the base's shapes."""
    kind = data.draw(st.sampled_from(list(KINDS)))
    names = [*(field.name for field in fields(KINDS[kind].Options)), "surprise"]
    options = data.draw(st.dictionaries(st.sampled_from(names), st.sampled_from(JUNK), min_size=1, max_size=3))
    window, sinks = data.draw(st.sampled_from([(8, 2), (1, 0), (10**30, 0), (8, 10**30), (-1, 0), (True, 0)]))
    refusal("options", lambda: retrofit.patch(base, kind, window, sinks, **options))


def test_an_adapter_configuration(base: Any, copy_of: CopyOf) -> None:
    folder = copy_of("adapter")
    file = folder / "adapter_config.json"
    original = file.read_bytes()

    @share(0.1)
    @given(st.one_of(documents(json.loads(original)), damaged(original)))
    def check(content: Any) -> None:
        put(file, content)
        refusal("adapter_config.json", lambda: retrofit.load_adapter(base, folder))
        refusal("what push looks at", lambda: _contents(folder))

    check()


def test_an_adapters_weights(base: Any, copy_of: CopyOf) -> None:
    folder = copy_of("adapter")
    file = folder / "adapter_model.safetensors"

    @share(0.12)
    @given(safetensors(file.read_bytes()))
    def check(content: bytes) -> None:
        put(file, content)
        refusal("adapter_model.safetensors", lambda: retrofit.load_adapter(base, folder, check_base=False))

    check()


def test_published_ahn_weights(base: Any, copy_of: CopyOf) -> None:
    folder = copy_of("ahn")
    config, weights = folder / "config.json", folder / "model.safetensors"
    originals = config.read_bytes(), weights.read_bytes()

    @share(0.1)
    @given(
        st.one_of(documents(json.loads(originals[0])), damaged(originals[0])), safetensors(originals[1]), st.booleans()
    )
    def check(settings: Any, tensors: bytes, which: bool) -> None:
        put(config, settings if which else originals[0])
        put(weights, originals[1] if which else tensors)
        refusal("AHN weights", lambda: retrofit.convert_ahn(base, folder, 8, 2))

    check()


def test_an_exports_configuration(copy_of: CopyOf) -> None:
    folder = copy_of("export")
    file = folder / "config.json"
    original = file.read_bytes()

    @share(0.06)
    @given(st.one_of(documents(json.loads(original)), damaged(original)))
    def check(content: Any) -> None:
        put(file, content)
        refusal("config.json", lambda: load_base(str(folder)))

    check()


def test_a_base_configuration(copy_of: CopyOf) -> None:
    folder = copy_of("base")
    file = folder / "config.json"
    original = file.read_bytes()

    @share(0.05)
    @given(st.one_of(documents(json.loads(original)), damaged(original)))
    def check(content: Any) -> None:
        put(file, content)
        refusal("config.json", lambda: load_config(str(folder)))

    check()


def test_a_base_configuration_with_any_number(copy_of: CopyOf) -> None:
    """Counts of nothing, and far beyond what any weights or memory hold: said before anything is made of that size."""
    folder = copy_of("base")
    file = folder / "config.json"
    original = json.loads(file.read_bytes())
    numbers = [key for key, value in original.items() if type(value) is int]

    @share(0.03)
    @given(st.sampled_from(numbers), st.sampled_from([-1, 0, 3, 10**6, 10**9, 2**62, 10**30]))
    def check(key: str, value: int) -> None:
        put(file, {**original, key: value})
        refusal("config.json", lambda: load_base(str(folder)))

    check()


def test_a_bases_weights(copy_of: CopyOf) -> None:
    folder = copy_of("base")
    file = folder / "model.safetensors"

    @share(0.05)
    @given(safetensors(file.read_bytes()))
    def check(content: bytes) -> None:
        put(file, content)
        refusal("model.safetensors", lambda: load_base(str(folder)))

    check()


def test_a_tokenizer(copy_of: CopyOf) -> None:
    folder = copy_of("base")
    files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    originals = [file.read_bytes() for file in files]

    @share(0.03)
    @given(st.sampled_from([0, 1]), st.data())
    def check(which: int, data: st.DataObject) -> None:
        for file, original in zip(files, originals, strict=True):
            put(file, original)
        head = 4000  # the vocabulary behind it is all alike
        small = json.loads(originals[1])
        put(files[which], data.draw(st.one_of(damaged(originals[which], head), documents(small))))
        refusal("tokenizer", lambda: load_tokenizer(str(folder)))

    check()


def test_a_tokenizer_that_does_not_know_its_unknown_token(copy_of: CopyOf) -> None:
    file = copy_of("base") / "tokenizer_config.json"
    put(file, json.dumps(json.loads(file.read_bytes()) | {"unk_token": ""}).encode())
    assert "no usable tokenizer" in str(refusal("tokenizer", lambda: load_tokenizer(str(file.parent))))


@share(0.02)
@given(damaged(b"---\nlicense: mit\ntags:\n- a\nbase_model: x/y\n---\n\n# Title\n"))
def test_a_card(text: bytes) -> None:
    refusal("card", lambda: complete_card(text.decode(errors="replace"), "user/name", {"license": "mit"}))


def test_a_header_of_exabytes(base: Any, copy_of: CopyOf) -> None:
    """Named here because it is the best known one; the others of its sort are among the examples above."""
    folder = copy_of("adapter")
    file = folder / "adapter_model.safetensors"
    put(file, struct.pack("<Q", 2**62) + b"{}")
    assert "damaged" in str(refusal("adapter_model.safetensors", lambda: retrofit.load_adapter(base, folder)))
