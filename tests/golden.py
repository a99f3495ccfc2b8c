"""Everything that a change of patches/ must leave as it is, written to a file once and compared after each step.

    python -m tests.golden write before.pt      # logits, states, gradients, tokens, exports of every kind and family
    python -m tests.golden compare before.pt    # prints what differs, and by how much; exits with 1 if anything does

The file belongs outside the tree, and to one machine: another CPU rounds otherwise.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

import retrofit
from patches.kinds import KINDS
from tests.conftest import FAMILIES, OTHERS, tiny_base
from tests.helpers import SIZE, S, W, awake, feed, left_mask, logits, positions, tokens

DTYPES = (torch.float32, torch.bfloat16)
LENGTH, PIECES = 40, (13, 9, 1, 1, 1, 1, 4, 10)


def record_model(model: Any) -> dict[str, Any]:
    """What a model computes, by name."""
    ids, lengths = tokens(3, LENGTH), (LENGTH, 31, 5)
    mask = left_mask(lengths, LENGTH)
    real, where = mask.bool(), positions(mask)
    found = {"logits": logits(model, ids), "padded": logits(model, ids, mask, where)[real]}
    pieces, cache = feed(model, ids, PIECES)
    found |= {"pieces": pieces, "cache bytes": retrofit.cache_bytes(cache)}
    for number, layer in enumerate(cache.layers):
        found |= {f"state {number} {name}": x for name, x in getattr(layer, "state", {}).items()}
    found["padded pieces"] = feed(model, ids, PIECES, mask, where=where)[0][real]
    cache = DynamicCache(config=model.config)
    given = {"attention_mask": mask, "past_key_values": cache, "do_sample": False, "pad_token_id": 0}
    found["tokens"] = model.generate(ids, **given, max_new_tokens=12)
    model.zero_grad()
    out = model(ids, use_cache=False).logits.float()
    if out.requires_grad:
        (out * torch.linspace(-1, 1, out.shape[-1])).mean().backward()
    found |= {f"gradient {name}": p.grad for name, p in model.memory_parameters() if p.grad is not None}
    return found


def record_export(model: Any) -> dict[str, Any]:
    """Names of an export's files, and bytes of its weights."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = sorted(path.relative_to(folder) for path in Path(folder).rglob("*") if path.is_file())
        weights = sum((Path(folder) / path).stat().st_size for path in files if path.suffix == ".safetensors")
    return {"files": [str(path) for path in files if path.suffix != ".py"], "weights": weights}


def record() -> dict[str, Any]:
    """All of it, by kind, family, dtype and name."""
    found = {}
    for family in (*FAMILIES, *OTHERS):
        for dtype in DTYPES:
            base = tiny_base(family).to(dtype)
            for kind in KINDS:
                for options in ({}, SIZE[kind]) if kind in SIZE else ({},):
                    model = awake(base, kind, W, S, **options)
                    parts = record_model(model) | (record_export(model) if dtype == torch.float32 else {})
                    name = f"{kind}{'' if not options else ' sized'} {family} {str(dtype)[6:]}"
                    found |= {f"{name}: {part}": value for part, value in parts.items()}
    return found


def describe_difference(before: Any, now: Any) -> str | None:
    """How two values differ, or None."""
    if not isinstance(before, torch.Tensor) or not isinstance(now, torch.Tensor):
        return None if before == now else f"{before} -> {now}"
    if before.shape != now.shape or before.dtype != now.dtype:
        return f"{tuple(before.shape)} {before.dtype} -> {tuple(now.shape)} {now.dtype}"
    if torch.equal(before, now):
        return None
    return f"by up to {(before.double() - now.double()).abs().max():.1e}, of {before.double().abs().max():.1e}"


def main(verb: str, path: str) -> int:
    torch.set_num_threads(1)
    if verb == "write":
        torch.save(record(), path)
        return 0
    before, now = torch.load(path), record()
    names = sorted({*before, *now})
    differing = {name: describe_difference(before.get(name), now.get(name)) for name in names}
    for name, how in differing.items():
        if how:
            print(f"{name}: {how}")
    return any(differing.values())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
