"""Every memory by name. Adding one is a file of its own and a line here."""

from dataclasses import asdict
from typing import Any

from .ahn import DeltaNet, GatedDeltaNet, Mamba2
from .compressive import Compressive
from .config import MemoryConfig
from .errors import one_of
from .expected import ExpectedAttention
from .h2o import H2O
from .infini import InfiniAttention
from .joint import JointMemory
from .joint_rows import JointRows
from .kvm import KVM
from .memory import Memory
from .tensor_cache import TensorCache
from .tova import Tova
from .window_only import WindowOnly

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
    **origin: Any,
) -> MemoryConfig:
    """The configuration of a memory that is yet to be made; it names every option, since a default may change one day.

    Args:
        kind, window, sinks, layers, others, origin: as :class:`MemoryConfig` has them.
        options: those that are not to have their default.

    Raises:
        RetrofitError: there is no such kind, it has no such option, or a value is out of range.
    """
    every = asdict(find_kind(kind).read_options(options or {}))
    return MemoryConfig(kind, window, sinks, layers, others, every, **origin)


def build_memory(config: Any, memory: MemoryConfig, kind: str) -> Memory:
    """A memory of ``kind`` for one layer of a model with transformers configuration ``config``, not yet initialised.

    ``memory`` may have been saved, or be :func:`new_memory`'s.
    """
    options = memory.options if kind == memory.kind else {}
    cls = find_kind(kind)
    return cls(config, memory.window, memory.sinks, cls.saved_options(options))
