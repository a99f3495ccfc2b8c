"""What tests share: memories that are awake, models fed in pieces, checksums, a process that starts from nothing."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import retrofit
from distill.data import split
from distill.data.split import Split
from distill.recipe import DistillKeys
from patches.kinds import KINDS

ROOT = Path(__file__).parents[1]
W, S = 8, 2

TRAINABLE = [name for name, kind in KINDS.items() if kind.trainable]
# sinks + window, and a memory that adds nothing until it was trained; the others (row memories) are visible at once
ON_A_WINDOW = [name for name, kind in KINDS.items() if kind.writes_back]

# an option that makes a kind's state larger or smaller
SIZE: dict[str, dict[str, Any]] = {
    "kvm": {"rows": 7},
    "expected": {"rows": 3},
    "joint-rows": {"rows": 3},
    "compressive": {"rows": 3, "ratio": 2},
    "h2o": {"heavy": 3},
    "joint": {"features": 6},
    "tensor-cache": {"slots": 2},
}
# bases unlike the default one (2 query heads to a key head of 16, no biases but Qwen2's, untied)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one wide kv head, biases, yarn": (
        "Llama",
        {
            "num_key_value_heads": 1,
            "head_dim": 32,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "no grouping, narrow heads, tied": (
        "Qwen3",
        {"num_key_value_heads": 4, "head_dim": 8, "tie_word_embeddings": True},
    ),
}


def load_rows(data: Any, tokenizer: Any, **keys: Any) -> Split:
    """What a run reads of ``data`` with these keys of a recipe."""
    return split.load_rows(DistillKeys(data=str(data), **keys), tokenizer)


def awaken(model: Any, push: float = 0.1) -> Any:
    """Push every memory parameter at random: a fresh memory adds exactly nothing, which would hide any mistake.

    At ``push=0.1`` the memory moves a logit by about as much as logits differ; float32 then rounds to about 2e-5 behind
    the memories' norms, so tests either hold float64 to 1e-9 or push less.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in model.memory_parameters():
            if parameter.is_floating_point():  # bits of a code are whole numbers
                parameter.add_(push * torch.randn(parameter.shape, generator=generator).to(parameter))
    return model


def awake(base: Any, kind: str, window: int = W, sinks: int = S, *, push: float = 0.1, **options: Any) -> Any:
    """``base`` patched, with a memory that shows."""
    torch.manual_seed(0)
    return awaken(retrofit.patch(base, kind, window, sinks, **options), push)


def capacity(model: Any) -> int:
    """Tokens of a sequence up to which the model is its base."""
    return min(memory.capacity for memory in model.model.memories().values())


def state_bytes(model: Any) -> int:
    """Bytes of one sequence's state in the first layer that has a memory."""
    return next(iter(model.model.memories().values())).state_bytes(model.dtype)


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    """Random ids (rows, length), none of them special."""
    return torch.randint(3, 101, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_mask(lengths: Iterable[int], total: int) -> Tensor:
    """A 2D attention mask whose rows end with so many real tokens each."""
    lengths = list(lengths)
    return (torch.arange(total) >= total - torch.tensor(lengths)[:, None]).long()


def positions(mask: Tensor) -> Tensor:
    """Position ids as ``generate`` makes them: counted from the first real token, something else in the padding."""
    return (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)


@torch.no_grad()
def logits(model: Any, ids: Tensor, mask: Tensor | None = None, where: Tensor | None = None) -> Tensor:
    """Logits (B, T, V) in one call without a cache; ``where`` gives the positions, else they count from the left."""
    return model(ids, attention_mask=mask, position_ids=where, use_cache=False).logits


@torch.no_grad()
def feed(
    model: Any,
    ids: Tensor,
    sizes: Iterable[int],
    mask: Tensor | None = None,
    cache: Any = None,
    where: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Logits (B, T, V) of ``ids`` given in pieces of ``sizes`` tokens through one cache, and the cache.

    ``mask`` and ``where`` (positions) cover the tokens that ``cache`` already holds, too.
    """
    cache = DynamicCache(config=model.config) if cache is None else cache
    before, start, out = cache.get_seq_length(), 0, []
    for size in sizes:
        end = start + size
        seen = None if mask is None else mask[:, : before + end]
        at = None if where is None else where[:, before + start : before + end]
        out.append(model(ids[:, start:end], attention_mask=seen, position_ids=at, past_key_values=cache).logits)
        start = end
    assert start == ids.shape[1], "the sizes must add up to the tokens"
    return torch.cat(out, 1), cache


def close(a: Tensor, b: Tensor, tolerance: float | None = None) -> None:
    """Assert equality up to ``tolerance``, absolute; 1e-9 in float64 and 1e-5 in float32 if not given."""
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance or (1e-9 if a.dtype == torch.float64 else 1e-5))


def checksum(model: Any) -> dict[str, int]:
    """A number per parameter of the base that changes with any bit of it."""
    found = {}
    for name, parameter in model.named_parameters():
        if ".memory." not in name:
            bits = parameter.detach().cpu().contiguous().view(torch.uint8).long().flatten()
            found[name] = int((bits * (torch.arange(len(bits)) % 8191 + 1)).sum())
    return found


def fresh_process(code: str, folder: Path, *, hide: Iterable[str] = (), path: Path | str | None = None) -> str:
    """Run ``code`` in a new interpreter, offline, in ``folder``; returns what it printed.

    Args:
        code: Python; torch runs on one thread in it.
        folder: where it runs; transformers keeps remote code below it.
        hide: top-level modules that cannot be imported there.
        path: folder to import from, before what is installed; or several, as in PYTHONPATH.
    """
    # None in sys.modules makes both import and find_spec say that there is no such module
    hidden = f"import sys\nsys.modules.update(dict.fromkeys({list(hide)!r}))\n"
    command = [sys.executable, "-c", f"{hidden}import torch\ntorch.set_num_threads(1)\n{code}"]
    quiet = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(folder / "modules"), "TRANSFORMERS_VERBOSITY": "error"}
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | quiet
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
