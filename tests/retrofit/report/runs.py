"""Runs as their commands leave them, made up."""

import json
from pathlib import Path
from typing import Any

NASTY = "<script>alert('$x$')</script>"


def training(name: str = "joint") -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """metrics.json and the log of a run whose memory is called ``name``."""
    log: list[dict[str, Any]] = []
    for step in range(1, 21):
        log.append({"step": step, "loss": 0.1 / step, "learning_rate": 0.01 * (1 - step / 20)})
        if step % 5 == 0:
            kl = {"eval_kl": 0.1 / step, "eval_kl_beyond_0": 0.05 / step, "eval_kl_beyond_16": 0.2 / step}
            bare = {"": 0.1, "_beyond_0": 0.05, "_beyond_16": 0.2}
            kl |= {f"eval_kl_window_only{key}": value for key, value in bare.items()}
            log.append({"step": step, **kl, "eval_kl_gap_closed": 1 - 1 / step})
    rows = [
        {"name": "teacher", "window": None, "kl": 0.0, "kl_gap_closed": 1.0, "nll": 3.0},
        {"name": "window-only", "window": 8, "kl": 0.1, "kl_gap_closed": 0.0, "nll": 3.2},
        {"name": "window-only, equal memory", "window": 12, "kl": 0.05, "kl_gap_closed": 0.5, "nll": 3.1},
        {"name": name, "window": 8, "kl": 0.005, "kl_gap_closed": 0.95, "nll": 3.01, "kept_bytes": 4096},
    ]
    recipe = {
        "base": f"models/{name}",
        "memory": name,
        "window": 8,
        "sinks": 2,
        "max_length": 64,
        "max_steps": 20,
        "loss": "kl",
    }
    metrics = {
        "recipe": recipe,
        "rows": rows,
        "tokens": {"train": 12345, "held_out": 678},
        "parameters": {"memory": 1000},
        "command": f"retrofit distill {name}",
        "versions": {"torch": "2.99.9"},
    }
    return metrics, log


def evaluation(name: str = "joint") -> dict[str, Any]:
    """An eval.json."""
    rows = ("teacher", "window-only", name)
    shares = dict(zip(rows, (1.0, 0.0, 0.6), strict=True))
    return {
        "settings": {"model": "some/model", "samples": 3},
        "rows": [{"name": row, "window": 8, "sinks": 2} for row in rows],
        "identity": {"window-only": True, name: False},
        "text": [
            {"beyond": beyond, "positions": 40, "kl": {"teacher": 0.0, "window-only": 0.2, name: 0.1}}
            | {"nll": {"teacher": 3.0, "window-only": 3.2, name: 3.1}, "kl_gap_closed": shares}
            for beyond in (0, 8, 16, None)
        ],
        "recall": [{"length": n, "bindings": b, "samples": 3, **shares} for n in (64, 128) for b in (1, 4)],
        "passkey": [{"length": n, "depth": depth, "samples": 3, **shares} for n in (64, 128) for depth in (0.0, 1.0)],
        "harness": [{"task": "niah_single_1", "metric": "4096", **shares}],
    }


def costs() -> list[dict[str, Any]]:
    """Rows of a benchmark, not all with all figures."""
    rows: list[dict[str, Any]] = []
    for length in (1024, 4096):
        for name in ("full attention", "none", "joint"):
            rows.append(
                {"name": name, "length": length, "prefill_seconds": length * 1e-3, "cache_bytes": 1000 * length}
            )
        rows[-1] |= {"prefill_seconds_low": length * 9e-4, "prefill_seconds_high": None}
    return rows


def write_run(folder: Path, name: str = "joint") -> Path:
    """A finished run with its evaluation and its benchmark."""
    metrics, log = training(name)
    (folder / "eval").mkdir(parents=True)
    (folder / "metrics.json").write_text(json.dumps(metrics))
    (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
    (folder / "recipe.yaml").write_text(f"memory: {json.dumps(name)}\nwindow: 8\n")
    (folder / "eval" / "eval.json").write_text(json.dumps(evaluation(name)))
    (folder / "bench.json").write_text(json.dumps(costs()))
    return folder
