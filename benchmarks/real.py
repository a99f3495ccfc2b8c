"""``make real``: a real language model with every way to spend the same bytes, on texts of five kinds, without a Hub.

What was scored is kept row by row: a run that was cut goes on, and a new way is scored beside the old ones.

``python -m benchmarks.real --kinds RUNS`` scores every other kind at these bytes: those that need no training, and
those that were fitted, each a run of ``retrofit distill`` in a folder of RUNS.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any
from zlib import crc32

import torch
from rich.console import Console
from torch import Tensor
from transformers import set_seed

import retrofit
from benchmarks.real_fit import Fit, fit_beside
from benchmarks.real_texts import base_and_tokenizer, read_texts, write_mix
from benchmarks.real_ways import BARE, DTYPE, SINKS, TOTALS, Ways, contenders, untrained
from patches.errors import RetrofitError, one_of
from patches.kinds import find_kind
from retrofit.budget import COLUMNS, fit_budget
from retrofit.calibration import measure, observe, repeat_beginnings, weigh_layers
from retrofit.costs.held import beyond_sinks, row_bytes
from retrofit.evaluation.baselines import equal_memory_window, window_only
from retrofit.evaluation.scores import evaluate, gap_closed
from retrofit.export import export_model
from retrofit.files import write_json, write_text
from retrofit.loading import bfloat16_is_slow
from retrofit.needs import Needs
from retrofit.report.page import report
from retrofit.table import print_table

CALIBRATED_ON = 1024  # tokens of a row at least
BEST = "expected, 75,000"
JOINT = "joint, fitted"
LAST = 127  # positions at the end of a row that are also told by themselves
NOVEL_TOKENS = 40  # of the answer that is shown

Say = Callable[[str], None]


@dataclass(frozen=True)
class Sizes:
    """What is scored: W, tokens of a row, rows of each kind of text, bytes of a layer, and which ways."""

    window: int = 128
    length: int = 1024
    rows: int = 3
    every: int = 1  # position of these counts
    totals: tuple[int, ...] = TOTALS
    only: tuple[str, ...] = ()  # names of ways; none: all


def main(output: Path, base: str | None, dtype: str | None, sizes: Sizes, choose: bool, runs: Path | None) -> None:
    """Fetch, calibrate, fit, score; write scores, tables, texts, base/, joint/ and model/ (the best) to ``output``.

    Args:
        output: the folder to write.
        base: another model than the default, by folder or Hub id.
        dtype: of the base; by default that of the scores in ``output``, or else the one in which this CPU is faster.
        sizes: what is scored.
        choose: print what windows and bits are worth for these bytes instead, on texts that nothing else is scored on.
        runs: score the other kinds instead, those fitted there too; writes kinds.json and kinds.md.
    """
    console, began = Console(), time.perf_counter()
    say: Say = lambda line: console.print(line, highlight=False, soft_wrap=True)  # noqa: E731
    torch.set_grad_enabled(False)
    name, made = ("table", contenders) if runs is None else ("kinds", untrained)
    file = output / ("real.json" if name == "table" else f"{name}.json")
    dtype = dtype or usual_dtype(file)
    model, tokenizer = base_and_tokenizer(output, base, dtype, say)
    ways = made(model.config, sizes.window, sizes.totals)
    for only in sizes.only:
        one_of("--only", only, *ways)
    say("reading the texts")
    texts = read_texts(tokenizer, sizes.length, say)
    told = {kind: ids[: sizes.rows] for kind, ids in texts.scored.items()}
    fitted = [row[:, : max(CALIBRATED_ON, sizes.length)] for row in texts.fitted]
    if choose:
        on = [*fitted[::2], *(ids[:1] for ids in texts.chosen.values())]
        for total in sizes.totals:
            _, found = fit_budget(model, on, total, dtype=DTYPE, context=sizes.length, say=say)
            print_table(f"{total:,} bytes per layer", found, COLUMNS, console)
        return
    write_json(output / "rows.json", {kind: ids.tolist() for kind, ids in texts.scored.items()})
    write_text(output / "fitted.txt", "\n\n".join(tokenizer.decode(row[0]) for row in fitted))
    ways = {name: how for name, how in ways.items() if name == BARE or name in (sizes.only or ways)}
    marks = {name: json.dumps(how) for name, how in ways.items()}
    settings = {"dtype": dtype, "window": sizes.window, "length": sizes.length, "sinks": SINKS, "every": sizes.every}
    settings |= {"base": base} if base else {}
    fits = name == "table" and settings["window"] == Sizes.window and not (base or sizes.only)
    if fits:
        write_mix(output, say)
    with fit_beside(output, dtype, say) if fits else nullcontext() as fit:
        if any(how["memory"] == "expected" for how in ways.values()):
            say(f"calibrating on {len(fitted)} rows of {fitted[0].shape[1]} tokens")
        models = patched(model, ways, fitted, sizes.window)
        for path in [] if runs is None else sorted(runs.glob("*/adapter")):
            models[path.parent.name], marks[path.parent.name] = adapted(model, path)
        add_rivals(models, marks)
        rows = scored(models, marks, told, settings, file, say, fit)
        if fit is not None:
            say("waiting for the fit")
            models[JOINT], marks[JOINT] = adapted(model, fit.wait())
            add_rivals(models, marks)
            page, _, _ = report(output / "joint")
            say(f"{page} tells how the fit went")
            rows = scored(models, marks, told, settings, file, say)
    write_text(output / f"{name}.md", markdown(rows, models))
    write_json(output / f"{name}-means.json", list(table(rows, models)))
    columns = {"name": ("", ""), "bytes": ("bytes", ",d"), "nats": ("KL", ".4f"), "mean": ("gap closed", ".1%")}
    columns |= {"nll": ("of NLL", ".1%"), "kl_last": ("KL, end", ".4f")}
    print_table("beside full attention", list(table(rows, models)), columns, console)
    say(f"each kind of text is in {output / name}.md")
    if BEST in models:
        _answer(models, tokenizer, texts.scored["novel"][:1], say)
        export_model(models[BEST], output / "model", tokenizer, overwrite=True)
        say(f"{output / 'model'} is the last one, exported")
    say(f"everything took {time.perf_counter() - began:.0f} s")


def usual_dtype(file: Path) -> str:
    """That of the scores in ``file``, so that they are gone on with; without any, the one this CPU is faster in."""
    if file.is_file():
        return str(json.loads(file.read_text())["settings"]["dtype"])
    return "float32" if bfloat16_is_slow() else "bfloat16"


def patched(base: Any, ways: Ways, fitted: list[Tensor], window: int) -> dict[str, Any]:
    """A model for each way, all on the same base; those that are calibrated read the texts together."""
    models = {
        name: retrofit.patch(base, **{"window": window, "sinks": SINKS, **how}).eval() for name, how in ways.items()
    }
    chosen = [models[name] for name, how in ways.items() if how["memory"] == "expected"]
    if chosen:
        costs = weigh_layers(chosen[0])
        observe(chosen, fitted, costs)
        by_need = [models[name] for name, how in ways.items() if how.get("shares") == "need"]
        if needs := [Needs(model, costs, fitted) for model in by_need]:
            measure(needs, repeat_beginnings(fitted))
        for one in needs:
            one.give()
    for name, how in ways.items():
        if how["memory"] != "expected" and find_kind(how["memory"]).calibrates:
            retrofit.calibrate(models[name], fitted)
    return models


def adapted(base: Any, adapter: Path) -> tuple[Any, str]:
    """The model of an adapter, and what tells it from another fit."""
    model = retrofit.load_adapter(base, adapter).eval()
    return model, f"{crc32((adapter / 'adapter_model.safetensors').read_bytes()):08x}"


def add_rivals(models: dict[str, Any], marks: dict[str, str]) -> None:
    """Beside each memory that learns, the window of its bytes: what it writes by takes some, for each kind others."""
    for model in [one for one in models.values() if find_kind(one.config.memory["kind"]).trainable]:
        wide = equal_memory_window(model)
        models[f"window, W = {wide}"], marks[f"window, W = {wide}"] = window_only(model, wide).eval(), str(wide)


def scored(
    models: dict[str, Any],
    marks: dict[str, str],
    texts: dict[str, Tensor],
    settings: dict[str, Any],
    file: Path,
    say: Say,
    beside: Fit | None = None,
) -> list[dict[str, Any]]:
    """One mapping per text, row and model, kept in ``file``; what is there already is not scored again.

    Args:
        marks: of each name in ``models``, what it stands for: another mark under the same name is scored anew.
        beside: a fit that runs meanwhile and needs a core.
    """
    kept: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    if kept.get("settings") != settings:
        kept = {"settings": settings, "seconds": 0.0, "rows": []}
    start = settings["window"] + SINKS
    rounds = [(kind, at) for at in range(max(map(len, texts.values()))) for kind in texts if at < len(texts[kind])]
    known: list[dict[str, Any]] = []
    say(f"scoring {len(models)} models on {len(rounds)} rows of {settings['length']} tokens")
    for done, (kind, at) in enumerate(rounds, 1):
        row, began = texts[kind][at], time.perf_counter()
        label = {"text": kind, "row": at, "tokens": crc32(row.numpy().tobytes())}
        known.append(label)
        there = {one["name"]: one.get("how") for one in kept["rows"] if label.items() <= one.items()}
        missing = {name: model for name, model in models.items() if there.get(name) != marks[name]}
        if not missing:
            continue
        kept["rows"] = [one for one in kept["rows"] if not (one["name"] in missing and label.items() <= one.items())]
        if beside is not None:
            beside.leave_it_a_core()
        labels = torch.full_like(row, -100)
        labels[start + 1 :: settings["every"]] = 0
        scores = evaluate(missing, row[None], start=start, labels=labels[None], batch_size=1)
        teacher = scores.pop("teacher").mean_nll
        for name, one in scores.items():
            last = one.kl[:, -LAST:].nanmean().item()
            kept["rows"].append(
                {
                    **label,
                    "name": name,
                    "how": marks[name],
                    "kl": one.mean_kl,
                    "kl_last": last,
                    "nll": one.mean_nll,
                    "teacher": teacher,
                }
            )
        kept["seconds"] += time.perf_counter() - began
        write_json(file, kept)
        say(f"  {done} of {len(rounds)}: {kind}, {len(missing)} models, {time.perf_counter() - began:.0f} s")
    say(f"scoring took {kept['seconds']:.0f} s in all")
    return [
        one for one in kept["rows"] if one["name"] in models and any(label.items() <= one.items() for label in known)
    ]


def closed(rows: list[dict[str, Any]], name: str, kind: str) -> dict[str, Any]:
    """What a model closes on one kind of text: shares of the KL and NLL gaps, over all its rows and row by row."""
    own = [row for row in rows if (row["name"], row["text"]) == (name, kind)]
    bare = {row["row"]: row for row in rows if (row["name"], row["text"]) == (BARE, kind)}
    beside = [bare[row["row"]] for row in own]

    def total(of: list[dict[str, Any]], key: str) -> float:
        return mean(row[key] for row in of)

    teacher = total(own, "teacher")
    return {
        "kl": gap_closed(total(own, "kl"), total(beside, "kl")),
        "nll": gap_closed(total(own, "nll") - teacher, total(beside, "nll") - teacher),
        "nats": total(own, "kl"),
        "kl_last": total(own, "kl_last"),
        "rows": [gap_closed(row["kl"], other["kl"]) for row, other in zip(own, beside, strict=True)],
    }


def table(rows: list[dict[str, Any]], models: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row per model: the share of the KL gap closed on each kind of text, and the means over the kinds."""
    kinds = list(dict.fromkeys(row["text"] for row in rows))
    for name, model in models.items():
        of_kind = {kind: closed(rows, name, kind) for kind in kinds}
        share = {kind: one["kl"] for kind, one in of_kind.items()}
        means = {key: mean(one[key] for one in of_kind.values()) for key in ("nll", "nats", "kl_last")}
        each = [row for one in of_kind.values() for row in one["rows"]]
        size = {"bytes": total_bytes(model)}
        last = {f"{kind} at the end": one["kl_last"] for kind, one in of_kind.items()}
        yield {"name": name, **size, **share, "mean": mean(share.values()), **means, "each": each, **last}


def total_bytes(model: Any) -> int:
    """Bytes that one sequence keeps in a layer on average, the cache in bfloat16."""
    memories = model.model.memories().values()
    sinks = sum(memory.sinks for memory in memories) * row_bytes(model.config, DTYPE)
    return round((beyond_sinks(model, DTYPE) + sinks) / len(memories))


def markdown(rows: list[dict[str, Any]], models: dict[str, Any]) -> str:
    """The tables as docs/real-model.md shows them."""
    lines = list(table(rows, models))
    kinds = list(dict.fromkeys(row["text"] for row in rows))
    bytes_ = [f"{line['bytes']:,}" for line in lines]
    gaps = [
        [
            f"{line['nats']:.4f}",
            f"{line['mean']:.3f}",
            *(f"{line[kind]:.3f}" for kind in kinds),
            f"{min(line['each']):.2f}",
            f"{line['nll']:.3f}",
        ]
        for line in lines
    ]
    last = [[f"{line['kl_last']:.4f}", *(f"{line[f'{kind} at the end']:.4f}" for kind in kinds)] for line in lines]
    names = [line["name"] for line in lines]
    both = "bytes per layer"
    text = _grid(["", both, "KL", "gap closed", *kinds, "worst row", "NLL gap closed"], names, bytes_, gaps)
    return f"{text}\n{_grid(['', both, f'KL of the last {LAST}', *kinds], names, bytes_, last)}"


def _grid(heads: list[str], names: list[str], bytes_: list[str], cells: list[list[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    lines += [f"| {' | '.join([name, size, *row])} |" for name, size, row in zip(names, bytes_, cells, strict=True)]
    return "\n".join(lines) + "\n"


def _answer(models: dict[str, Any], tokenizer: Any, ids: Tensor, say: Say) -> None:
    """How full attention, the window and the best form go on with a page of the novel."""
    set_seed(0)
    say(f"the novel, after {ids.shape[1]} tokens, goes on:")
    best = models[BEST]
    with best.memory_off():
        _go_on("full attention", best, tokenizer, ids, say)
    for name in (BARE, BEST):
        _go_on(name, models[name], tokenizer, ids, say)


def _go_on(name: str, model: Any, tokenizer: Any, ids: Tensor, say: Say) -> None:
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NOVEL_TOKENS, do_sample=False)
    say(f"  {name}: {' '.join(tokenizer.decode(tokens[0, ids.shape[1] :]).split())}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/real"))
    parser.add_argument("--base", help="another model than SmolLM2-135M-Instruct: a folder or Hub id")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of the base (default: the one this CPU is faster in)"
    )
    parser.add_argument("--choose", action="store_true", help="print what windows and bits are worth")
    parser.add_argument("--kinds", type=Path, metavar="RUNS", help="score the other kinds, those fitted in RUNS/*/ too")
    for name, what in (
        ("window", "W"),
        ("length", "tokens of a row"),
        ("rows", "rows of each kind of text"),
        ("every", "score every so many positions"),
    ):
        parser.add_argument(f"--{name}", type=int, default=getattr(Sizes, name), help=what)
    parser.add_argument("--bytes", type=int, nargs="+", default=TOTALS, help="of a layer, of one sequence")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="score window-only and these ways alone")
    given = parser.parse_args()
    sizes = Sizes(given.window, given.length, given.rows, given.every, tuple(given.bytes), tuple(given.only))
    try:
        main(given.output, given.base, given.dtype, sizes, given.choose, given.kinds)
    except RetrofitError as error:
        parser.exit(2, f"error: {error}\n")
