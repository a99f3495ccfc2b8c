"""What an evaluation is asked to do, checked before anything is loaded."""

from dataclasses import dataclass

from retrofit.settings import Checked, setting

TEACHER, WINDOW_ONLY, EQUAL = "teacher", "window-only", "window-only, equal memory"  # rows of every evaluation
PROBES = ("identity", "recall", "passkey")
DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True)
class Settings(Checked):
    """What is evaluated and how; two runs with the same settings give the same results.

    Raises:
        RetrofitError: an unknown probe, or a number out of range.
    """

    model: str
    adapters: tuple[str, ...] = setting(
        (), "Adapter to compare, in a row of its own; repeat for more.", flag="--adapter"
    )
    window: int | None = setting(None, "W of all rows (default: the saved one).", least=1)
    sinks: int | None = setting(None, "S of all rows (default: the saved one).", least=0)
    dtype: str = setting("auto", "Dtype of the base; auto takes the checkpoint's own.", choices=DTYPES)
    data: str | None = setting(None, "Text to measure KL and NLL by position on: a file, a folder or a dataset.")
    seq_len: int | None = setting(None, "Tokens of a row of the text (default: 4 times W + S).", least=2)
    eval_rows: int = setting(16, "Rows of the text.", least=1, flag="--rows")
    probes: tuple[str, ...] = setting(
        PROBES,
        "Probe: identity, recall or passkey; repeat for more. With --data or --tasks, none is run unless you name it.",
        flag="--probe",
        choices=PROBES,
    )
    lengths: tuple[int, ...] = setting(
        (),
        "Tokens of a probe; repeat for more (default: 2 and 4 times W + S, at least 512 and 1,024).",
        flag="--length",
        least=1,
    )
    depths: tuple[float, ...] = setting(
        (0.0, 0.25, 0.5, 0.75, 1.0), "Depth of the pass key; repeat for more.", flag="--depth", least=0, most=1
    )
    samples: int = setting(5, "Samples of a probe at each length and depth.", least=1)
    bindings: tuple[int, ...] = setting((1, 4, 16), "Pairs to remember in recall; repeat for more.", least=1)
    chat: bool = setting(False, "Ask through the tokenizer's chat template.")
    tasks: tuple[str, ...] = setting((), "Tasks of lm-evaluation-harness, separated by commas: ruler,longbench.")
    include_path: str | None = setting(None, "Folder with further tasks for the harness.")
    task_lengths: tuple[int, ...] = setting(
        (), "Tokens of RULER's tasks (default: 4,096); repeat for more.", flag="--task-length", least=1
    )
    max_length: int | None = setting(
        None,
        "Tokens of a task's prompt and answer; a longer prompt loses its beginning (default: the base's context).",
        least=2,
    )
    limit: int | None = setting(None, "Documents of each task, of RULER's at each length (default: all).", least=1)
    seed: int = setting(0, "Seed of the probes.", least=0, most=2**32 - 1)
    chunk: int = setting(2048, "Tokens per forward pass.", least=1)
