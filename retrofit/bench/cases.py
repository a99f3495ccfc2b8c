"""What each benchmark is asked to measure: its settings, checked. Imports no torch, so that --help answers at once."""

from dataclasses import dataclass

from patches.errors import RetrofitError
from retrofit.settings import Checked, setting

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
