"""Every memory by name. Adding one is a file of its own and a line here."""

from dataclasses import asdict
from typing import Any

from .ahn import DeltaNet, GatedDeltaNet, Mamba2, SharedDeltaNet, SharedGatedDeltaNet, SharedMamba2
from .compressive import Compressive
from .config import MemoryConfig
from .errors import one_of
from .expected import ExpectedAttention
from .h2o import H2O
from .infini import InfiniAttention
from .joint import JointMemory
from .joint_rows import JointRows
from .kvm import KVM
from .memory import Memory, WindowOnly
from .tensor_cache import TensorCache
from .tova import Tova

KINDS: dict[str, type[Memory]] = {
    kind.kind: kind
    for kind in (
        WindowOnly,
        GatedDeltaNet,
        DeltaNet,
        Mamba2,
        Tova,
        H2O,
        JointMemory,
        TensorCache,
        InfiniAttention,
        KVM,
        Compressive,
        ExpectedAttention,
        JointRows,
        SharedGatedDeltaNet,
        SharedDeltaNet,
        SharedMamba2,
    )
}


def find_kind(name: str) -> type[Memory]:
    """The memory class called ``name``.

    Raises:
        RetrofitError: there is none.
    """
    one_of("memory", name, *KINDS)
    return KINDS[name]


def new_memory(
    kind: str,
    window: int,
    sinks: int,
    layers: list[int] | None = None,
    others: str = "full",
    options: dict[str, Any] | None = None,
    **more: Any,
) -> MemoryConfig:
    """The configuration of a memory that is yet to be made; it names every option, since a default may change one day.

    Args:
        kind, window, sinks, layers, others, more: as :class:`MemoryConfig` has them.
        options: those that are not to have their default.

    Raises:
        RetrofitError: there is no such kind, it has no such option, or a value is out of range.
    """
    cls = find_kind(kind)
    every = asdict(cls.read_options(options or {}))
    made = MemoryConfig(kind, window, sinks, layers, others, every, **more)
    for other in made.by_layer.values():
        cls.read_options({**every, **{name: value for name, value in other.items() if name != "window"}})
    return made


def build_memory(config: Any, memory: MemoryConfig) -> Memory:
    """One layer's memory in a model with transformers configuration ``config``, not yet initialised.

    ``memory`` is one of :meth:`MemoryConfig.of_layers`; it may have been saved.
    """
    cls = find_kind(memory.kind)
    return cls(config, memory.window, memory.sinks, cls.read_options(memory.options, saved=True))
