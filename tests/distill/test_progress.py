"""What a long step shows where a bar cannot be redrawn, and what a run writes down."""

import io
import re

import pytest
import torch
from rich.console import Console
from transformers import TrainerState

from distill.callbacks import ShowProgress
from distill.progress import peak_bytes, progress_bar


def test_a_bar_in_a_log_file_is_ten_lines_with_its_notes() -> None:
    out = io.StringIO()
    with progress_bar("distilling", 100, console=Console(file=out, width=200)) as bar:
        for done in range(1, 101):
            bar.update(done, f"KL {1 / done:.2f}", tokens=512)
    lines = [line for line in out.getvalue().splitlines() if line.strip()]
    assert len(lines) == 10  # nine on the way, and the bar at its end
    assert lines[4].startswith("distilling 50/100 KL 0.02, ")
    assert "tokens/s" in lines[4]
    assert lines[4].endswith("s left")
    assert "100/100 KL 0.01" in lines[-1]


def test_a_slow_bar_says_something_every_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 100_000, 30))
    monkeypatch.setattr("distill.progress.time.perf_counter", lambda: next(clock))
    out = io.StringIO()
    with progress_bar("distilling", 1000, console=Console(file=out, width=200)) as bar:
        for done in range(1, 11):  # 30 s a step
            bar.update(done)
    assert [line.split()[1] for line in out.getvalue().splitlines() if line.endswith("left")] == [
        f"{done}/1000" for done in (2, 4, 6, 8, 10)
    ]


def test_a_resumed_bar_starts_where_it_was() -> None:
    out = io.StringIO()
    with progress_bar("distilling", 100, done=90, console=Console(file=out, width=200)) as bar:
        bar.update(95)
    assert "95/100" in out.getvalue()
    assert "0/100" not in out.getvalue()


def test_the_progress_line_tells_kl_gap_memory_and_speed() -> None:
    out = io.StringIO()
    state = TrainerState(global_step=5)
    with progress_bar("distilling", 10, console=Console(file=out, width=200)) as bar:
        callback = ShowProgress(bar, 2048)
        callback.on_log(None, state, None, logs={"loss": 0.25})
        callback.on_log(None, state, None, logs={"eval_kl": 0.125, "eval_kl_gap_closed": 0.5})
        state.global_step = 6
        callback.on_log(None, state, None, logs={"loss": 0.2})
    line = next(line for line in out.getvalue().splitlines() if line.startswith("distilling 6/10"))
    assert "KL 0.2000, held out 0.1250 (50% closed), " in line
    assert re.search(r"\d+\.\d GiB, [\d,]+ tokens/s, \d+ s left$", line)


def test_peak_memory_never_shrinks_and_sees_what_is_held() -> None:
    before = peak_bytes()
    held = torch.ones(2**27)  # 512 MiB
    assert peak_bytes() >= max(before, held.nbytes)
    del held
    assert peak_bytes() >= 2**29
