"""Invariant 6, what works: every way of generating gives the tokens that the same model gives without a cache.

In 16 bits the likeliest two tokens are often the same number, and which one comes first hangs on how a product was
rounded. So there `generate` is held to the very same calls made by hand, and what these calls give to test_answering.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tests.helpers import awake, close, left_mask, positions, tokens

PROMPT, NEW = 15, 6  # the prompt is beyond the capacity already
LENGTH = {"max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0}
WAYS: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"do_sample": True, "num_beams": 2},
    "greedy with penalties": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}


def generate(model: Any, ids: Tensor | None, **how: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(ids, **{**LENGTH, **how})


def test_greedy(base: PreTrainedModel, kind: str) -> None:
    model = awake(base, kind, push=0.03)
    ids, mask = tokens(3, PROMPT), left_mask([PROMPT, 11, 3], PROMPT)
    cached = generate(model, ids, attention_mask=mask, do_sample=False)
    assert cached.shape == (3, PROMPT + NEW)
    assert torch.equal(cached, generate(model, ids, attention_mask=mask, do_sample=False, use_cache=False))
    alone = generate(model, ids[1:2, -11:], do_sample=False)
    assert torch.equal(cached[1, -11 - NEW :], alone[0])


def test_greedy_in_half_precision(kind: str, half: tuple[PreTrainedModel, torch.dtype, bool]) -> None:
    base, dtype, mixed = half
    model = awake(base if mixed else base.to(dtype), kind, push=0.03)
    ids, mask = tokens(3, PROMPT), left_mask([PROMPT, 11, 3], PROMPT)
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=mixed):
        found = generate(model, ids, attention_mask=mask, do_sample=False, eos_token_id=None, min_new_tokens=0)
        cache, new = DynamicCache(config=model.config), ids
        for _ in range(NEW):
            where = positions(mask)[:, -new.shape[1] :]
            out = model(new, attention_mask=mask, position_ids=where, past_key_values=cache, logits_to_keep=1).logits
            new = out[:, -1].float().argmax(-1, keepdim=True)
            ids, mask = torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
    assert torch.equal(found, ids)


@pytest.mark.parametrize("way", WAYS)
def test_other_ways(partner: PreTrainedModel, kind: str, way: str) -> None:
    model = awake(partner.double(), kind, 3, 2)  # a window that new tokens leave: from there on beams differ in state
    ids, mask = tokens(2, PROMPT), left_mask([PROMPT, 7], PROMPT)
    how = {**WAYS[way], "attention_mask": mask, "return_dict_in_generate": True, "output_scores": True}
    cached, plain = generate(model, ids, **how), generate(model, ids, use_cache=False, **how)
    assert torch.equal(cached.sequences, plain.sequences)
    if "num_beams" in how:  # they mind a wrong state even where the tokens do not
        close(cached.sequences_scores, plain.sequences_scores, 1e-6)


def test_a_second_turn_on_the_returned_cache(partner: PreTrainedModel, kind: str) -> None:
    model = awake(partner, kind, push=0.03)
    first = model.generate(tokens(2, 5), **LENGTH, do_sample=False, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, tokens(2, 6, seed=1)], 1)
    second = generate(model, longer, do_sample=False, past_key_values=first.past_key_values)
    assert torch.equal(second, generate(model, longer, do_sample=False, use_cache=False))


def test_a_prompt_in_chunks(partner: PreTrainedModel, kind: str) -> None:
    model = awake(partner, kind, push=0.03)
    ids, mask = tokens(2, 23), left_mask([23, 6], 23)
    whole = generate(model, ids, attention_mask=mask, do_sample=False)
    cache = DynamicCache()  # the first releases of transformers 5 make none of their own here
    chunks = {"prefill_chunk_size": 9, "past_key_values": cache}
    assert torch.equal(generate(model, ids, attention_mask=mask, do_sample=False, **chunks), whole)


def test_from_embeddings(partner: PreTrainedModel, kind: str) -> None:
    model = awake(partner, kind, push=0.03)
    ids = tokens(2, PROMPT)
    new = generate(model, None, inputs_embeds=model.get_input_embeddings()(ids), do_sample=False)
    assert torch.equal(new, generate(model, ids, do_sample=False)[:, PROMPT:])


def test_a_short_prompt_that_grows_past_the_capacity(one_model: Any) -> None:
    ids = tokens(2, 3)
    assert torch.equal(
        generate(one_model, ids, do_sample=False, max_new_tokens=12),
        generate(one_model, ids, do_sample=False, max_new_tokens=12, use_cache=False),
    )
