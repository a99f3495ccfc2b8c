"""A tiny checkpoint folder with a word tokenizer, a text, rows of random tokens, a patched model and a recipe."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import retrofit
from distill.config import DistillConfig
from distill.data.rows import Rows, pack_tokens

WORDS = 101
TEXT_WORDS = 3000


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Ids 3 to 100 are the words ``w3`` to ``w100``; 2 ends a document."""
    vocabulary = {"<unk>": 0, "<start>": 1, "<end>": 2} | {f"w{i}": i for i in range(3, WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unk>")


@pytest.fixture
def checkpoint(tmp_path: Path, make_base: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast) -> Path:
    """A tiny LLaMA with its tokenizer, saved."""
    folder = tmp_path / "base"
    make_base("Llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def text() -> str:
    """Words in random order."""
    ids = torch.randint(3, WORDS, (TEXT_WORDS,), generator=torch.Generator().manual_seed(0))
    return " ".join(f"w{i}" for i in ids.tolist())


@pytest.fixture
def text_file(tmp_path: Path, text: str) -> Path:
    """The same, as a file."""
    path = tmp_path / "text.txt"
    path.write_text(text)
    return path


@pytest.fixture
def rows() -> Rows:
    """24 rows of 40 random tokens."""
    tokens = torch.randint(3, WORDS, (24 * 40,), generator=torch.Generator().manual_seed(1))
    return pack_tokens(tokens, 40)


@pytest.fixture
def model(make_base: Callable[..., PreTrainedModel]) -> Any:
    """A tiny Qwen2 with a memory, the same each time."""
    base = make_base("Qwen2")
    torch.manual_seed(3)
    return retrofit.patch(base, memory="ahn-gdn", window=6, sinks=2)


@pytest.fixture
def recipe(checkpoint: Path, text_file: Path, tmp_path: Path) -> DistillConfig:
    """Six steps on a tiny checkpoint."""
    return DistillConfig(
        base=str(checkpoint),
        data=str(text_file),
        output_dir=str(tmp_path / "run"),
        window=6,
        sinks=2,
        max_length=40,
        max_steps=6,
        eval_rows=4,
        eval_steps=4,
        save_steps=4,
    )
