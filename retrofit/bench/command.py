"""``retrofit bench``: what a bounded memory costs and saves, measured."""

import importlib
from typing import Annotated

import typer

from retrofit.options import Bandwidth, Json, Length, Memory, Peak, Sinks, Verbs, Window

app = Verbs()
bench = Verbs(help="Measure what a bounded memory costs and saves, as ratios within one run.")
app.add_typer(bench, name="bench")

Heads = Annotated[int, typer.Option(min=1, help="Query heads.")]
HeadDim = Annotated[int, typer.Option(min=1, help="Width of a head.")]
Layers = Annotated[int, typer.Option(min=1, help="Layers of the random model.")]
Hidden = Annotated[int, typer.Option(min=1, help="Width of the random model; its heads are 64 wide.")]
Kinds = Annotated[list[str] | None, typer.Option("--memory", help="Kind of memory, or all; repeat for more.")]
Repeats = Annotated[int, typer.Option(help="Rounds that are counted; each round runs every form once.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads that torch may use (default: torch decides).")]
On = Annotated[str, typer.Option("--device", help="Where to measure: cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="Precision to measure in: float32, bfloat16 or float16.")]


@bench.verb("retrofit bench window --length 16384 --window 1024", name="window")
def bench_window(
    ctx: typer.Context,
    length: Length = 16384,
    window: Window = 1024,
    sinks: Sinks = 4,
    heads: Heads = 4,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key/value heads.")] = 2,
    head_dim: HeadDim = 64,
    backward: Annotated[bool, typer.Option("--backward", help="Measure forward and backward.")] = False,
    device: On = "cpu",
    dtype: Dtype = "float32",
    repeats: Repeats = 3,
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """Blocked window attention beside the dense mask: time, and peak memory measured in a process of its own."""
    _measure("window", ctx, repeats)


@bench.verb("retrofit bench scan --length 4096", name="scan")
def bench_scan(
    ctx: typer.Context,
    length: Length = 2048,
    heads: Heads = 4,
    head_dim: HeadDim = 64,
    device: On = "cpu",
    dtype: Dtype = "float32",
    repeats: Repeats = 5,
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """The chunked gated delta rule beside its token loop, forward and forward + backward."""
    _measure("scan", ctx, repeats)


@bench.verb("retrofit bench decode --memory ahn-gdn --long 16384", name="decode")
def bench_decode(
    ctx: typer.Context,
    memories: Kinds = None,
    window: Window = 512,
    sinks: Sinks = 4,
    layers: Layers = 4,
    hidden: Hidden = 256,
    short: Annotated[int, typer.Option(help="The shorter context.")] = 1024,
    long: Annotated[int, typer.Option(help="The longer context.")] = 8192,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded at each context.")] = 64,
    device: On = "cpu",
    dtype: Dtype = "float32",
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """Time per token and cache bytes at two contexts, full attention beside patched models."""
    _measure("decode", ctx, tokens)


@bench.verb("retrofit bench prefill --memory joint --length 4096 --longest 32768", name="prefill")
def bench_prefill(
    ctx: typer.Context,
    memories: Kinds = None,
    window: Window = 512,
    sinks: Sinks = 4,
    layers: Layers = 4,
    hidden: Hidden = 256,
    length: Length = 8192,
    longest: Annotated[int | None, typer.Option(help="Double the length up to this one.")] = None,
    device: On = "cpu",
    dtype: Dtype = "float32",
    repeats: Repeats = 3,
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """Time to read a prompt, each memory beside none and full attention."""
    _measure("prefill", ctx, repeats)


@bench.verb(
    "retrofit bench run --memory all --length 4096 --length 16384",
    "retrofit bench run --model runs/first/model --length 32768 --device cuda --dtype bfloat16",
    name="run",
)
def bench_run(
    ctx: typer.Context,
    memories: Kinds = None,
    lengths: Annotated[
        list[int] | None, typer.Option("--length", min=1, help="Tokens of a prompt; repeat for more.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A base or an exported model (default: a random Qwen2).")] = None,
    window: Annotated[int | None, typer.Option(help="W (default: MODEL's own, or 512).")] = None,
    sinks: Annotated[int | None, typer.Option(help="S (default: MODEL's own, or 4).")] = None,
    layers: Layers = 4,
    hidden: Hidden = 256,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded at each length.")] = 32,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens per call in which a prompt is read.")] = 2048,
    peak_tflops: Peak = None,
    bandwidth: Bandwidth = None,
    device: On = "cpu",
    dtype: Dtype = "float32",
    repeats: Repeats = 3,
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """Prefill, decoding, memory and cache of full attention, the window alone and memories, beside the roofline."""
    _measure("run", ctx, repeats)


@bench.verb("retrofit bench capacity --seeds 200", name="capacity")
def bench_capacity(
    ctx: typer.Context,
    decay: Annotated[float, typer.Option(help="Decay (lambda) of the row that forgets.")] = 0.995,
    seeds: Annotated[int, typer.Option(help="Random memories of each kind.")] = 60,
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """How many pairs a D x D outer-product memory takes until its first is lost, beside the Tensor Cache paper."""
    _measure("capacity", ctx, seeds)


@bench.verb("retrofit bench loss --dtype bfloat16", name="loss")
def bench_loss(
    ctx: typer.Context,
    positions: Annotated[int, typer.Option(min=1, help="Scored positions.")] = 2048,
    width: Annotated[int, typer.Option(min=1, help="Width of the hidden states.")] = 2048,
    vocabulary: Annotated[int, typer.Option(min=2, help="Size of the vocabulary.")] = 151_936,
    device: On = "cpu",
    dtype: Dtype = "float32",
    repeats: Repeats = 3,
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """The chunked KL through a frozen head beside its naive form: time, and peak memory in a process of its own."""
    _measure("loss", ctx, repeats, "distill.bench")


@bench.verb("retrofit bench step --length 4096", name="step")
def bench_step(
    ctx: typer.Context,
    memory: Memory = "ahn-gdn",
    window: Window = 256,
    sinks: Sinks = 4,
    layers: Layers = 4,
    hidden: Hidden = 512,
    length: Length = 2048,
    device: On = "cpu",
    dtype: Dtype = "float32",
    repeats: Repeats = 5,
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """A distillation step beside the sum of its parts and beside a second teacher model; the student at twice T."""
    _measure("step", ctx, repeats, "distill.bench")


def _measure(name: str, ctx: typer.Context, repeats: int, package: str = "retrofit.bench") -> None:
    """Run ``PACKAGE.NAME`` on its ``Case``, made of the command line's values, and show the rows."""
    import torch

    from retrofit.table import print_table, write_rows

    bench = importlib.import_module(f"{package}.{name}")
    fields, given = bench.Case.__dataclass_fields__, ctx.params
    chosen = {key: value for key, value in given.items() if key in fields and value not in (None, [], ())}
    case = bench.Case(**{key: tuple(value) if isinstance(value, list) else value for key, value in chosen.items()})
    if given["threads"] is not None:
        torch.set_num_threads(given["threads"])
    rows = bench.run(case, repeats)
    typer.echo(f"{case}, {torch.get_num_threads()} threads")
    tables = bench.TABLES if name == "run" else {f"bench {name}": bench.COLUMNS}
    for title, columns in tables.items():
        print_table(title, rows, columns)
    if given["json_file"] is not None:
        write_rows(given["json_file"], rows)
