"""``retrofit estimate``: what a memory costs and saves, from a configuration alone."""

from typing import Annotated, Any

import typer

from retrofit.options import Json, Memory, MemoryRecipe, Options, Sinks, Verbs, Window, loading, of_recipe, pairs

app = Verbs()


@app.verb(
    "retrofit estimate Qwen2.5-7B --memory kvm --window 8064 --length 128000 --dtype bfloat16",
)
def estimate(
    ctx: typer.Context,
    base: Annotated[str, typer.Argument(metavar="BASE", help="Folder, config.json, Hub id or built-in name.")],
    memory: Memory = "ahn-gdn",
    window: Window = 32640,
    sinks: Sinks = 128,
    length: Annotated[int, typer.Option(min=1, help="T: tokens of each sequence.")] = 128000,
    batch: Annotated[int, typer.Option(min=1, help="Number of sequences.")] = 1,
    dtype: Annotated[
        str, typer.Option(help="Dtype of the model: auto (the checkpoint's own), float32, bfloat16 or float16.")
    ] = "auto",
    option: Options = None,
    recipe: MemoryRecipe = None,
    peak_tflops: Annotated[
        float | None, typer.Option(min=1e-6, help="Peak TFLOP/s of the device; give --bandwidth too.")
    ] = None,
    bandwidth: Annotated[float | None, typer.Option(min=1e-6, help="Memory bandwidth of the device, in GB/s.")] = None,
    json_file: Json = None,
) -> None:
    """Estimate what a memory costs and saves.

    The table shows parameters, operations, cache and bytes per token. It needs only the configuration of BASE.
    """
    if (peak_tflops is None) != (bandwidth is None):
        raise typer.BadParameter("--peak-tflops and --bandwidth go together: seconds need both")
    loading(base)
    from retrofit.costs import estimate as costs
    from retrofit.table import print_table, write_rows

    device = costs.Device(peak_tflops, bandwidth) if peak_tflops and bandwidth else None
    how: dict[str, Any] = {"batch": batch, "dtype": dtype, "device": device}
    how |= pairs("--option", option, taken=("base", "memory", "window", "sinks", "length", *how))
    of_memory: dict[str, Any] = {"memory": memory, "window": window, "sinks": sinks}
    if recipe is not None:
        of_memory = of_recipe(ctx, recipe)
    rows, said = costs.estimate(base, length=length, **of_memory, **how)
    print_table(said, rows, costs.COLUMNS)
    typer.echo(costs.LEGEND)
    if device:
        typer.echo("\nat the device's peaks, which are lower bounds:")
        print_table("", rows, costs.SECONDS)
    if json_file is not None:
        write_rows(json_file, rows)
