"""A base's fingerprint: enough to tell that an adapter was made for another model, small enough for its config."""

import base64
import logging
from typing import Any

import torch

from patches.errors import RetrofitError

from .families import base_type
from .quantised_bases import numbers, quantisation

logger = logging.getLogger(__name__)

SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
# configuration fields that change what the base computes
FIELDS = (*SHAPE, "hidden_act", "rms_norm_eps", "tie_word_embeddings", "rope_parameters")
SAMPLES = 16  # values of every weight
ULP = 2.0**-7  # a step of bfloat16, relative; loading through float16 may round twice and differ by one


def fingerprint(model: Any) -> dict[str, Any]:
    """Configuration fields that matter, and a few values of every weight of the base, rounded to bfloat16.

    Args:
        model: a base or a patched model; memories are left out.

    Returns:
        ``{"config": {...}, "samples": base64 text}``; the same for any dtype the base is loaded in, up to rounding.
    """
    config = {"model_type": base_type(model.config), **{name: getattr(model.config, name, None) for name in FIELDS}}
    raw = _samples(model).view(torch.uint8).numpy().tobytes()
    found = {"config": config, "samples": base64.b64encode(raw).decode()}
    how = quantisation(model)
    return found if how is None else {**found, "quantised": how}


def difference(expected: dict[str, Any], model: Any) -> str:
    """What makes ``model`` another base than the one ``expected`` was taken from, in words; empty if nothing does.

    Raises:
        RetrofitError: ``expected`` is not what :func:`fingerprint` returns.
    """
    found = fingerprint(model)
    try:
        settings, theirs = dict(expected["config"]), _decode(expected["samples"])
    except (KeyError, TypeError, ValueError):
        raise RetrofitError("the fingerprint of the adapter's base is damaged: fetch the adapter again") from None
    for name, value in settings.items():
        if found["config"].get(name) != value:
            return f"its {name} is {found['config'].get(name)}, not {value}"
    ours = _decode(found["samples"])
    if theirs.shape != ours.shape:
        return "its weights are not the same ones"
    was, now = (
        f"quantised ({given['quantised']})" if given.get("quantised") else "not quantised"
        for given in (expected, found)
    )
    if was != now:
        logger.warning(
            f"the adapter was fitted to a base that was {was} and this one is {now}: its weights are not compared, and "
            "the memory reads slightly different keys from those it was fitted to"
        )
        return ""
    theirs, ours = theirs.view(-1, SAMPLES), ours.view(-1, SAMPLES)
    # a float16 copy differs by one step of bfloat16 in a value of sixteen (rounded twice), and flushes what is tiny
    far = (theirs - ours).abs() > 1.01 * ULP * theirs.abs() + 1e-4 * (theirs.abs() < 1e-4)
    moved = (theirs != ours).float()
    changed = far.any(1) | (moved.mean(1) > 0.5)
    if changed.any() or moved.mean() > 0.2:
        count = int(changed.sum()) or "many"
        return f"{count} of its {len(changed)} weights have other values (a fine-tune, or another model)"
    return ""


def _samples(model: Any) -> torch.Tensor:
    """``SAMPLES`` values of each weight, spread evenly over it, in the order of the names; bfloat16, on the CPU."""
    picked = []
    # peft's LoRA layers keep the base's weight as ``base_layer``: the base is the same one with and without them
    named = {name.replace(".base_layer.", "."): parameter for name, parameter in model.named_parameters()}
    for name, parameter in sorted(named.items()):
        if ".memory." in name or ".lora_" in name:
            continue
        flat = numbers(parameter.detach()).flatten()
        index = torch.linspace(0, flat.numel() - 1, SAMPLES, dtype=torch.float64).long()
        picked.append(flat[index.to(flat.device)].to("cpu", torch.bfloat16))
    return torch.cat(picked)


def _decode(samples: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(samples)), dtype=torch.bfloat16).float()
