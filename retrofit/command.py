"""The verbs of a retrofit's life: patch, merge, convert, generate, push, and the doctor."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import retrofit
from patches.errors import RetrofitError
from retrofit.options import (
    Base,
    Json,
    Memory,
    MemoryRecipe,
    Options,
    Output,
    Overwrite,
    Seed,
    Sinks,
    Verbs,
    Window,
    loading,
    of_recipe,
    pairs,
)

app = Verbs()
OF_BUDGET = ("texts", "context", "batch")


@app.verb(
    "retrofit patch Qwen/Qwen2.5-0.5B --window 4096 --sinks 4 -o sinks-and-window",
    "retrofit patch Qwen/Qwen2.5-0.5B --option layers=[0,2] --option others=window -o some-layers",
    "retrofit patch Qwen/Qwen2.5-0.5B --memory expected --budget 64KiB --data corpus.txt -o chosen-tokens",
    "retrofit patch Qwen/Qwen2.5-0.5B --memory expected --budget 5% --context 32768 --data corpus.txt -o a-twentieth",
)
def patch(
    ctx: typer.Context,
    base: Base,
    output: Output,
    memory: Memory = "none",
    window: Annotated[
        int | None,
        typer.Option(
            help="W: how many of the last tokens are kept exactly.", show_default="4096, or what --budget finds"
        ),
    ] = None,
    sinks: Sinks = 4,
    option: Options = None,
    recipe: MemoryRecipe = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="What `expected` may keep: of one sequence in each layer (64KiB); with --context or --batch, in all "
            "layers of all sequences (2GiB); or a part of the full cache (5%). Window, bits and each head's entries "
            "are then chosen on --data.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of the longest input that the budget is for.", show_default="the base's own"),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences at once that the budget is for.", show_default="1")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Text to calibrate `expected`, `joint` or `joint-rows` on, of the kinds that the model will meet."
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Export BASE with a memory that is not trained; --data calibrates it, --budget also chooses its sizes.

    The export is a custom architecture with the weights and the tokenizer of BASE.
    """
    options = pairs("--option", option, taken=("base", "memory", "window", "sinks", "model_kwargs", *OF_BUDGET))
    if budget is None and (context, batch) != (None, None):
        raise typer.BadParameter("--context and --batch say what a budget is for: add --budget")
    given = {
        "memory": memory,
        "window": 4096 if window is None and budget is None else window,
        "sinks": sinks,
        **options,
    }
    if recipe is not None:
        given = of_recipe(ctx, recipe)
        memory = given["memory"]
    loading(base)
    from patches.kinds import find_kind

    kind = find_kind(memory)
    kind.read_options({key: value for key, value in options.items() if key not in ("layers", "others", "by_layer")})
    if recipe is not None and data is not None and not kind.calibrates:
        typer.echo(f"note: memory {memory!r} has nothing to calibrate: {data} is not read", err=True)
        data = None
    if budget is not None and "rows" in options:
        raise RetrofitError("rows: --budget chooses this number itself: leave it out")
    if budget is not None and memory != "expected":
        raise RetrofitError(f"memory {memory!r} has no budget: use --memory expected, or give --window")
    if data is None and kind.needs_texts:
        raise RetrofitError(f"memory {memory!r} measures queries on text: add --data FILE")
    if data is not None and not kind.calibrates:
        raise RetrofitError(f"memory {memory!r} has nothing to calibrate: drop --data")

    def build() -> Any:
        if budget is not None:
            return _fit_budget(base, str(data), budget, context, batch, given)
        model = retrofit.patch(base, **given)
        if data is not None:
            from retrofit.calibration import read_texts, row_length

            retrofit.calibrate(model, read_texts(data, base, row_length(model)))
        return model

    inputs = [base] if recipe is None else [base, recipe]
    _export(build, inputs, output, overwrite, data=[] if data is None else [data])


def _fit_budget(
    base: str, data: str, budget: str, context: int | None, batch: int | None, given: dict[str, Any]
) -> Any:
    """The model that a budget gives; print what it was chosen from."""
    from retrofit.budget import COLUMNS, fit_budget, read_budget, text_length
    from retrofit.calibration import LENGTH, read_texts
    from retrofit.loading import load_base
    from retrofit.table import print_table

    found = load_base(base)
    of_layers = {key: given[key] for key in ("layers", "others") if key in given}
    size = read_budget(budget, found.config, found.dtype, context=context, batch=batch, **of_layers)
    longest = int(context or getattr(found.config, "max_position_embeddings", None) or size)
    length = min(max(LENGTH, text_length(found.config, size, found.dtype, context)), longest)
    how = {key: value for key, value in given.items() if key != "memory"}
    say = lambda line: typer.echo(line, err=True)  # noqa: E731
    model, rows = fit_budget(found, read_texts(data, base, length), size, context=context, say=say, **how)
    print_table(f"at most {size:,} bytes per layer and sequence", rows, COLUMNS)
    return model


@app.verb("retrofit merge Qwen/Qwen2.5-0.5B runs/first/adapter -o first-merged")
def merge(
    base: Base,
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="Adapter: a folder or a Hub id.")],
    output: Output,
    overwrite: Overwrite = False,
) -> None:
    """Export BASE and ADAPTER as one model."""
    loading(base)
    _export(lambda: retrofit.load_adapter(base, adapter), [base, adapter], output, overwrite)


@app.verb("retrofit convert Qwen/Qwen2.5-3B-Instruct ByteDance-Seed/AHN-GDN-for-Qwen-2.5-Instruct-3B -o ahn-gdn-3b")
def convert(
    base: Base,
    ahn: Annotated[str, typer.Argument(metavar="AHN", help="Published AHN weights: a folder or a Hub id.")],
    output: Output,
    window: Window = 32640,
    sinks: Sinks = 128,
    overwrite: Overwrite = False,
) -> None:
    """Turn the AHN weights published for BASE into an adapter.

    By default, W and S are those of AHN's evaluation beyond 32k tokens.
    """
    from retrofit.files import check_replaced

    check_replaced(output, overwrite, inputs=[base, ahn])
    loading(base)
    model = retrofit.convert_ahn(base, ahn, window, sinks)
    retrofit.save_adapter(model, output, overwrite)
    added = sum(parameter.numel() for _, parameter in model.memory_parameters())
    typer.echo(f"{output}: adapter, memory {model.config.memory['kind']}, {added:,} parameters")


@app.verb(
    'retrofit generate runs/first/model --prompt "Once upon a time" --max-new-tokens 200',
    "retrofit generate runs/first/model --chat",
)
def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="An exported model, or a base that takes --adapter.")],
    prompt: Annotated[
        str | None, typer.Option(help="Text to continue; with --chat, the one message to answer.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Talk through the tokenizer's chat template; Ctrl-D ends.")
    ] = False,
    adapter: Annotated[str | None, typer.Option(help="Adapter: a folder or a Hub id.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens to generate, for the text or for each reply.")
    ] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 takes the most likely token.")] = 0,
    seed: Seed = 0,
) -> None:
    """Continue a prompt, or chat.

    MODEL is an exported model, or a base to which --adapter gives a memory. The text is printed as it is generated.
    """
    if prompt is None and not chat:
        raise typer.BadParameter("give --prompt TEXT to continue a text, or --chat to talk")
    loading(model)
    from retrofit.generation import generate_text, load_for_generation

    loaded, tokenizer = load_for_generation(model, adapter)
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    if prompt is not None and not chat:
        generate_text(loaded, tokenizer, prompt, seed=seed, stream=True, **how)
        return
    from retrofit.chat import Chat, talk

    conversation = Chat(loaded, tokenizer, seed, **how)
    if prompt is None:
        talk(conversation)
    else:
        conversation.say(prompt, stream=True)


@app.verb(
    "retrofit push runs/first/adapter user/first",
    "retrofit push runs/first/model user/first-model --private --revision v1",
)
def push(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Folder of an adapter or of an exported model.")],
    repo_id: Annotated[
        str, typer.Argument(metavar="USER/NAME", help="Repository on the Hub, created if it does not exist.")
    ],
    private: Annotated[bool, typer.Option("--private", help="Create the repository as a private one.")] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", "--branch", help="Branch to write to (default: main).")
    ] = None,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
) -> None:
    """Upload an adapter or an exported model to the Hub.

    Its card goes with it. The command uses the token of `hf auth login` or HF_TOKEN.
    """
    loading(path)
    typer.echo(retrofit.push_folder(path, repo_id, private=private or None, revision=revision, message=message))


@app.verb("retrofit doctor", "retrofit doctor --json findings.json")
def doctor(json_file: Json = None) -> None:
    """Check what is installed and whether it works together.

    It also shows which kernel runs each memory. It ends with status 1 if something is broken.
    """
    loading("what is installed")
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


def _export(
    build: Callable[[], Any], inputs: list[str], output: Path, overwrite: bool, data: Sequence[str] = ()
) -> None:
    """Write the model that ``build`` makes of ``inputs`` (the base first) to ``output``; say what was written.

    The base's tokenizer goes with it, if there is one.
    """
    from retrofit.export import export_model
    from retrofit.files import check_replaced
    from retrofit.loading import load_tokenizer

    check_replaced(output, overwrite, inputs=inputs, data=data)
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
