"""Exports of tiny retrofits, as vLLM finds them on a disk, and the tokens that transformers' generate makes of them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.helpers import awake

Export = Callable[..., Path]


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture
def export(exports: Path, make_base: Callable[..., PreTrainedModel], byte_tokenizer: Any) -> Export:
    """A folder with a retrofit of some family and kind, W = 8 and S = 2, made once; kind None is the base itself."""

    def make(family: str, kind: str | None, **options: Any) -> Path:
        # letters and figures alone: vLLM takes a folder's name for a pattern
        name = re.sub("\\W+", "-", f"{family}-{kind or 'base'}-{options}")
        folder = exports / name
        if not folder.exists():
            # vLLM's own attention, which the base runs on, knows no narrower heads. The embedding of a padding token
            # would be zero and its first key nothing but bias, so that kvm's likeness to it would be rounding alone
            sizes = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 2048, "pad_token_id": None}
            base = make_base(family, vocab_size=len(byte_tokenizer), **sizes)
            (base if kind is None else awake(base, kind, **options)).save_pretrained(folder)
            byte_tokenizer.save_pretrained(folder)
        return folder

    return make


@torch.no_grad()
def continued(folder: Path, prompts: list[list[int]], new: int) -> list[list[int]]:
    """The ``new`` likeliest tokens after each prompt, as generate finds them; prompts of one length are one batch."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: dict[int, list[int]] = {}
    for length in {len(prompt) for prompt in prompts}:
        places = [place for place, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([prompts[place] for place in places])
        how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False, "eos_token_id": None}
        found |= zip(places, model.generate(ids, **how)[:, length:].tolist(), strict=True)
    return [found[place] for place in range(len(prompts))]
