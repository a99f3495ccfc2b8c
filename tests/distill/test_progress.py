"""What a long step shows where a bar cannot be redrawn, and what a run writes down."""

import io

from rich.console import Console

from distill.progress import progress_bar


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


def test_a_resumed_bar_starts_where_it_was() -> None:
    out = io.StringIO()
    with progress_bar("distilling", 100, done=90, console=Console(file=out, width=200)) as bar:
        bar.update(95)
    assert "95/100" in out.getvalue()
    assert "0/100" not in out.getvalue()
