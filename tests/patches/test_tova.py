"""TOVA: the reference's numbers, the fast loop against the plain one, its options and what it refuses."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache

import retrofit
from patches.tova import squeezed

FEEDS = {"prefill20_decode": [20] + [1] * 16, "prefill6_decode": [6] + [1] * 30, "token_by_token": [1] * 36}


def feed(model, ids, sizes, **kwargs):
    """Logits of all tokens, fed in calls of ``sizes`` tokens, and what each layer keeps after each call."""
    cache, logits, kept, at = DynamicCache(), [], [], 0
    for size in sizes:
        logits.append(model(ids[:, at : at + size], past_key_values=cache, **kwargs).logits)
        at += size
        kept.append([layer.state.get("positions") for layer in cache.layers])
    return torch.cat(logits, 1), kept


@pytest.fixture(scope="module")
def oracle(shared: Path):
    folder = shared / "oracles" / "tova_llama"
    runs = json.loads((folder / "tova.json").read_text())["runs"]
    return AutoModelForCausalLM.from_pretrained(folder), load_file(folder / "tova.safetensors"), runs, folder


@pytest.mark.parametrize("feeding", FEEDS)
@pytest.mark.parametrize("size", [8, 12])
@torch.no_grad()
def test_logits_and_kept_tokens_are_the_references(oracle, feeding, size):
    base, tensors, runs, _ = oracle
    model = retrofit.patch(base, memory="tova", window=size, prefill="full")
    logits, kept = feed(model, tensors["input_ids"], FEEDS[feeding])
    torch.testing.assert_close(logits, tensors[f"logits_{feeding}_{size}"], atol=1e-5, rtol=0)
    log = runs[f"{feeding}_{size}"]
    for i, entry in enumerate(log):
        ours = kept[i // 3][entry["layer"]]
        if ours is None:
            assert entry["n_keys"] <= size
            assert entry["kept"] == entry["cand"]
        else:
            assert ours[:, 0].tolist() == entry["kept"]
    assert len(log) == 3 * len(kept)


@torch.no_grad()
def test_the_default_is_the_reference_fed_token_by_token(oracle):
    base, tensors, *_ = oracle
    model = retrofit.patch(base, memory="tova", window=8)
    logits = model(tensors["input_ids"]).logits
    torch.testing.assert_close(logits, tensors["logits_token_by_token_8"], atol=1e-5, rtol=0)


@torch.no_grad()
def test_generated_tokens_are_the_references(oracle):
    base, tensors, _, folder = oracle
    expected = load_file(folder / "generate_size8.safetensors")["generated"]
    model = retrofit.patch(base, memory="tova", window=8, prefill="full")
    ids = tensors["input_ids"][:, :20]
    assert torch.equal(expected[:, :20], ids)
    out = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(out, expected)


def test_squeezed_positions():
    gaps = torch.tensor([[1, 10, 11, 16, 1000, 70000]])
    steps = squeezed(torch.cat([torch.zeros(1, 1, dtype=torch.long), gaps.cumsum(1)], 1)).diff(dim=1)
    expected = [[1, 10, 0.875, 1.02, 1.93, 2.41]]  # the paper's function at these gaps
    torch.testing.assert_close(steps, torch.tensor(expected), atol=6e-3, rtol=0)


@torch.no_grad()
def test_squeezed_positions_change_nothing_while_gaps_are_short(make_base):
    # with one row of its own choice, and the newest protected, no gap between rows is longer than 10 up to token 12
    base, ids = make_base("Llama"), torch.randint(3, 101, (2, 40))
    true, lnln = (
        retrofit.patch(base, memory="tova", window=1, sinks=3, protect_newest=True, positions=positions)(ids).logits
        for positions in ("true", "lnln")
    )
    torch.testing.assert_close(lnln[:, :13], true[:, :13], atol=1e-5, rtol=0)
    assert not torch.allclose(lnln[:, 16:], true[:, 16:], atol=1e-3)


@torch.no_grad()
def test_options_are_saved_with_the_model(make_base, tmp_path):
    model = retrofit.patch(make_base("Qwen2"), memory="tova", window=4, scope="head", positions="lnln")
    ids = torch.randint(3, 101, (1, 30))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.memory["options"].items() >= {"scope": "head", "positions": "lnln"}.items()
    assert torch.equal(again(ids).logits, model(ids).logits)
