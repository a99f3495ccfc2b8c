"""A base's configuration without its weights: from a folder, a file, the Hub, or the table of published shapes here."""

from pathlib import Path
from typing import Any

from transformers import Qwen2Config

from patches.errors import RetrofitError, nearest
from retrofit.loading import load_config

# hidden, layers, query heads, key/value heads, feed-forward, vocabulary, tied: the config.json of each on the Hub
_QWEN25 = {
    "Qwen2.5-3B": (2048, 36, 16, 2, 11008, 151936, True),
    "Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064, False),
    "Qwen2.5-14B": (5120, 48, 40, 8, 13824, 152064, False),
}
# the bases of the AHN paper; an Instruct model has the shape of its base
BUILT_IN = {name + suffix: shape for name, shape in _QWEN25.items() for suffix in ("", "-Instruct")}


def built_in(name: str) -> Any:
    """The configuration of a base in the table, in bfloat16, by its name (any case, with or without ``Qwen/``).

    Raises:
        RetrofitError: it is not in the table.
    """
    known = {key.lower(): shape for key, shape in BUILT_IN.items()}
    key = name.lower().removeprefix("qwen/")
    if key not in known:
        raise RetrofitError(
            f"the shape of {name!r} is not built in{nearest(name, BUILT_IN)}: built in are {', '.join(BUILT_IN)}"
        )
    hidden, layers, heads, kv_heads, ffn, vocabulary, tied = known[key]
    return Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ffn,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
        dtype="bfloat16",
    )


def base_config(source: str) -> tuple[Any, str]:
    """The configuration behind ``source``, and in words where it came from.

    Args:
        source: a checkpoint's folder, its ``config.json``, a Hub id, or a name of :data:`BUILT_IN`. What lies here
            comes first, then the Hub; the table stands in for a Hub that cannot be reached.

    Raises:
        RetrofitError: none of them, or a family that is not supported.
    """
    path = Path(source)
    if path.is_file() and path.name == "config.json":
        return load_config(str(path.parent)), f"read from {source}"
    table = {name.lower() for name in BUILT_IN}
    if not path.exists() and source.lower() in table:
        return built_in(source), "published shape, from the built-in table"
    try:
        return load_config(source), f"read from {source}"
    except RetrofitError:
        if source.lower().removeprefix("qwen/") not in table or path.exists():
            raise
        return built_in(source), "the Hub cannot be reached: published shape, from the built-in table"
