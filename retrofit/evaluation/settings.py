"""What an evaluation is asked to do, checked before anything is loaded."""

from dataclasses import dataclass

from patches.errors import RetrofitError, nearest
from retrofit.evaluation import needle, questions, ruler
from retrofit.evaluation.benchmarks import find_benchmark
from retrofit.evaluation.feeding import CHUNK

RULER = "ruler"  # all its tasks
NEEDLES = [*needle.NAMES, *ruler.NAMES]
PROBES = ["identity", "recall", *NEEDLES, RULER, *questions.NAMES]


@dataclass(frozen=True)
class Settings:
    """What is evaluated and how; two runs with the same settings give the same results.

    Raises:
        RetrofitError: an unknown probe, or a number out of range.
    """

    model: str
    adapters: tuple[str, ...] = ()
    window: int | None = None
    sinks: int | None = None
    dtype: str = "auto"
    data: str | None = None  # a text file, a folder of them or a dataset: KL and NLL by position on it
    seq_len: int | None = None  # of its rows; four times the lossless budget by default
    eval_rows: int = 16
    probes: tuple[str, ...] = ("identity", "recall", "passkey")
    lengths: tuple[
        int, ...
    ] = ()  # of the probes, in tokens; 2 (W + S) and 4 (W + S) by default, at least 512 and 1,024
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 5
    bindings: tuple[int, ...] = (1, 4, 16)
    haystack: str | None = None  # a text file for the needle tasks that RULER fills with essays
    chat: bool = False  # ask through the tokenizer's chat template
    benchmarks: tuple[str, ...] = ()  # of retrofit.evaluation.benchmarks
    benchmark_data: str | None = None  # a folder with their files; the Hub by default
    tasks: tuple[str, ...] = ()  # of lm-evaluation-harness
    include_path: str | None = None  # a folder with further tasks for it
    task_lengths: tuple[int, ...] = ()  # of its RULER tasks
    # samples of each task of a benchmark or of the harness, all by default; of GSM8K, MMLU and the like, 100 by default
    limit: int | None = None
    sizes: tuple[int, ...] = ()  # of the state: perplexity of training-free policies on the text at each of them
    seed: int = 0
    chunk: int = CHUNK

    def asked(self) -> list[str]:
        """The probes, ``"ruler"`` written out."""
        of_ruler = [name for name in NEEDLES if name != needle.PASSKEY]
        named = (one for probe in self.probes for one in (of_ruler if probe == RULER else [probe]))
        return list(dict.fromkeys(named))

    def __post_init__(self) -> None:
        for probe in self.probes:
            if probe not in PROBES:
                raise RetrofitError(f"unknown probe {probe!r}{nearest(probe, PROBES)}: known are {', '.join(PROBES)}")
        if self.sizes and self.data is None:
            raise RetrofitError("perplexity by size of state needs a text: give --data")
        for name in self.benchmarks:
            find_benchmark(name)
        for name in ("eval_rows", "samples", "chunk"):
            if getattr(self, name) < 1:
                raise RetrofitError(f"{name}={getattr(self, name)}: it must be 1 or more")
