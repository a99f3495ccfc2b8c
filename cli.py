"""The `retrofit` command: one short function per verb, which imports what it needs, so that --help answers at once."""

import contextlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

UsageError: Any = typer.BadParameter.__base__  # typer gives it no public name


def example(*commands: str) -> str:
    """The last lines of a verb's --help, not re-wrapped."""
    return "\n".join(["\b", "Example:", *(f"  {command}" for command in commands)])


class OneLineErrors(TyperGroup):
    """Ends every mistake of the user in one line on stderr and status 2, and Ctrl-C in status 130.

    One process of several leaves what it has to say, a traceback too, to the launcher: it is said once.
    """

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        try:
            self._main(*args, **kwargs)
        except Exception:
            if not _told_launcher(traceback.format_exc()):
                raise
            sys.exit(1)

    def _main(self, *args: Any, **kwargs: Any) -> NoReturn:
        try:
            sys.exit(super().main(*args, **{**kwargs, "standalone_mode": False}))
        except UsageError as error:
            verb = error.ctx.command_path if error.ctx else "retrofit"
            message = f"{error.format_message().rstrip('.')} (see {verb} --help)"
        except OSError as error:
            if error.strerror is None:
                raise
            message = f"{error.filename}: {error.strerror}" if error.filename else f"{error.strerror}, nothing was kept"
        except ImportError as error:
            absent = [name for name in ("accelerate", "datasets") if importlib.util.find_spec(name) is None]
            message = _shadowed()
            if absent and not message:
                message = f"this needs {' and '.join(absent)}: pip install 'retrofit-lm[train]'"
            if not message:
                raise error
        except ValueError as error:
            from patches.errors import RetrofitError

            if not isinstance(error, RetrofitError):
                raise
            message = str(error)
        message = " ".join(message.split())
        if not _told_launcher(message):
            typer.echo(f"error: {message}", err=True)
        sys.exit(2)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None


def _told_launcher(message: str) -> bool:
    """Whether this is one process of several, whose launcher now has ``message`` to print once."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return False
    from distill.outcome import tell_launcher

    return tell_launcher(message)


def _shadowed() -> str:
    """What stands in the way of one of our packages, if anything does."""
    try:
        from retrofit.siblings import check_sibling

        for name in ("patches", "distill"):
            check_sibling(name)
    except ImportError as error:
        return str(error)
    return ""


# what a verb reads, by the names of its parameters; its files to write are never one of them
INPUTS = ("source", "base", "model", "adapter", "ahn", "recipe", "init_adapter", "deepspeed", "data", "haystack")
WRITTEN = ("json_file", "target")


class Verb(TyperCommand):
    """Checks the file that a verb will write before the verb does anything."""

    def invoke(self, ctx: Any) -> Any:
        for path in (ctx.params[name] for name in WRITTEN if ctx.params.get(name) is not None):
            from retrofit.files import check_file

            given = (ctx.params.get(name) for name in INPUTS)
            check_file(path, [one for value in given for one in (value if isinstance(value, list) else [value])])
        return super().invoke(ctx)


class Verbs(typer.Typer):
    """A group whose commands are of the class :class:`Verb`."""

    def command(self, name: str | None = None, **kwargs: Any) -> Any:
        return super().command(name, cls=Verb, **kwargs)


# rich's help pages take twice as long to appear
app = Verbs(cls=OneLineErrors, rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)
bench = Verbs(rich_markup_mode=None, help="Measure what a bounded memory costs and saves, as ratios in one run.")
recipes = Verbs(rich_markup_mode=None, help="List, show, copy and check recipes.")
app.add_typer(bench, name="bench")
app.add_typer(recipes, name="recipes")

Base = Annotated[str, typer.Argument(metavar="BASE", help="Checkpoint of the base: a folder, a GGUF file or a Hub id.")]
Memory = Annotated[str, typer.Option(help="Kind of memory, ahn-gdn for one; none keeps sinks and window only.")]
Window = Annotated[int, typer.Option(help="W: the last tokens, kept exactly.")]
Sinks = Annotated[int, typer.Option(help="S: the first tokens, kept exactly.")]
Options = Annotated[list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="An option of the memory.")]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", dir_okay=False, help="Write the table's rows to FILE too.")
]
Length = Annotated[int, typer.Option(min=1, help="T: tokens.")]
Heads = Annotated[int, typer.Option(min=1, help="Query heads.")]
HeadDim = Annotated[int, typer.Option(min=1, help="Width of a head.")]
Kinds = Annotated[list[str] | None, typer.Option("--memory", help="Kind of memory, or all; again for more.")]
Repeats = Annotated[int, typer.Option(help="Rounds counted; each runs every form once.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads torch may use (default: its own choice).")]
On = Annotated[str, typer.Option("--device", help="Where to measure: cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="Precision to measure in: float32, bfloat16 or float16.")]


@app.callback(
    invoke_without_command=True,
    epilog=example(
        "retrofit demo",
        "retrofit distill Qwen/Qwen2.5-0.5B --data corpus.txt --output runs/first",
        'retrofit generate runs/first/model --prompt "Once upon a time"',
    ),
)
def root(ctx: typer.Context) -> None:
    """Give a pretrained language model a bounded memory: patch its attention, distil it against itself, ship it."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@app.command(epilog=example("retrofit demo --seed 1 --json rows.json"))
def demo(
    memory: Memory = "ahn-gdn",
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of everything random.")] = 0,
    output: Output = Path("runs/demo"),
    overwrite: Overwrite = False,
    json_file: Json = None,
) -> None:
    """Run the main job on a model and a text made on the spot: teach, patch, distil, compare, save, load, generate."""
    if memory == "all":
        from distill.demo_all import run_all

        run_all(seed=seed, output=output, json_file=json_file, overwrite=overwrite)
    else:
        from distill.demo import run_demo

        run_demo(memory=memory, seed=seed, output=output, json_file=json_file, overwrite=overwrite)


@app.command(
    epilog=example(
        "retrofit distill Qwen/Qwen2.5-0.5B --data corpus.txt --window 512 --seq-len 4096 -o runs/first",
        "retrofit distill my-recipe.yaml --seed 1 --set eval_steps=50 -o runs/second",
        "retrofit distill qwen2.5-7b-ahn-gdn --dry-run",
    )
)
def distill(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(metavar="BASE|RECIPE", help="A checkpoint, a recipe's .yaml or its name.")],
    base: Annotated[str | None, typer.Option(help="Checkpoint, where a recipe comes first.")] = None,
    data: Annotated[str | None, typer.Option(help="Text, JSONL, Parquet, a datasets folder or a Hub id.")] = None,
    memory: Annotated[str | None, typer.Option(help="Kind of memory, ahn-gdn for one.")] = None,
    window: Annotated[int | None, typer.Option(help="W: the last tokens, kept exactly.")] = None,
    sinks: Annotated[int | None, typer.Option(help="S: the first tokens, kept exactly.")] = None,
    option: Options = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens per row.")] = None,
    data_name: Annotated[str | None, typer.Option(help="Configuration of a dataset that has several.")] = None,
    data_revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a dataset of the Hub.")] = None,
    data_split: Annotated[str | None, typer.Option(help="Split of a dataset, train by default.")] = None,
    data_format: Annotated[str | None, typer.Option(help="text, chat, or auto: by the columns there are.")] = None,
    min_length: Annotated[int | None, typer.Option(help="Leave out records of at most so many tokens.")] = None,
    max_samples: Annotated[int | None, typer.Option(help="Read only the first so many records.")] = None,
    streaming: Annotated[bool | None, typer.Option("--streaming", help="Read while training.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows per step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the memory's start and the rows' order.")] = None,
    deepspeed: Annotated[str | None, typer.Option(metavar="zero2|zero3|FILE", help="DeepSpeed's ZeRO.")] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Processes on this machine, one per GPU.")] = None,
    nnodes: Annotated[int, typer.Option(min=1, help="Machines; run the same command on each.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="Which of them this one is.")] = 0,
    master_addr: Annotated[str | None, typer.Option(help="Address of machine 0.")] = None,
    master_port: Annotated[int, typer.Option(min=1, help="Free port of machine 0.")] = 29500,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other recipe key.")] = None,
    init_adapter: Annotated[str | None, typer.Option(help="Adapter or AHN weights to go on from.")] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="DIR", help="Folder to write.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what the run will take; needs no weights.")] = False,
    utilisation: Annotated[float, typer.Option(min=1e-3, max=1, help="Share of the peak, for --dry-run.")] = 0.45,
    peak_tflops: Annotated[float, typer.Option(min=1e-3, help="Of a GPU, for --dry-run; H100's and H200's.")] = 989,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in DIR.")] = False,
    overwrite: Overwrite = False,
    json_file: Json = None,
) -> None:
    """Fit a memory to BASE, or as RECIPE says, by self-distillation: writes DIR/adapter, DIR/model, DIR/metrics.json.

    Flags override the recipe's keys.
    """
    from distill.launch import Machines, launch
    from distill.recipe import Recipe, read_recipe, shipped_recipes
    from retrofit.files import check_file, check_output

    is_recipe = source in shipped_recipes() or Path(source).suffix in (".yaml", ".yml")
    values = read_recipe(source) if is_recipe else {"base": source}
    keys = Recipe.__dataclass_fields__
    flags = {key: value for key, value in ctx.params.items() if key in keys and value is not None}
    if option:
        flags["options"] = _pairs("--option", option)
    where = source if is_recipe else "flags"
    recipe = Recipe.from_dict({**values, **flags, **_pairs("--set", set_)}, where)
    read = [name for name in (source, recipe.base, recipe.init_adapter, recipe.deepspeed) if name is not None]
    data_read = [] if recipe.data is None else [recipe.data]
    if json_file is not None:
        check_file(json_file, [*read, *data_read])
    if recipe.output is not None and not (resume or dry_run):
        check_output(recipe.output, overwrite=True, inputs=read, data=data_read)
    if dry_run:
        from distill.dry_run import dry_run as look

        look(recipe, peak_tflops=peak_tflops, utilisation=utilisation, json_file=json_file)
        return
    machines = Machines(nproc, nnodes, node_rank, master_addr, master_port)
    if machines.needed(deepspeed=recipe.deepspeed is not None):
        launch([__file__, *sys.argv[1:]], machines)
        return
    from distill.run import distill as run
    from retrofit.table import write_rows

    metrics = run(recipe, resume=resume, overwrite=overwrite)
    if json_file is not None and metrics:  # the first process of several has them
        write_rows(json_file, metrics["rows"])


@app.command(
    epilog=example(
        "retrofit patch Qwen/Qwen2.5-0.5B --window 4096 --sinks 4 -o sinks-and-window",
        "retrofit patch Qwen/Qwen2.5-0.5B --option layers=[0,2] --option others=window -o some-layers",
    )
)
def patch(
    base: Base,
    output: Output,
    memory: Memory = "none",
    window: Window = 4096,
    sinks: Sinks = 4,
    option: Options = None,
    overwrite: Overwrite = False,
) -> None:
    """Export BASE with a memory that is not trained: a custom architecture with BASE's weights and tokenizer."""
    import retrofit

    options = _pairs("--option", option)
    for key in options.keys() & {"base", "memory", "window", "sinks", "model_kwargs"}:
        raise typer.BadParameter(f"--option {key}: that is not an option of a memory")
    _export(lambda: retrofit.patch(base, memory, window, sinks, **options), [base], output, overwrite)


@app.command(epilog=example("retrofit merge Qwen/Qwen2.5-0.5B runs/first/adapter -o first-merged"))
def merge(
    base: Base,
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="Adapter: a folder or a Hub id.")],
    output: Output,
    overwrite: Overwrite = False,
) -> None:
    """Export BASE and ADAPTER as one model."""
    import retrofit

    _export(lambda: retrofit.load_adapter(base, adapter), [base, adapter], output, overwrite)


@app.command(
    epilog=example(
        "retrofit convert Qwen/Qwen2.5-3B-Instruct ByteDance-Seed/AHN-GDN-for-Qwen-2.5-Instruct-3B -o ahn-gdn-3b"
    )
)
def convert(
    base: Base,
    ahn: Annotated[str, typer.Argument(metavar="AHN", help="Published AHN weights: a folder or a Hub id.")],
    output: Output,
    window: Window = 32640,
    sinks: Sinks = 128,
    overwrite: Overwrite = False,
) -> None:
    """Write AHN weights published for BASE as an adapter. W and S default to AHN's evaluation beyond 32k tokens."""
    import retrofit
    from retrofit.files import check_output

    check_output(output, overwrite, inputs=[base, ahn])
    model = retrofit.convert_ahn(base, ahn, window, sinks)
    retrofit.save_adapter(model, output, overwrite)
    added = sum(parameter.numel() for _, parameter in model.memory_parameters())
    typer.echo(f"{output}: adapter, memory {model.config.memory['kind']}, {added:,} parameters")


@app.command(
    epilog=example(
        "retrofit estimate Qwen2.5-7B --memory kvm --window 8064 --length 128000 --dtype bfloat16",
        "retrofit estimate --paper",
    )
)
def estimate(
    base: Annotated[
        str | None, typer.Argument(metavar="[BASE]", help="Folder, config.json, Hub id or built-in name.")
    ] = None,
    memory: Memory = "ahn-gdn",
    window: Window = 32640,
    sinks: Sinks = 128,
    length: Length = 128000,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")] = "auto",
    option: Options = None,
    peak_tflops: Annotated[float | None, typer.Option(min=1e-3, help="Of your device, with --bandwidth.")] = None,
    bandwidth: Annotated[float | None, typer.Option(min=1e-3, help="Of its memory, GB/s.")] = None,
    paper: Annotated[bool, typer.Option("--paper", help="The AHN paper's table, by its own conventions.")] = False,
    json_file: Json = None,
) -> None:
    """What a memory costs and saves: parameters, operations, cache, bytes per token. Needs a configuration only."""
    from retrofit.costs import estimate as honest
    from retrofit.costs import paper as paper_table
    from retrofit.table import print_table, write_rows

    if (base is None) != paper:
        raise typer.BadParameter("give a BASE, or --paper for the table of the AHN paper (its bases are built in)")
    if (peak_tflops is None) != (bandwidth is None):
        raise typer.BadParameter("--peak-tflops and --bandwidth go together: seconds need both")
    if paper:
        rows = paper_table.paper_rows()
        print_table("AHN paper: 128,000 tokens, S = 128, W = 32640, 4-byte cache", rows, paper_table.COLUMNS)
        typer.echo(paper_table.NOTE)
    else:
        device = honest.Device(peak_tflops, bandwidth) if peak_tflops and bandwidth else None
        how: dict[str, Any] = {"batch": batch, "dtype": dtype, "device": device}
        options = _pairs("--option", option)
        for key in options.keys() & {"base", "memory", "window", "sinks", "length", *how}:
            raise typer.BadParameter(f"--option {key}: that is not an option of a memory")
        how |= options
        rows, said = honest.estimate(str(base), memory, window, sinks, length, **how)
        print_table(said, rows, honest.COLUMNS)
        typer.echo(honest.LEGEND)
        if device:
            typer.echo("\nat the device's peaks, which nothing can beat:")
            print_table("", rows, honest.SECONDS)
    if json_file is not None:
        write_rows(json_file, rows)


@app.command(
    epilog=example(
        'retrofit generate runs/first/model --prompt "Once upon a time" --max-new-tokens 200',
        "retrofit generate runs/first/model --chat",
    )
)
def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="An exported model, or a base to go with --adapter.")],
    prompt: Annotated[str | None, typer.Option(help="Text to continue; with --chat, the only turn.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Converse in the tokenizer's template; Ctrl-D ends.")] = False,
    adapter: Annotated[str | None, typer.Option(help="Adapter: a folder or a Hub id.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="At most so many tokens (of each reply).")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="Of sampling; 0 takes the likeliest token.")] = 0,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of sampling.")] = 0,
) -> None:
    """Continue a prompt, or chat, with an exported model or a base and an adapter. The text is printed as it comes."""
    if prompt is None and not chat:
        raise typer.BadParameter("give --prompt TEXT to continue, or --chat to converse")
    from retrofit.generation import Sampling, generate_text, load_for_generation

    loaded, tokenizer = load_for_generation(model, adapter)
    if chat:
        from retrofit.chat import Chat, talk

        conversation = Chat(loaded, tokenizer, Sampling(max_new_tokens, temperature), seed)
        if prompt is None:
            talk(conversation)
        else:
            conversation.say(prompt, stream=True)
    elif prompt is not None:
        generate_text(
            loaded, tokenizer, prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, stream=True
        )


@app.command(
    epilog=example(
        "retrofit push runs/first/adapter user/first",
        "retrofit push runs/first/model user/first-model --private --revision v1",
    )
)
def push(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="DIR/adapter or DIR/model of a run, or such a folder.")],
    repo_id: Annotated[str, typer.Argument(metavar="USER/NAME", help="Repository on the Hub; made if need be.")],
    private: Annotated[bool, typer.Option("--private", help="Make it a private repository.")] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", "--branch", help="Branch to write to (default: main).")
    ] = None,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
) -> None:
    """Upload an adapter or an exported model to the Hub, with its card.

    The token is that of `hf auth login` or HF_TOKEN.
    """
    import retrofit

    address = retrofit.push_folder(path, repo_id, private=private or None, revision=revision, message=message)
    typer.echo(address)


@app.command(epilog=example("retrofit doctor", "retrofit doctor --json findings.json"))
def doctor(json_file: Json = None) -> None:
    """Look at what is installed, whether it goes together, and which kernel each memory runs on.

    Ends with status 1 if something will break.
    """
    try:
        from retrofit.doctor import BAD, COLUMNS, examine, rows
        from retrofit.table import print_table, write_rows
    except ImportError as error:
        typer.echo(f"breaks: retrofit does not import ({error}): pip install -U --force-reinstall retrofit-lm")
        raise typer.Exit(1) from None

    findings = examine()
    print_table("doctor", rows(findings), COLUMNS)
    for finding in findings:
        if finding.advice:
            typer.echo(f"{finding.verdict}: {finding.name}: {finding.advice}")
    if json_file is not None:
        write_rows(json_file, rows(findings))
    if any(finding.verdict == BAD for finding in findings):
        raise typer.Exit(1)


@app.command(
    "eval",
    epilog=example(
        "retrofit eval runs/first/model --data held-out.txt",
        "retrofit eval Qwen/Qwen2.5-0.5B --adapter runs/first/adapter --probe niah_single_2 --length 4096",
    ),
)
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="An exported retrofit, or the base of the adapters.")],
    adapter: Annotated[list[str] | None, typer.Option(help="Adapter, a row of its own; again for more.")] = None,
    window: Annotated[int | None, typer.Option(help="W of all rows, instead of the saved one.")] = None,
    sinks: Annotated[int | None, typer.Option(help="S of all rows, instead of the saved one.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the base: auto, float32 or bfloat16.")] = "auto",
    data: Annotated[str | None, typer.Option(help="Text: KL and NLL by position on it.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=2, help="Tokens per row of it (default: 4 (W + S)).")] = None,
    eval_rows: Annotated[int, typer.Option("--rows", min=1, help="Rows of it.")] = 16,
    probe: Annotated[
        list[str] | None, typer.Option(help="identity, recall, passkey, niah_...; again for more.")
    ] = None,
    length: Annotated[list[int] | None, typer.Option(min=1, help="Tokens of a probe; again for more.")] = None,
    depth: Annotated[list[float] | None, typer.Option(help="Of a needle, 0 to 1; again for more.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Per length and depth.")] = 5,
    bindings: Annotated[list[int] | None, typer.Option(min=1, help="Outstanding in recall; again for more.")] = None,
    haystack: Annotated[str | None, typer.Option(help="Text file to hide needles in.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the chat template.")] = False,
    benchmark: Annotated[list[str] | None, typer.Option(help="longbench, lveval, infinitebench, ...-own.")] = None,
    benchmark_data: Annotated[str | None, typer.Option(help="Folder with its files (default: the Hub).")] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks of lm-evaluation-harness, with commas.")] = None,
    include_path: Annotated[str | None, typer.Option(help="Folder with further tasks for it.")] = None,
    task_length: Annotated[list[int] | None, typer.Option(min=1, help="Tokens of its RULER tasks.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Samples of each benchmark's or harness's task.")] = None,
    size: Annotated[list[int] | None, typer.Option(min=1, help="State size: perplexity of the policies.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the probes.")] = 0,
    output: Output = Path("runs/eval"),
    overwrite: Overwrite = False,
) -> None:
    """How much worse than full attention: MODEL beside its teacher and the window-only model.

    An interrupted run continues where it was; DIR/eval.json has everything that is printed, and more.
    """
    from retrofit.evaluation.run import run_evaluation
    from retrofit.evaluation.settings import Settings
    from retrofit.evaluation.tables import tables
    from retrofit.table import print_table

    chosen: dict[str, Any] = {"probes": probe, "lengths": length, "depths": depth, "bindings": bindings}
    chosen |= {"benchmarks": benchmark, "task_lengths": task_length, "sizes": size}
    chosen["tasks"] = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    given: dict[str, Any] = {"probes": ()} if data or tasks or benchmark else {}  # unless asked for besides these
    given |= {name: tuple(values) for name, values in chosen.items() if values}
    settings = Settings(
        model,
        tuple(adapter or ()),
        window=window,
        sinks=sinks,
        dtype=dtype,
        data=data,
        seq_len=seq_len,
        eval_rows=eval_rows,
        samples=samples,
        haystack=haystack,
        chat=chat,
        benchmark_data=benchmark_data,
        include_path=include_path,
        limit=limit,
        seed=seed,
        **given,
    )
    summary = run_evaluation(settings, output, overwrite)
    for title, rows, columns in tables(summary):
        print_table(title, rows, columns)
    if data and not (probe or benchmark or tasks):
        typer.echo("only the text was scored: add --probe identity, recall, passkey or a needle task to ask for more")
    for said in (said for one in summary["benchmarks"].values() for said in one["departures"]):
        typer.echo(f"note: {said}")
    typer.echo(f"{output}: eval.json, results.jsonl")


@app.command(
    epilog=example(
        "retrofit report runs/first",
        "retrofit report runs/first --eval runs/eval --bench bench.json -o first.html",
    )
)
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of `retrofit distill` or `retrofit eval`.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The page (default: RUN/report.html).")
    ] = None,
    evaluation: Annotated[
        Path | None, typer.Option("--eval", metavar="DIR", help="Folder of `retrofit eval` (default: RUN/eval).")
    ] = None,
    bench: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rows of a benchmark's --json (default: RUN/bench.json).")
    ] = None,
) -> None:
    """One HTML page about a run: curves, KL by position, recall, costs, tables, recipe.

    Its figures are written to RUN/figures too, as PNG and SVG.
    """
    from retrofit.report.page import FIGURES
    from retrofit.report.page import report as write

    page, pictures, missing = write(run, output, evaluation, bench)
    for sentence in missing:
        typer.echo(sentence, err=True)
    typer.echo(f"{page}: {len(pictures)} figures, each as PNG and SVG in {run / FIGURES}")


@bench.command("window", epilog=example("retrofit bench window --length 16384 --window 1024"))
def bench_window(
    ctx: typer.Context,
    length: Length = 16384,
    window: Window = 1024,
    sinks: Sinks = 4,
    heads: Heads = 4,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key/value heads.")] = 2,
    head_dim: HeadDim = 64,
    backward: Annotated[bool, typer.Option("--backward", help="Forward and backward.")] = False,
    device: On = "cpu",
    dtype: Dtype = "float32",
    repeats: Repeats = 3,
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """Blocked window attention beside the dense mask: time, and peak memory measured in a process of its own."""
    _measure("window", ctx, repeats)


@bench.command("scan", epilog=example("retrofit bench scan --length 4096"))
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


@bench.command("decode", epilog=example("retrofit bench decode --memory ahn-gdn --long 16384"))
def bench_decode(
    ctx: typer.Context,
    memories: Kinds = None,
    window: Window = 512,
    sinks: Sinks = 4,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the random model.")] = 4,
    hidden: Annotated[int, typer.Option(min=1, help="Its width; heads are 64 wide.")] = 256,
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


@bench.command("prefill", epilog=example("retrofit bench prefill --memory joint --length 4096 --longest 32768"))
def bench_prefill(
    ctx: typer.Context,
    memories: Kinds = None,
    window: Window = 512,
    sinks: Sinks = 4,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the random model.")] = 4,
    hidden: Annotated[int, typer.Option(min=1, help="Its width; heads are 64 wide.")] = 256,
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


@bench.command(
    "run",
    epilog=example(
        "retrofit bench run --memory all --length 4096 --length 16384",
        "retrofit bench run --model runs/first/model --length 32768 --device cuda --dtype bfloat16",
    ),
)
def bench_run(
    ctx: typer.Context,
    memories: Kinds = None,
    lengths: Annotated[
        list[int] | None, typer.Option("--length", min=1, help="Tokens of a prompt; again for more.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A base or an exported model (default: a random Qwen2).")] = None,
    window: Annotated[int | None, typer.Option(help="W (default: MODEL's own, or 512).")] = None,
    sinks: Annotated[int | None, typer.Option(help="S (default: MODEL's own, or 4).")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the random model.")] = 4,
    hidden: Annotated[int, typer.Option(min=1, help="Its width; heads are 64 wide.")] = 256,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded at each length.")] = 32,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens per call in which a prompt is read.")] = 2048,
    peak_tflops: Annotated[
        float | None, typer.Option(min=1e-6, help="Of the device in that dtype (default: known, or measured).")
    ] = None,
    bandwidth: Annotated[float | None, typer.Option(min=1e-6, help="Of its memory, GB/s.")] = None,
    device: On = "cpu",
    dtype: Dtype = "float32",
    repeats: Repeats = 3,
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """Prefill, decoding, memory and cache of full attention, the window alone and memories, beside the roofline."""
    _measure("run", ctx, repeats)


@bench.command("capacity", epilog=example("retrofit bench capacity --seeds 200"))
def bench_capacity(
    ctx: typer.Context,
    decay: Annotated[float, typer.Option(help="lambda of the decayed row.")] = 0.995,
    seeds: Annotated[int, typer.Option(help="Random memories of each kind.")] = 60,
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """How many pairs a D x D outer-product memory takes until its first is lost, beside the Tensor Cache paper."""
    _measure("capacity", ctx, seeds)


@bench.command("loss", epilog=example("retrofit bench loss --dtype bfloat16"))
def bench_loss(
    ctx: typer.Context,
    positions: Annotated[int, typer.Option(min=1, help="Scored positions.")] = 2048,
    width: Annotated[int, typer.Option(min=1, help="Width of the hidden states.")] = 2048,
    vocabulary: Annotated[int, typer.Option(min=2, help="Tokens the head tells apart.")] = 151_936,
    device: On = "cpu",
    dtype: Dtype = "float32",
    repeats: Repeats = 3,
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """The chunked KL through a frozen head beside its naive form: time, and peak memory in a process of its own."""
    _measure("loss", ctx, repeats, "distill.bench")


@bench.command("step", epilog=example("retrofit bench step --length 4096"))
def bench_step(
    ctx: typer.Context,
    memory: Memory = "ahn-gdn",
    window: Window = 256,
    sinks: Sinks = 4,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the random model.")] = 4,
    hidden: Annotated[int, typer.Option(min=1, help="Its width; heads are 64 wide.")] = 512,
    length: Length = 2048,
    device: On = "cpu",
    dtype: Dtype = "float32",
    repeats: Repeats = 5,
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """A distillation step beside the sum of its parts and beside a second teacher model; the student at twice T."""
    _measure("step", ctx, repeats, "distill.bench")


Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's file, or the name of a shipped one.")]


@recipes.command("ls", epilog=example("retrofit recipes ls"))
def recipes_ls() -> None:
    """List the recipes that come with the package, each with its first line."""
    from distill.recipe import shipped_recipes

    shipped = shipped_recipes()
    width = max(map(len, shipped), default=0)
    for name, path in shipped.items():
        typer.echo(f"{name:{width}}  {path.read_text(encoding='utf-8').splitlines()[0].lstrip('# ')}")


@recipes.command("show", epilog=example("retrofit recipes show small-text-ahn-gdn"))
def recipes_show(recipe: Recipe) -> None:
    """Print a recipe's file, comments and all."""
    typer.echo(_recipe_file(recipe).read_text(encoding="utf-8"), nl=False)


@recipes.command("cp", epilog=example("retrofit recipes cp small-text-ahn-gdn my-recipe.yaml"))
def recipes_cp(
    recipe: Recipe,
    target: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")],
    overwrite: Overwrite = False,
) -> None:
    """Copy a recipe to a file of your own, to be edited."""
    from retrofit.files import write_bytes

    path = _recipe_file(recipe)
    if target.exists() and not overwrite:
        raise typer.BadParameter(f"{target} exists: choose another name or pass --overwrite")
    write_bytes(target, path.read_bytes())


@recipes.command("check", epilog=example("retrofit recipes check my-recipe.yaml"))
def recipes_check(
    names: Annotated[list[str] | None, typer.Argument(metavar="RECIPE...", help="Files or shipped names.")] = None,
) -> None:
    """Validate recipes; without an argument, all that come with the package."""
    from distill.check import check_recipe
    from distill.recipe import load_recipe, shipped_recipes
    from patches.errors import RetrofitError

    for name in names or shipped_recipes():
        recipe = load_recipe(name)
        try:
            check_recipe(recipe)
        except RetrofitError as error:
            raise RetrofitError(f"{name}: {error}") from None
        typer.echo(f"{name}: valid")


def _recipe_file(path_or_name: str) -> Path:
    """Where a recipe lies; the file must hold a valid one."""
    from distill.recipe import load_recipe, shipped_recipes

    load_recipe(path_or_name)
    path = Path(path_or_name)
    return path if path.is_file() else shipped_recipes()[path_or_name]


def _pairs(flag: str, items: list[str] | None) -> dict[str, Any]:
    """``["a=1", "b=[0, 2]"]`` as a mapping; values are read as YAML; 1e-2, which YAML takes for text, is a number."""
    from patches.errors import RetrofitError
    from retrofit.plain_yaml import parse_yaml

    pairs: dict[str, Any] = {}
    for item in items or []:
        key, equals, text = item.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{flag} {item}: write it as {flag} KEY=VALUE")
        try:
            pairs[key] = parse_yaml(text, key)
        except RetrofitError:
            raise typer.BadParameter(f"{flag} {item}: {text!r} cannot be read as a value") from None
        if isinstance(pairs[key], str):
            with contextlib.suppress(ValueError):
                pairs[key] = float(text)
    return pairs


def _export(build: Callable[[], Any], inputs: list[str], output: Path, overwrite: bool) -> None:
    """Write the model that ``build`` makes of ``inputs`` (the base first) to ``output``; say what was written.

    The base's tokenizer goes with it, if there is one.
    """
    from patches.errors import RetrofitError
    from retrofit.export import export_model
    from retrofit.files import check_output
    from retrofit.loading import load_tokenizer

    check_output(output, overwrite, inputs)
    model = build()
    try:
        tokenizer = load_tokenizer(inputs[0])
    except RetrofitError as error:
        tokenizer = None
        typer.echo(f"note: exported without a tokenizer: {error}", err=True)
    export_model(model, output, tokenizer, overwrite=overwrite)
    added = sum(parameter.numel() for _, parameter in model.memory_parameters())
    memory = model.config.memory
    kept = f"window {memory['window']}, sinks {memory['sinks']}"
    added_to = f"{added:,} parameters added to {model.num_parameters() - added:,}"
    typer.echo(f"{output}: {type(model).__name__}, memory {memory['kind']}, {kept}, {added_to}")


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


main = app

if __name__ == "__main__":
    main()
