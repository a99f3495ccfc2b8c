"""The verbs that teach: ``retrofit demo`` and ``retrofit distill``, and the recipes they read."""

import inspect
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from distill.recipe import DistillKeys, read_recipe, refuse_renamed
from patches.errors import RetrofitError
from retrofit.files import check_file, check_output, write_bytes
from retrofit.import_guard import HERE
from retrofit.options import (
    Json,
    Memory,
    Options,
    Output,
    Overwrite,
    Seed,
    Verb,
    Verbs,
    as_flag,
    flags,
    given,
    loading,
    pairs,
)
from retrofit.recipes import find_recipe, shipped_recipes
from retrofit.settings import settings

OTHERS = "retrofit.training"  # where a command line's context keeps flags that are transformers' alone

app = Verbs()
recipes = Verbs(help="List, show, copy and check recipes.")
app.add_typer(recipes, name="recipes")


class Distill(Verb):
    """`retrofit distill`, which has a flag for every field of transformers' ``TrainingArguments`` as well.

    Those are added once one is used: reading them imports torch, which takes longer than --help may.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line.

        Raises:
            RetrofitError: a flag has another name in transformers.
        """
        used = {as_flag(arg).partition("=")[0] for arg in args if arg.startswith("--")} - {"--help", "--output"}
        refuse_renamed(sorted(flag[2:].replace("-", "_") for flag in used))
        if used - {flag for param in self.params for flag in (*param.opts, *param.secondary_opts)}:
            loading("transformers' own flags")
            from distill.config import DistillConfig

            others = typer.Typer()
            others.command()(flags(DistillConfig, leave=settings(DistillKeys))(lambda **values: None))
            self.params += typer.main.get_command(others).params
        left = super().parse_args(ctx, args)
        own = {*inspect.signature(distill).parameters}
        ctx.meta[OTHERS] = {name: ctx.params.pop(name) for name in ctx.params.keys() - own}
        return left


@app.verb("retrofit demo --seed 1 --json rows.json")
def demo(
    memory: Memory = "ahn-gdn",
    seed: Seed = 0,
    output: Output = Path("runs/demo"),
    overwrite: Overwrite = False,
    json_file: Json = None,
) -> None:
    """Run the whole job on a small made-up example.

    It teaches a small model, gives it a memory, distils, compares, saves, loads and generates.
    """
    loading("torch and transformers")
    from distill.demo.run import run_demo

    run_demo(memory=memory, seed=seed, output=output, json_file=json_file, overwrite=overwrite)


@app.verb(
    "retrofit distill Qwen/Qwen2.5-0.5B --data corpus.txt --window 512 --max-length 4096 -o runs/first",
    "retrofit distill my-recipe.yaml --seed 1 --eval-steps 50 -o runs/second",
    "retrofit distill qwen2.5-7b-ahn-gdn --dry-run",
    cls=Distill,
)
@flags(DistillKeys)
def distill(
    ctx: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="BASE|RECIPE", help="A checkpoint, a recipe file, or the name of a shipped recipe.")
    ],
    option: Options = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Processes on this machine, one per GPU.")] = None,
    max_restarts: Annotated[
        int,
        typer.Option(min=0, help="How often to start all processes again from the last checkpoint if one fails."),
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what the run will take, and load no weights.")
    ] = False,
    utilisation: Annotated[
        float, typer.Option(min=1e-3, max=1, help="For --dry-run: share of its peak that a GPU reaches.")
    ] = 0.45,
    peak_tflops: Annotated[
        float, typer.Option(min=1e-3, help="For --dry-run: peak of a GPU; the default is that of an H100 or H200.")
    ] = 989,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in DIR.")] = False,
    overwrite: Overwrite = False,
    json_file: Json = None,
    **said: Any,
) -> None:
    """Train a memory for BASE, or run RECIPE.

    The model with its memory learns to predict what it predicts with full attention. The run writes DIR/adapter,
    DIR/model and DIR/metrics.json. Every key of a recipe has a flag, which overrides the recipe.
    """
    is_recipe = source in shipped_recipes() or Path(source).suffix in (".yaml", ".yml")
    values = read_recipe(source) if is_recipe else {}
    if not is_recipe and said.setdefault("base", source) != source:
        raise typer.BadParameter(f"--base {said['base']}: the base is {source} already: leave one of them out")
    if option:
        more = pairs("--option", option)
        for key in more.keys() & said.get("options", {}).keys():
            raise typer.BadParameter(f"--option {key} is given by another flag, too: leave one of them out")
        said["options"] = said.get("options", {}) | more
    loading(said.get("base", values.get("base", source)))
    from distill.config import DistillConfig

    said |= given(settings(DistillConfig), ctx.meta[OTHERS])
    recipe = DistillConfig.from_dict({**values, **said}, source if is_recipe else "")
    read = [name for name in (source, recipe.base, recipe.init_adapter, recipe.deepspeed) if name is not None]
    if json_file is not None:
        check_file(json_file, [*read, *recipe.sources])
    if dry_run:
        from distill.dry_run import dry_run as look

        look(recipe, peak_tflops=peak_tflops, utilisation=utilisation, json_file=json_file)
        return
    if recipe.output_dir is not None and not resume:
        check_output(recipe.output_dir, overwrite=True, inputs=read, data=recipe.sources)
    from distill.parallel.launch import launch, needs_launch

    if needs_launch(nproc, max_restarts, deepspeed=recipe.deepspeed is not None):
        launch([str(HERE / "cli.py"), *sys.argv[1:]], nproc, max_restarts)
        return
    from distill.run import distill as run
    from retrofit.table import write_rows

    metrics = run(recipe, resume=resume, overwrite=overwrite)
    if json_file is not None and metrics:  # the first process of several has them
        write_rows(json_file, metrics["rows"])


RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped recipe.")]


@recipes.verb("retrofit recipes ls")
def ls() -> None:
    """List the recipes that come with the package."""
    shipped = shipped_recipes()
    width = max(map(len, shipped), default=0)
    for name, path in shipped.items():
        typer.echo(f"{name:{width}}  {path.read_text(encoding='utf-8').splitlines()[0].lstrip('# ')}")


@recipes.verb("retrofit recipes show small-text-ahn-gdn")
def show(recipe: RecipeName) -> None:
    """Print a recipe's file with its comments."""
    typer.echo(_file(recipe).read_text(encoding="utf-8"), nl=False)


@recipes.verb("retrofit recipes cp small-text-ahn-gdn my-recipe.yaml")
def cp(
    recipe: RecipeName,
    target: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")],
    overwrite: Overwrite = False,
) -> None:
    """Copy a recipe to a file that you can edit."""
    path = _file(recipe)
    if target.exists() and not overwrite:
        raise typer.BadParameter(f"{target} exists: choose another name or pass --overwrite")
    write_bytes(target, path.read_bytes())


@recipes.verb("retrofit recipes check my-recipe.yaml")
def check(
    names: Annotated[list[str] | None, typer.Argument(metavar="RECIPE...", help="Files or shipped names.")] = None,
) -> None:
    """Check recipes.

    Without an argument, it checks those that come with the package.
    """
    loading("torch and transformers")
    from distill.config import load_recipe
    from distill.preflight import check_recipe

    for name in names or shipped_recipes():
        recipe = load_recipe(name)
        try:
            check_recipe(recipe)
        except RetrofitError as error:
            raise RetrofitError(f"{name}: {error}") from None
        typer.echo(f"{name}: valid")


def _file(path_or_name: str) -> Path:
    """Where a recipe lies; the file must hold a mapping."""
    read_recipe(path_or_name)
    return find_recipe(path_or_name)
