"""`make gpu`: everything worth knowing on one GPU, in ten minutes: are the kernels right, and how fast is what.

One JSON holds every row, and docs/gpu.md gets the tables, with card and date. Without a GPU it is a dry run: small
shapes on the CPU, figures that mean nothing, and the page stays as it is.
"""

import argparse
import datetime
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

import retrofit
from benchmarks.speed import loss as loss_bench
from benchmarks.speed import step as step_bench
from patches import kernels
from patches.kinds import KINDS
from retrofit.bench.machine import Where
from retrofit.bench.models import FULL, decode_step, prompt, random_base
from retrofit.bench.roofline import peaks, roofline
from retrofit.bench.timing import interleaved, spread
from retrofit.files import write_json, write_text
from retrofit.import_guard import installed_version
from retrofit.table import finite, markdown
from tests.kernels.checks import Session, check_kinds, check_ops

BEGIN, END = "<!-- written by make gpu: from here", "to here -->"
PACKAGES = ("torch", "triton", "flash-linear-attention", "transformers", "liger-kernel", "flash-attn-4")
# hidden size, query heads, key/value heads, width of the MLP: of Qwen2.5-3B and -7B, and of nothing
SHAPES = {"3B": (2048, 16, 2, 11008), "7B": (3584, 28, 4, 18944)}
SMALL = {"small": (64, 4, 2, 96)}
LAYERS = 2
SLOWEST = 8.0  # seconds: what would take longer is left out, and said


# ---- how fast are they? ----


def measure_models(session: Session) -> None:
    """Reading a prompt in one call and decoding behind it, every kind beside full attention, at layer shapes."""
    small = session.small
    lengths, windows = ((48, 96), (16,)) if small else ((8192, 32768, 131072), (2048, 8192, 32768))
    where = Where(device=session.device, dtype="float32" if small else "bfloat16")
    best = peaks(where)
    for shape, sizes in (SMALL if small else SHAPES).items():
        base = random_base(*sizes, layers=LAYERS, positions=2 * lengths[-1]).to(where.place(), where.torch_dtype())
        pace: dict[tuple[str, int], float] = {}  # seconds per token, of the shorter prompts
        full: dict[int, dict[str, float]] = {}
        for length in lengths:
            for window, kind in [(0, FULL), *((w, kind) for w in windows if w < length for kind in KINDS)]:
                what = f"{shape}, {length} tokens, W = {window}, {kind}"
                if session.late(what):
                    return
                if pace.get((kind, window), 0.0) * length > SLOWEST:
                    session.notes.append(f"{what}: left out, it would take {pace[kind, window] * length:.0f} s")
                    continue
                model = base if kind == FULL else retrofit.patch(base, kind, window, 4)
                try:
                    row = _read_and_decode(model, length, best)
                except torch.OutOfMemoryError:
                    session.notes.append(f"{what}: left out, there is not the memory for it")
                    continue
                pace[kind, window] = row["prefill"] / length
                full.setdefault(length, row)
                row |= {"prefill_to_full": full[length]["prefill"] / row["prefill"]}
                row |= {"decode_to_full": full[length]["decode"] / row["decode"]}
                session.add("reading and decoding", name=kind, shape=shape, length=length, window=window, **row)


def _read_and_decode(model: Any, length: int, best: Any) -> dict[str, float]:
    ids = prompt(model, length)
    caches: list[Any] = []

    def read() -> None:
        caches[:] = [DynamicCache(config=model.config)]
        with torch.no_grad():
            model(ids, past_key_values=caches[0], logits_to_keep=1)

    prefill = spread("s", interleaved({"read": read}, 1)["read"])["s"]
    decode = spread("s", interleaved({"step": partial(decode_step, model, ids, caches[0])}, 16)["step"])["s"]
    least = roofline(model, length, best)
    return {
        "prefill": prefill,
        "decode": decode,
        "prefill_share": least["prefill_roofline"] / prefill,
        "decode_share": 1 / (least["decode_roofline"] * decode),
    }


def measure_scan(session: Session) -> None:
    """The gated delta rule as the table chooses it, beside fla's own op and fla's own layer around it."""
    tokens, heads, dim = (96, 2, 16) if session.small else (32768, 16, 128)
    dtype = torch.float32 if session.small else torch.bfloat16
    q, k, v = torch.randn(3, 1, heads, tokens, dim, device=session.device, dtype=dtype).unbind()
    beta, decay = torch.rand(2, 1, heads, tokens, device=session.device).unbind()
    run = partial(kernels.gated_delta_rule, q, k, v, beta, -decay, scale=dim**-0.5, normalise=True)
    arms: dict[str, Callable[[], Any]] = {"ours": run}
    if not session.small:
        from fla.layers import GatedDeltaNet
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        how = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        theirs = [x.transpose(1, 2).contiguous() for x in (q, k, v, -decay, beta)]  # tokens before heads
        arms["fla's op"] = lambda: chunk_gated_delta_rule(*theirs, **how)
        width = heads * dim
        layer = GatedDeltaNet(hidden_size=width, head_dim=dim, num_heads=heads, expand_v=1, use_short_conv=False)
        layer, x = layer.to(session.device, dtype), torch.randn(1, tokens, width, device=session.device, dtype=dtype)
        arms["fla's layer, projections included"] = lambda: layer(x)
    with torch.no_grad():
        seconds = {name: spread("s", values)["s"] for name, values in interleaved(arms, 5).items()}
    for name, value in seconds.items():
        session.add("scan", name=name, tokens=tokens, seconds=value, ratio=value / seconds["ours"])


def measure_loss(session: Session) -> None:
    """The chunked KL beside its naive form and beside Liger's fused one."""
    small = session.small
    sizes = {"positions": 32, "width": 32, "vocabulary": 101} if small else {"vocabulary": 151_936}
    case = loss_bench.Case(device=session.device, dtype="float32" if small else "bfloat16", **sizes)
    arms: dict[str, Callable[[], Any]] = {name: loss_bench.prepare(case, name) for name in loss_bench.FORMS}
    try:
        from liger_kernel.transformers import LigerFusedLinearJSD
    except ImportError as error:
        session.notes.append(f"loss: Liger is not here ({error})")
    else:
        states, head = loss_bench._inputs(case)
        fused = LigerFusedLinearJSD(jsd_beta=0.0)  # 0: the forward KL

        def liger() -> None:
            student = states[0].detach().requires_grad_()
            fused(student, head, states[1], head).backward()

        arms["Liger"] = liger
    seconds = {name: spread("s", values)["s"] for name, values in interleaved(arms, 3).items()}
    for name, value in seconds.items():
        session.add("loss", name=name, seconds=value, ratio=value / seconds["chunked"])


def measure_step(session: Session) -> None:
    """A distillation step beside its parts, as ``python -m benchmarks.speed step`` has it."""
    sizes: dict[str, Any] = {"hidden": 2048, "length": 8192}
    if session.small:
        sizes = {"hidden": 128, "layers": 1, "window": 16, "length": 64}
    case = step_bench.Case(device=session.device, dtype="float32" if session.small else "bfloat16", **sizes)
    for row in step_bench.run(case, 1):
        session.add("training step", **row)


SECTIONS: dict[str, tuple[Callable[[Session], None], dict[str, tuple[str, str]]]] = {
    "ops": (
        check_ops,
        {"name": ("op", ""), "dtype": ("", ""), "backend": ("by", ""), "error": ("error", ".1e"), "right": ("", "")},
    ),
    "models": (
        check_kinds,
        {"name": ("kind", ""), "dtype": ("", ""), "error": ("beside torch's forms", ".1e"), "right": ("", "")},
    ),
    "scan": (
        measure_scan,
        {"name": ("", ""), "tokens": ("tokens", ",d"), "seconds": ("s", ".5f"), "ratio": ("x ours", ".2f")},
    ),
    "loss": (measure_loss, {"name": ("", ""), "seconds": ("s", ".4f"), "ratio": ("x chunked", ".2f")}),
    "training step": (measure_step, step_bench.COLUMNS),
    "reading and decoding": (
        measure_models,
        {
            "name": ("", ""),
            "shape": ("shape", ""),
            "length": ("tokens", ",d"),
            "window": ("W", ",d"),
            "prefill": ("prefill s", ".3f"),
            "prefill_to_full": ("x full", ".2f"),
            "prefill_share": ("of the ceiling", ".0%"),
            "decode": ("s per token", ".5f"),
            "decode_to_full": ("x full", ".2f"),
            "decode_share": ("of the ceiling", ".0%"),
        },
    ),
}


def machine(device: str) -> dict[str, Any]:
    """What ran it, and with what."""
    versions = {name: installed_version(name) for name in PACKAGES}
    card = torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})"
    now = datetime.datetime.now(datetime.UTC).strftime("%d %B %Y")
    return {"card": card, "date": now, "cuda": torch.version.cuda, "packages": versions}


def page(found: dict[str, Any]) -> str:
    """The tables in Markdown."""
    packages = ", ".join(f"{name} {version}" for name, version in found["machine"]["packages"].items() if version)
    card, date, cuda = (found["machine"][name] for name in ("card", "date", "cuda"))
    parts = [f"**{card}, {date}**; {packages}; CUDA {cuda}.\n"]
    for name, (_, columns) in SECTIONS.items():
        if found["sections"].get(name):
            parts.append(f"### {name.capitalize()}\n\n{markdown(found['sections'][name], columns)}")
    if found["notes"]:
        parts.append("### Left out\n\n" + "".join(f"- {note}\n" for note in found["notes"]))
    return "\n".join(parts)


def put(text: str, tables: str) -> str:
    """A page's ``text`` with ``tables`` between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n-->\n\n{tables}\n<!-- {END}{after}"


def main(arguments: list[str] | None = None) -> int:
    """Run all sections; 1 if a kernel is wrong or a section failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu.json"), help="where the JSON goes")
    parser.add_argument("--page", type=Path, help="a page whose tables are replaced; not in a dry run")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin nothing new after so many")
    given = parser.parse_args(arguments)
    dry = not torch.cuda.is_available()
    if dry:
        print("There is no GPU here: this is a dry run on the CPU, and its figures mean nothing.")
    device = "cpu" if dry else "cuda"
    session = Session(device, dry, time.monotonic() + 60 * given.minutes)
    for name, (measure, _) in SECTIONS.items():
        if not session.late(name):
            session.run(name, measure)
    found = finite({"machine": machine(device), "dry run": dry, "sections": session.sections, "notes": session.notes})
    write_json(given.output, found)
    print(page(found))
    if given.page is not None and not dry:
        write_text(given.page, put(given.page.read_text(encoding="utf-8"), page(found)))
    wrong = [row for name in ("ops", "models") for row in session.sections.get(name, []) if row["right"] != "right"]
    failed = [note for note in session.notes if "stopped by" in note]
    for row in wrong:
        print(f"WRONG: {row}", file=sys.stderr)
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
