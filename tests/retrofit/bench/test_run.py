"""`retrofit bench run`: rows and columns, and that all arms compute what they should. Never how fast anything is."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import retrofit
from cli import app
from patches.errors import RetrofitError
from patches.kinds import KINDS
from retrofit.bench import machine, roofline, run
from retrofit.bench.models import FULL, prompt
from retrofit.costs.estimate import Device
from retrofit.evaluation.scores import prefill
from tests.helpers import awaken

BEST = Device(tflops=1e-3, bandwidth=1)
PEAKS = {"peak_tflops": 1e-3, "bandwidth": 1.0}
TINY = {"window": 16, "sinks": 2, "layers": 1, "hidden": 128, "tokens": 2, "chunk": 24, **PEAKS}


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak memory without a process for each measurement: what would be measured is called, and holds 3 MiB."""
    monkeypatch.setattr(run, "peak_bytes", lambda _, prepare, *given: prepare(*given)() and 3 * 2**20)


@pytest.mark.usefixtures("no_processes")
def test_every_memory_beside_full_attention_and_the_window() -> None:
    rows = run.run(run.Case(memories=("all",), lengths=(12, 64), **{**TINY, "window": 32}), repeats=1)
    names = [FULL, *KINDS]
    assert [(row["name"], row["length"]) for row in rows] == [(name, length) for length in (12, 64) for name in names]
    for row in rows:
        for columns in run.TABLES.values():
            assert all(row[key] is not None for key in columns), row
        for key in ("prefill_seconds", "whole_seconds", "decode_tokens_per_second"):
            assert 0 < row[f"{key}_low"] <= row[key] <= row[f"{key}_high"]
        assert row["peak_mib"] == row["whole_peak_mib"] == 3
        assert row["prefill_roofline_share"] == pytest.approx(row["prefill_roofline"] / row["prefill_seconds"])
        assert (row["machine_tflops"], row["machine_bandwidth"]) == (1e-3, 1)
    full, none, *_ = (row for row in rows if row["length"] == 64)
    assert (full["prefill_to_full"], full["decode_to_full"], full["cache_share"]) == (1, 1, 1)
    assert none["cache_share"] == none["cache_bytes"] / full["cache_bytes"] == 34 / 64
    assert none["prefill_to_full"] == pytest.approx(full["prefill_seconds"] / none["prefill_seconds"])


@pytest.mark.parametrize("kind", KINDS)
def test_an_arm_is_one_model_however_it_is_fed(kind: str) -> None:
    """In chunks, in one call, and decoded behind either: what is timed is one computation."""
    case = run.Case(memories=(kind,), lengths=(90,), **TINY)
    if kind == "kvm":
        case = run.Case(memories=(kind,), lengths=(90,), **{**TINY, "window": 32})
    base = case.load().double()
    if kind in ("tova", "h2o"):  # in chunks, what is dropped depends on where they end; by tokens it does not
        arm = retrofit.patch(base, kind, case.window, case.sinks, prefill="token")
    else:
        arm = case.arm(base, kind)
    model = awaken(arm)
    ids = prompt(model, 90)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[0, -1]
        for chunk in (24, 90):
            assert torch.allclose(prefill(model, ids, chunk)[0], expected, atol=1e-9)
        _, cache = prefill(model, ids[:, :-1], 24)
        assert torch.allclose(model(ids[:, -1:], past_key_values=cache).logits[0, -1], expected, atol=1e-9)


def test_arms_that_differ_within_the_window_are_not_compared() -> None:
    case = run.Case(lengths=(64,), **TINY)
    base = case.load()
    models = {name: case.arm(base, name) for name in case.names(base)}
    with torch.no_grad():
        run.check_alike(models)
        other = run.Case(layers=2, hidden=128).base(64)
        with pytest.raises(RetrofitError, match="different models"):
            run.check_alike(models | {"another": other})


@pytest.mark.usefixtures("no_processes")
def test_an_exported_model_is_measured_with_its_own_memory(tmp_path: Path, make_base: Callable[..., Any]) -> None:
    base = make_base("Llama")
    awaken(retrofit.patch(base, "joint", window=8, sinks=2)).save_pretrained(tmp_path / "model")
    case = run.Case(lengths=(40,), model=str(tmp_path / "model"), tokens=2, **PEAKS)
    loaded = case.load()
    assert case.names(loaded) == [FULL, "none", "joint"]
    ids = prompt(base, 40)
    with torch.no_grad():
        assert torch.equal(case.arm(loaded, FULL)(ids).logits, base(ids).logits)
        bare = retrofit.patch(base, "none", window=8, sinks=2)
        assert torch.equal(case.arm(loaded, "none")(ids).logits, bare(ids).logits)
    assert case.arm(loaded, "joint") is loaded
    rows = run.run(case, repeats=1)
    assert [row["name"] for row in rows] == [FULL, "none", "joint"]
    assert rows[1]["cache_share"] == 10 / 40
    wider = run.Case(lengths=(40,), model=str(tmp_path / "model"), window=16).load()
    assert (wider.config.memory["window"], wider.config.memory["sinks"]) == (16, 2)


def test_the_roofline_is_that_of_the_formulas() -> None:
    """One layer by hand: 2 query heads on 1 of 64, width 128, T = 64, W = 16, S = 2."""
    case = run.Case(lengths=(64,), **TINY)
    base = case.load()
    weights = 2 * 128 * 64 * (2 + 1) + 3 * 128 * 512
    head = 128 * 1024
    pairs = 64 * 65 // 2
    full = roofline.roofline(base, 64, BEST)
    assert full["prefill_roofline"] == pytest.approx((2 * weights * 64 + 4 * pairs * 2 * 64 + 2 * head) / 1e9)
    assert 1e9 / full["decode_roofline"] == pytest.approx(4 * (weights + head) + 64 * 2 * 64 * 4)
    none = roofline.roofline(case.arm(base, "none"), 64, BEST)
    assert 1e9 / none["decode_roofline"] == pytest.approx(4 * (weights + head) + 18 * 2 * 64 * 4)
    slow = roofline.roofline(base, 64, Device(tflops=1e6, bandwidth=1))
    assert slow["prefill_roofline"] == pytest.approx(1 / full["decode_roofline"]), "bound by what must be moved"


def test_what_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full attention has no room at all, the others none for the whole prompt at once."""

    def held(device: Any, prepare: Any, case: run.Case, name: str, length: int, chunk: int) -> int:
        if name == FULL or chunk == length:
            raise MemoryError
        return 2**20

    monkeypatch.setattr(run, "peak_bytes", held)
    full, none, memory = run.run(run.Case(lengths=(64,), **TINY), repeats=1)
    assert full == {"name": FULL, "length": 64}
    for row in (none, memory):
        assert row["peak_mib"] == 1
        assert row["prefill_seconds"] > 0
        assert "whole_seconds" not in row
        assert "prefill_to_full" not in row


def too_much() -> Callable[[], object]:
    return lambda: torch.empty(2**60, dtype=torch.uint8)


@pytest.mark.skipif(not machine.PEAK_RESET.exists(), reason="peak memory is read from Linux's /proc")
def test_too_little_memory_is_told_from_other_errors() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(MemoryError):
        machine.peak_bytes(cpu, too_much)
    with pytest.raises(TypeError):
        machine.peak_bytes(cpu, too_much, 1)


def test_the_machines_peaks_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "PRODUCT", {"cpu": 16})
    monkeypatch.setattr(roofline, "COPIED", {"cpu": 64})
    seconds = {"product": [0.5, 0.25, 1.0], "copy": [4.0, 2.0, 8.0]}
    monkeypatch.setattr(roofline, "interleaved", lambda arms, _: [arm() for arm in arms.values()] and seconds)
    best = roofline.peaks(machine.Where())
    assert (best.tflops, best.bandwidth) == (2 * 16**3 / 0.25 / 1e12, 2 * 64 / 2.0 / 1e9)


def test_the_verb_prints_and_writes(tmp_path: Path, no_processes: None) -> None:
    shape = [
        "--layers",
        "1",
        "--hidden",
        "128",
        "--window",
        "16",
        "--tokens",
        "2",
        "--repeats",
        "1",
        "--peak-tflops",
        "0.001",
        "--bandwidth",
        "1",
    ]
    lengths = ["--length", "40", "--length", "20"]
    file = tmp_path / "rows.json"
    done = CliRunner().invoke(app, ["bench", "run", *shape, *lengths, "--memory", "ahn-dn", "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert all(title in done.output for title in run.TABLES)
    rows = json.loads(file.read_text())
    assert [(row["name"], row["length"]) for row in rows] == [
        (name, length) for length in (20, 40) for name in (FULL, "none", "ahn-dn")
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--memory", "ahn-gnd"], "did you mean 'ahn-gdn'"),
        (["--device", "gpu"], "use cpu, cuda"),
        (["--device", "cuda:99"], "CUDA devices"),
        (["--dtype", "int8"], "dtype: 'int8'"),
        (["--hidden", "100"], "hidden=100"),
        (["--window", "0", "--peak-tflops", "1", "--bandwidth", "1"], "window: 0"),
        (["--bandwidth", "3"], "go together"),
        (["--model", "nowhere/at/all"], "nowhere/at/all"),
    ],
)
def test_refusals(given: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["bench", "run", *given])
    assert done.exit_code == 2
    assert said in done.stderr
