"""The memory's configuration: what is saved as ``config.memory``, checked in one place."""

import re
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from .errors import RetrofitError, nearest, one_of
from .options import whole_number

# rotary tables that change with the length of the input: a key cached under one table would be read under another
UNSUPPORTED_ROPE = ("dynamic", "longrope")
BY_LAYER = 'write it as {"0": {"window": 64}, "4-7": {"window": 256}}: layers, and the settings that they have'


@dataclass
class MemoryConfig:
    """How each attention layer forgets.

    Attributes:
        kind: name of the memory, one of ``patches.kinds.KINDS``.
        window: tokens kept exactly, the current one included (W >= 1). Never counts the sinks.
        sinks: first tokens of a sequence kept exactly for ever (S >= 0).
        layers: indices of the layers that get the memory; None means all. Layers that slide in a base that also has
            others stay as they are.
        others: what the remaining layers do: ``"full"`` attention, or sinks + ``"window"`` without a memory.
        options: the memory's own options; unknown names are refused by its ``Options`` class.
        base: name (or path) of the base checkpoint, for the adapter and the model card.
        base_revision: commit of the base on the Hub, if known.
        rotary_dtype: dtype that the base's rotary frequencies were rounded to, if it was cast as a whole with
            ``.to(dtype)`` (which ``from_pretrained`` never does); an export then rounds them likewise and gives the
            same logits.
        by_layer: what single layers have otherwise, by their number (``"3"``) or numbers (``"4-7"``): another
            ``window``, and other options of the memory.
    """

    kind: str
    window: int
    sinks: int = 0
    layers: list[int] | None = None
    others: str = "full"
    options: dict[str, Any] = field(default_factory=dict)
    base: str | None = None
    base_revision: str | None = None
    rotary_dtype: str | None = None
    by_layer: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_window(self.window, self.sinks)
        one_of("others", self.others, "full", "window")
        if self.layers is not None:
            self.layers = _read_indices(self.layers)
        if not isinstance(self.kind, str) or not isinstance(self.options, dict):
            raise RetrofitError("the memory's configuration needs a name as its kind and a mapping as its options")
        if self.rotary_dtype is not None:
            one_of("rotary_dtype", self.rotary_dtype, "float16", "bfloat16")
        if not isinstance(self.by_layer, dict):
            raise RetrofitError(f"by_layer={self.by_layer!r}: {BY_LAYER}")
        for other in self.named_layers().values():
            check_window(other.get("window", self.window), self.sinks)
        self.by_layer = {str(key): value for key, value in self.by_layer.items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "MemoryConfig":
        """Read what :meth:`to_dict` wrote.

        Raises:
            RetrofitError: a key is missing or unknown, or a value is out of range.
        """
        if not isinstance(data, dict):
            raise RetrofitError(f"the memory's configuration must be a mapping, not {type(data).__name__}")
        known = {f.name for f in fields(cls)}
        for key in data:
            if key not in known:
                raise RetrofitError(f"unknown key {key!r} in the memory's configuration{nearest(key, known)}")
        for key in ("kind", "window"):
            if key not in data:
                raise RetrofitError(f"the memory's configuration has no {key!r}")
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary that JSON can hold; where all layers are alike, it does not speak of single ones."""
        return {key: value for key, value in asdict(self).items() if key != "by_layer" or value}

    def patched_layers(self, config: Any) -> list[int]:
        """Indices of the layers that carry the memory, in a base (or patched model) with this transformers ``config``.

        Raises:
            RetrofitError: an index is not a layer of this base, or of one that keeps its own window.
        """
        num_layers, own = config.num_hidden_layers, keep_their_window(config)
        if self.layers is None:
            return [index for index in range(num_layers) if index not in own]
        for index in self.layers:
            if index in own:
                raise RetrofitError(
                    f"layers={self.layers}: layer {index} of this base has a window of its own and keeps it: leave it "
                    "out"
                )
            if not 0 <= index < num_layers:
                raise RetrofitError(
                    f"layers={self.layers}: {index!r} is not a layer of this base (0 to {num_layers - 1})"
                )
        return self.layers

    def of_layers(self, config: Any) -> list["MemoryConfig | None"]:
        """What each layer has: a configuration that is alike for all layers; None for one that stays as it is.

        Raises:
            RetrofitError: as above; ``by_layer`` names a layer that stays as it is, or options of one without a memory.
        """
        own, patched = keep_their_window(config), set(self.patched_layers(config))
        layers = range(config.num_hidden_layers)
        bounded = patched if self.others == "full" else set(layers) - own
        named = self.named_layers()
        for index, other in named.items():
            if index not in layers:
                raise RetrofitError(f"by_layer: {index} is not a layer of this base (0 to {len(layers) - 1})")
            if index not in bounded:
                raise RetrofitError(f"by_layer: layer {index} keeps the base's own attention: leave it out")
            if index not in patched and other.keys() - {"window"}:
                raise RetrofitError(f"by_layer: layer {index} has no memory: give it a window and nothing else")

        def of_layer(index: int) -> MemoryConfig:
            options = dict(named.get(index, {}))
            alike = replace(self, window=options.pop("window", self.window), by_layer={})
            if index in patched:
                return replace(alike, options={**self.options, **options})
            return alike.window_only()

        return [of_layer(index) if index in bounded else None for index in layers]

    def windows(self, config: Any) -> list[int]:
        """W of each layer that has one."""
        return [one.window for one in self.of_layers(config) if one is not None]

    def window_only(self, window: int | None = None) -> "MemoryConfig":
        """The same layers, sinks and windows without a memory; with ``window``, that one in all layers."""
        bare = replace(self, kind="none", options={})
        if window is not None:
            return replace(bare, window=window, by_layer={})
        windows = {key: {"window": other["window"]} for key, other in self.by_layer.items() if "window" in other}
        return replace(bare, by_layer=windows)

    def named_layers(self) -> dict[int, dict[str, Any]]:
        """``by_layer`` by the number of each layer that it names.

        Raises:
            RetrofitError: a key is no number or range of numbers, a value no mapping, or a layer is named twice.
        """
        found: dict[int, dict[str, Any]] = {}
        for key, other in self.by_layer.items():
            ends = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", str(key))
            named = range(int(ends[1]), int(ends[2] or ends[1]) + 1) if ends else range(0)
            if not named or not isinstance(other, dict) or not all(isinstance(name, str) for name in other):
                raise RetrofitError(f"by_layer: {key!r}: {other!r} is not understood: {BY_LAYER}")
            for index in named:
                if index in found:
                    raise RetrofitError(f"by_layer: layer {index} is named twice: name it once")
                found[index] = other
        return found


def _read_indices(layers: Any) -> list[int]:
    """Layer indices in order, each once."""
    if not isinstance(layers, list | tuple | range | set) or not all(type(index) is int for index in layers):
        raise RetrofitError(f"layers={layers!r}: give a list of layer indices, such as [0, 2]")
    if not layers:
        raise RetrofitError("layers=[] gives the memory to no layer: name some layers, or leave it out for all of them")
    return sorted(set(layers))


def check_window(window: int, sinks: int) -> None:
    """Refuse, by ``RetrofitError``, a ``window`` that is no whole number above 0 or ``sinks`` that are below 0."""
    whole_number("window", window)
    whole_number("sinks", sinks, least=0)


def native_window(config: Any) -> int | None:
    """Tokens that every layer of a base attends to at most; None if there is a layer without such a limit."""
    return None if keep_their_window(config) else getattr(config, "sliding_window", None)


def keep_their_window(config: Any) -> set[int]:
    """The layers with a sliding window of a base that also has layers with full attention."""
    types = getattr(config, "layer_types", None) or []
    if "full_attention" not in types:
        return set()
    return {index for index, kind in enumerate(types) if kind == "sliding_attention"}


def check_base(config: Any, memory: MemoryConfig) -> None:
    """Refuse a base (or patched model) whose attention the window of ``memory`` cannot stand for.

    Raises:
        RetrofitError: rotary scaling that depends on the input's length, a native sliding window shorter than ours, or
            an index that is not a layer of this base.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type in UNSUPPORTED_ROPE:
        raise RetrofitError(
            f"this base uses {rope_type!r} rotary scaling, which re-scales cached keys as the input grows: "
            "a bounded memory cannot follow it; use a base with default, linear, yarn or llama3 scaling"
        )
    widest = max(memory.windows(config), default=memory.window)
    native = native_window(config)
    if native is not None and widest + memory.sinks > native:
        raise RetrofitError(
            f"this base attends to {native} tokens only: choose window + sinks <= {native} (now {widest} + "
            f"{memory.sinks})"
        )
