"""`make gpu`: everything worth knowing on one GPU, in ten minutes: are the kernels right, and how fast is what.

One JSON holds every row, and docs/gpu.md gets the tables, with card and date. Without a GPU it is a dry run: small
shapes on the CPU, figures that mean nothing, and the page stays as it is.
"""

import argparse
import datetime
import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

import retrofit
from distill.bench import loss as loss_bench
from distill.bench import step as step_bench
from patches import kernels
from patches.kinds import KINDS
from retrofit.bench.machine import Where
from retrofit.bench.models import FULL, decode_step
from retrofit.bench.roofline import peaks, roofline
from retrofit.bench.timing import interleaved, spread
from retrofit.files import write_json, write_text
from retrofit.table import finite, markdown

BEGIN, END = "<!-- written by make gpu: from here", "to here -->"
PACKAGES = ("torch", "triton", "flash-linear-attention", "transformers", "liger-kernel", "flash-attn-4")
# hidden size, query heads, key/value heads, width of the MLP: of Qwen2.5-3B and -7B, and of nothing
SHAPES = {"3B": (2048, 16, 2, 11008), "7B": (3584, 28, 4, 18944)}
SMALL = {"small": (64, 4, 2, 96)}
LAYERS = 2
# how far a kernel may be from the torch form in float64, as a share of the largest number
BOUNDS = {torch.float32: 2e-3, torch.bfloat16: 3e-2}
SLOWEST = 8.0  # seconds: what would take longer is left out, and said


@dataclass
class Session:
    """One run: where it is, how large its shapes are, when it must end, and what it has found.

    Attributes:
        sections: rows by section; ``notes``: what was left out or failed, and why.
    """

    device: str
    small: bool
    until: float
    sections: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def run(self, name: str, measure: Callable[["Session"], Any]) -> None:
        """One section; another section must not be lost because this one fails."""
        print(f"{name} ...", flush=True)
        self.sections[name] = []
        try:
            measure(self)
        except Exception as error:
            traceback.print_exc()
            self.notes.append(f"{name}: stopped by {type(error).__name__}: {str(error).splitlines()[0][:200]}")

    def add(self, section: str, /, **row: Any) -> None:
        self.sections[section].append(row)

    def late(self, what: str) -> bool:
        """Whether time is up; ``what`` is then left out."""
        if time.monotonic() < self.until:
            return False
        self.notes.append(f"{what}: left out, the time was up")
        return True


# ---- are they right? ----


def check_ops(session: Session) -> None:
    """Each row of the table that runs here, forward and backward, beside the torch form in float64 on the CPU."""
    for dtype in BOUNDS:
        for op in kernels.OPS:
            for gradient in (False, True):
                backend = kernels.find(op, session.device, dtype, gradient)[0].backend
                arguments, how = _arguments(op, session.small)
                exact = _results(op, arguments, how, "cpu", torch.float64, gradient)
                found = _results(op, arguments, how, session.device, dtype, gradient)
                worst = max(_distance(a, b) for a, b in zip(found, exact, strict=True))
                _judge(session, "ops", f"{op}{', backward' if gradient else ''}", dtype, backend, worst)


def _arguments(op: str, small: bool) -> tuple[list[Tensor], dict[str, Any]]:
    """Random tensors for ``op``: sizes that no tile divides, queries that share a state, decays."""
    generator = torch.Generator().manual_seed(0)
    tokens, dim = (70, 16) if small else (517, 64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = normal(2, tokens, 4, dim), normal(2, tokens, 2, dim), normal(2, tokens, 2, dim)
    if op == "decode_attention":
        return [x.transpose(1, 2) for x in (q[:, :1], k, v)], {"scale": dim**-0.5, "lse": True}
    if op == "window_attention":
        window = tokens // 4
        ahead = normal(2, window, 2, dim)
        rows = [q, torch.cat([ahead, k], 1), torch.cat([ahead, v], 1), k[:, :3], v[:, :3]]
        return rows, {"window": window, "start": 0, "scale": dim**-0.5, "lse": True}
    beta, decay = torch.rand(2, 2, tokens, 2, generator=generator)
    rows = [x.transpose(1, 2) for x in (q, torch.nn.functional.normalize(k, dim=-1), v)]
    rows += [beta] if op == "gated_delta_rule" else []
    return [*rows, -0.1 * decay, normal(2, 2, dim, dim)], {"scale": dim**-0.5}


def _results(
    op: str, arguments: list[Tensor], how: dict[str, Any], device: str, dtype: torch.dtype, gradient: bool
) -> list[Tensor]:
    wide = torch.promote_types(dtype, torch.float32)
    narrow = len(arguments) if op.endswith("_attention") and "lse" in how else 3  # gates and states are float32
    leaves = [x.to(device, dtype if i < narrow else wide).requires_grad_(gradient) for i, x in enumerate(arguments)]
    out, other = getattr(kernels, op)(*leaves, **how)
    if not gradient:
        return [out, other]
    weights = torch.linspace(-1, 1, out.shape[-1] * 8, dtype=wide, device=device)
    weighted = ((x.to(wide) * weights[: x.shape[-1]]).sum() for x in (out, other))
    return list(torch.autograd.grad(sum(weighted, start=weights.sum()), leaves))


def check_kinds(session: Session) -> None:
    """Each kind by the table's own choice and by the torch forms: logits, and gradients of what is trained."""
    for dtype in BOUNDS:
        for kind in KINDS:
            if session.late(f"models, {kind}"):
                return
            model = _awake(retrofit.patch(_tiny().to(dtype), kind, 16, 2)).to(session.device)
            ids = torch.arange(150, device=session.device).view(2, 75) % 97
            found = {}
            for backends in ((), ("torch",)):
                with kernels.forced(*backends):
                    model.zero_grad()
                    logits = model(ids).logits.float()
                    found[backends] = [logits.detach()]
                    if model.model.memories()[0].trainable:
                        logits.square().mean().backward()
                        found[backends] += [p.grad.clone() for _, p in model.memory_parameters() if p.grad is not None]
            worst = max(_distance(a, b) for a, b in zip(*found.values(), strict=True))
            _judge(session, "models", kind, dtype, "as chosen", worst)


def _tiny() -> Any:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=97, hidden_size=256, intermediate_size=256, num_hidden_layers=1, **heads)
    ).eval()


def _awake(model: Any) -> Any:
    """A fresh memory adds nothing, which would hide any mistake."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in model.memory_parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return model


def _distance(ours: Tensor, exact: Tensor) -> float:
    ours, exact = ours.detach().cpu().double(), exact.detach().cpu().double()
    return float((ours - exact).abs().max() / exact.abs().max().clamp_min(1e-6))


def _judge(session: Session, section: str, name: str, dtype: torch.dtype, backend: str, worst: float) -> None:
    bound = BOUNDS[dtype]
    row = {"name": name, "dtype": str(dtype)[6:], "backend": backend, "error": worst, "bound": bound}
    session.add(section, **row, right="right" if worst <= bound else "WRONG")


# ---- how fast are they? ----


def measure_models(session: Session) -> None:
    """Reading a prompt in one call and decoding behind it, every kind beside full attention, at layer shapes."""
    small = session.small
    lengths, windows = ((48, 96), (16,)) if small else ((8192, 32768, 131072), (2048, 8192, 32768))
    where = Where(device=session.device, dtype="float32" if small else "bfloat16")
    best = peaks(where)
    for shape, (hidden, heads, kv_heads, wide) in (SMALL if small else SHAPES).items():
        config = Qwen2Config(
            vocab_size=1024,
            hidden_size=hidden,
            intermediate_size=wide,
            num_hidden_layers=LAYERS,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=2 * lengths[-1],
        )
        torch.manual_seed(0)
        base = Qwen2ForCausalLM(config).eval().to(where.place(), where.torch_dtype())
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
    ids = torch.randint(1024, (1, length), generator=torch.Generator().manual_seed(0)).to(model.device)
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
    q, k, v = torch.randn(3, 1, tokens, heads, dim, device=session.device, dtype=dtype).unbind()
    beta, decay = torch.rand(2, 1, tokens, heads, device=session.device).unbind()
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    run = partial(kernels.gated_delta_rule, queries, keys, values, beta, -decay, scale=dim**-0.5, normalise=True)
    arms: dict[str, Callable[[], Any]] = {"ours": run}
    if not session.small:
        from fla.layers import GatedDeltaNet
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        how = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        arms["fla's op"] = lambda: chunk_gated_delta_rule(q, k, v, -decay, beta, **how)
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
    """A distillation step beside its parts, as ``retrofit bench step`` has it."""
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
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
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
