"""What each benchmark is asked to measure: its settings, checked. Imports no torch, so that --help answers at once."""

from dataclasses import dataclass

from patches.errors import RetrofitError
from retrofit.bench.cases import KINDS, Models, Where
from retrofit.settings import Checked, setting

PAPER_DECAY = 0.995  # of arXiv 2605.22884, Table 3


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
class Capacity(Checked):
    """Count the pairs that an outer-product memory holds.

    It counts how many pairs a D x D matrix takes before the first one is lost, beside the Tensor Cache paper's table.
    """

    decay: float = setting(PAPER_DECAY, "Decay of the memory in the table's decayed rows.", above=0, below=1)


@dataclass(frozen=True, kw_only=True)
class Loss(Where):
    """Time the chunked KL through a frozen head beside its naive form.

    Peak memory is measured in a process of its own.
    """

    positions: int = setting(2048, "P: scored positions.", least=1)
    width: int = setting(2048, "E: width of the hidden states.", least=1)
    vocabulary: int = setting(151_936, "V: size of the vocabulary.", least=2)


@dataclass(frozen=True, kw_only=True)
class Step(Models):
    """Time a distillation step beside the sum of its parts.

    A second teacher model and the student at twice T stand beside it, too.
    """

    memory: str = setting("ahn-gdn", "Kind of memory.")
    window: int = setting(256, "W: how many of the last tokens are kept exactly.", least=1)
    hidden: int = setting(512, "Width of the random model; its heads are 64 wide.", least=1)
    length: int = setting(2048, "T: tokens of the one row.", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.window + self.sinks + 1 < self.length:
            raise RetrofitError(
                f"rows of {self.length} tokens have no position past the window: take {self.window + self.sinks + 2} "
                "tokens or more"
            )
        if self.device not in ("cpu", "cuda", "cuda:0"):
            raise RetrofitError(
                f"device={self.device!r}: the trainer takes the first GPU; choose it by CUDA_VISIBLE_DEVICES"
            )


@dataclass(frozen=True, kw_only=True)
class Segments(Models):
    """Measure a training step that reads its row a segment at a time.

    Its peak memory, measured in a process of its own, stands beside what a dry run predicts.
    """

    memory: str = setting("ahn-gdn", "Kind of memory.")
    window: int = setting(512, "W: how many of the last tokens are kept exactly.", least=1)
    segment: int = setting(1024, "Tokens of a segment.", least=2)
    length: int = setting(4096, "T: tokens of the one row.", least=1)
    longest: int | None = setting(None, "Double the length up to this one (default: measure one length).", least=1)
    whole: bool = setting(False, "Measure whole rows, too.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length <= max(self.window + self.sinks + 1, self.segment):
            raise RetrofitError(
                f"rows of {self.length} tokens: they must be longer than a segment of {self.segment} tokens, and than "
                f"{self.window + self.sinks + 1}, to leave the window"
            )
