"""`retrofit bench decode`: time per token and cache bytes of a patched model at a short and at a long context."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import retrofit
from patches.errors import RetrofitError
from patches.kinds import KINDS, find_kind
from retrofit.bench.timing import interleaved, ratios, spread

VOCABULARY = 1024  # small: the head costs the same at every context
HEAD_DIM = 64

COLUMNS = {
    "name": ("", ""),
    "context": ("context", ",d"),
    "seconds": ("seconds per token", ".5f"),
    "seconds_low": ("quartile", ".5f"),
    "seconds_high": ("quartile", ".5f"),
    "cache_bytes": ("cache bytes", ",.10g"),
}


@dataclass(frozen=True)
class Case:
    """A random Qwen2 of this shape, memories (or ``"all"``), and two contexts (tokens already read) to decode at."""

    memories: tuple[str, ...] = ("ahn-gdn",)
    window: int = 512
    sinks: int = 4
    layers: int = 4
    hidden: int = 256
    short: int = 1024
    long: int = 8192

    def __post_init__(self) -> None:
        if not self.window + self.sinks < self.short < self.long:
            exact = self.window + self.sinks
            raise RetrofitError(f"contexts of {self.short} and {self.long}: choose them so that {exact} < short < long")
        check_hidden(self.hidden)
        named_kinds(self.memories)


def run(case: Case, repeats: int = 64) -> list[dict[str, Any]]:
    """Seconds per token (``repeats`` of them) and bytes of cache, full attention beside patched models.

    Returns:
        For full attention, `none` and each memory: a row per context with ``context``, ``seconds`` (median; ``_low``,
        ``_high``) and ``cache_bytes``, then a row ``long / short`` with the ratios of both.
    """
    base = random_base(case.layers, case.hidden, 2 * case.long)
    models = {"full attention": base}
    models |= {kind: retrofit.patch(base, kind, case.window, case.sinks) for kind in named_kinds(case.memories)}
    caches, arms = {}, {}
    for name, model in models.items():
        for context in (case.short, case.long):
            caches[name, context], arms[f"{name} at {context}"] = _prefilled(model, context)
    seconds = interleaved(arms, repeats)
    rows: list[dict[str, Any]] = []
    for name in models:
        at = {context: seconds[f"{name} at {context}"] for context in (case.short, case.long)}
        bytes_ = {context: retrofit.cache_bytes(caches[name, context]) for context in at}
        rows += [
            {"name": name, "context": context, **spread("seconds", at[context]), "cache_bytes": bytes_[context]}
            for context in at
        ]
        ratio = spread("seconds", ratios(at[case.long], at[case.short]))
        rows.append(
            {"name": f"{name}: long / short", **ratio, "cache_bytes": round(bytes_[case.long] / bytes_[case.short], 4)}
        )
    return rows


def check_hidden(hidden: int) -> None:
    """Refuse a width that is no whole number of pairs of heads."""
    if hidden % (2 * HEAD_DIM):
        raise RetrofitError(f"hidden={hidden}: it must be a multiple of {2 * HEAD_DIM}")


def named_kinds(memories: Sequence[str]) -> list[str]:
    """The kinds that these names stand for, `none` first.

    Raises:
        RetrofitError: there is no such kind.
    """
    kinds = [kind for name in memories for kind in (KINDS if name == "all" else [find_kind(name).kind])]
    return list(dict.fromkeys(["none", *kinds]))


def random_base(layers: int, hidden: int, positions: int) -> PreTrainedModel:
    """A randomly initialised Qwen2 in eval mode: speed does not depend on what the weights are."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_DIM,  # two to a key/value head
        num_key_value_heads=hidden // (2 * HEAD_DIM),
        max_position_embeddings=positions,
    )
    return Qwen2ForCausalLM(config).eval()


def stepper(model: Any, ids: Tensor, cache: Any) -> Callable[[], None]:
    """A function that decodes one more token on ``cache``: each call that of ``ids`` (1, T) which comes first."""

    def step() -> None:
        with torch.no_grad():
            model(ids[:, :1], past_key_values=cache, use_cache=True)

    return step


def _prefilled(model: Any, context: int) -> tuple[Any, Callable[[], None]]:
    """A cache that has read ``context`` tokens, and a function that decodes one more on it."""
    generator = torch.Generator().manual_seed(context)
    ids = torch.randint(VOCABULARY, (1, context), generator=generator)
    with torch.no_grad():
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    return cache, stepper(model, ids, cache)
