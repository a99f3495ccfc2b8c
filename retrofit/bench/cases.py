"""What each benchmark is asked to measure: its settings, checked. Imports no torch, so that --help answers at once."""

from dataclasses import dataclass

from patches.errors import RetrofitError
from retrofit.settings import Checked, setting

PAPER_DECAY = 0.995  # of arXiv 2605.22884, Table 3
KINDS = "Kind of memory, or all; repeat for more."


@dataclass(frozen=True, kw_only=True)
class Where(Checked):
    """Where a benchmark runs and in what precision.

    Raises:
        RetrofitError: a setting is out of range, or there is no such device.
    """

    device: str = setting("cpu", "Where to measure: cpu, cuda or cuda:N.")
    dtype: str = setting("float32", "Precision to measure in.", choices=("float32", "bfloat16", "float16"))

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, _, index = self.device.partition(":")
        if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or (kind == "cpu" and index):
            raise RetrofitError(f"device={self.device!r}: use cpu, cuda or cuda:N")


@dataclass(frozen=True, kw_only=True)
class Models(Where):
    """A random Qwen2 of this shape, bare and with memories. Full attention and `none` are always there."""

    memories: tuple[str, ...] = setting(("ahn-gdn",), KINDS, flag="--memory")
    window: int = setting(512, "W: how many of the last tokens are kept exactly.", least=1)
    sinks: int = setting(4, "S: how many of the first tokens are kept exactly.", least=0)
    layers: int = setting(4, "Layers of the random model.", least=1)
    hidden: int = setting(256, "Width of the random model; its heads are 64 wide.", least=1)


@dataclass(frozen=True, kw_only=True)
class Window(Where):
    """Time window attention beside the dense mask it replaces.

    Peak memory is measured in a process of its own. One layer has H query heads on H_kv key/value heads of D.
    """

    length: int = setting(16384, "T: tokens.", least=1)
    window: int = setting(1024, "W: how many of the last tokens are kept exactly.", least=1)
    sinks: int = setting(4, "S: how many of the first tokens are kept exactly.", least=0)
    heads: int = setting(4, "Query heads.", least=1)
    kv_heads: int = setting(2, "Key/value heads.", least=1)
    head_dim: int = setting(64, "Width of a head.", least=1)
    backward: bool = setting(False, "Measure forward and backward.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length <= self.window + self.sinks:
            raise RetrofitError(
                f"length={self.length}: nothing leaves a window of {self.window} + {self.sinks}: give more tokens"
            )
        if self.heads % self.kv_heads:
            raise RetrofitError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}: choose one that is")


@dataclass(frozen=True, kw_only=True)
class Scan(Where):
    """Time the chunked gated delta rule beside its token loop.

    One layer's recurrence has a D x D state per head. The dtype is that of the inputs; states are float32.
    """

    length: int = setting(2048, "T: tokens.", least=1)
    heads: int = setting(4, "Query heads.", least=1)
    head_dim: int = setting(64, "Width of a head.", least=1)


@dataclass(frozen=True, kw_only=True)
class Decode(Models):
    """Time decoding at a short and a long context, and count the bytes of the caches.

    It compares patched models with full attention.
    """

    short: int = setting(1024, "The shorter context, in tokens.", least=1)
    long: int = setting(8192, "The longer context, in tokens.", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        exact = self.window + self.sinks
        if not exact < self.short < self.long:
            raise RetrofitError(f"contexts of {self.short} and {self.long}: choose them so that {exact} < short < long")


@dataclass(frozen=True, kw_only=True)
class Prefill(Models):
    """Time the reading of a prompt.

    It compares each memory with the window alone and with full attention.
    """

    memories: tuple[str, ...] = setting(("all",), KINDS, flag="--memory")
    length: int = setting(8192, "T: tokens of the prompt.", least=1)
    longest: int | None = setting(None, "Double the length up to this one (default: measure one length).", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        exact = self.window + self.sinks
        if not exact < self.length <= (self.longest or self.length):
            raise RetrofitError(f"prompts of {self.length} to {self.longest} tokens: both must be longer than {exact}")


@dataclass(frozen=True, kw_only=True)
class Run(Models):
    """Measure reading, decoding, memory and cache beside the roofline.

    It compares memories with the window alone and with full attention.
    """

    memories: tuple[str, ...] = setting((), f"{KINDS} The default is MODEL's own, or ahn-gdn.", flag="--memory")
    lengths: tuple[int, ...] = setting(
        (1024, 4096, 16384), "Tokens of a prompt; repeat for more.", flag="--length", least=1
    )
    model: str | None = setting(None, "A base or an exported model (default: a random Qwen2).")
    window: int | None = setting(None, "W (default: MODEL's own, or 512).", least=1)  # type: ignore[assignment]
    sinks: int | None = setting(None, "S (default: MODEL's own, or 4).", least=0)  # type: ignore[assignment]
    tokens: int = setting(32, "Tokens decoded at each length.", least=1)
    chunk: int = setting(2048, "Tokens per call in which a prompt is read; it is also read in one call.", least=1)
    peak_tflops: float | None = setting(
        None, "Peak TFLOP/s of the device in that dtype (default: known, or measured).", above=0
    )
    bandwidth: float | None = setting(None, "Memory bandwidth of the device, in GB/s; give --peak-tflops too.", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lengths:
            raise RetrofitError("lengths: give one or more")
        if (self.peak_tflops is None) != (self.bandwidth is None):
            raise RetrofitError("--peak-tflops and --bandwidth go together: a roofline needs both")


@dataclass(frozen=True, kw_only=True)
class Capacity(Checked):
    """Count the pairs that an outer-product memory holds.

    It counts how many pairs a D x D matrix takes before the first one is lost, beside the Tensor Cache paper's table.
    """

    decay: float = setting(PAPER_DECAY, "Decay of the memory in the table's decayed rows.", above=0, below=1)
