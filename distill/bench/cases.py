"""What the benchmarks of training are asked to measure: their settings, checked. Imports no torch."""

from dataclasses import dataclass

from patches.errors import RetrofitError
from retrofit.bench.cases import Models, Where
from retrofit.settings import setting


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
