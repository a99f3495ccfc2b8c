"""What the verbs of the command line share: options by name, flags made from settings, values as KEY=VALUE."""

import functools
import inspect
import os
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from patches.errors import RetrofitError
from retrofit.plain_yaml import parse_yaml
from retrofit.settings import Setting, settings

# what a verb reads, by the names of its parameters; the file that it writes must be none of them
INPUTS = ("source", "base", "model", "adapter", "ahn", "recipe", "init_adapter", "deepspeed", "data")

Base = Annotated[str, typer.Argument(metavar="BASE", help="Checkpoint of the base: a folder, a GGUF file or a Hub id.")]
Memory = Annotated[str, typer.Option(help="Kind of memory, such as ahn-gdn; none keeps only sinks and window.")]
Window = Annotated[int, typer.Option(help="W: how many of the last tokens are kept exactly.")]
Sinks = Annotated[int, typer.Option(help="S: how many of the first tokens are kept exactly.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="An option of the memory; repeat the flag for more."),
]
MemoryRecipe = Annotated[
    str | None,
    typer.Option(
        metavar="RECIPE",
        help="Recipe of `retrofit distill`, a file or a shipped name, whose memory is taken in place of these flags.",
    ),
]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what Retrofit wrote there.")]
Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", dir_okay=False, help="Also write the table's rows to FILE.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of every random choice.")]


class Verb(TyperCommand):
    """A verb; the file that it will write is checked before it does anything."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line, on which flags may be written as transformers' are: `--push_to_hub true`."""
        switches = {
            name: param.secondary_opts[0] for param in self.params if param.secondary_opts for name in param.opts
        }
        found: list[str] = []
        for arg in args:
            if arg.lower() in ("true", "false") and found and found[-1] in switches:
                found[-1] = found[-1] if arg.lower() == "true" else switches[found[-1]]
            else:
                found.append(as_flag(arg))
        return super().parse_args(ctx, found)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the flags to --help under the headings that they have."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                default = "Arguments" if param.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(param, "rich_help_panel", None) or default, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def invoke(self, ctx: Any) -> Any:
        """Run it.

        Raises:
            RetrofitError: the file cannot be written, or is one of the inputs.
        """
        given = ctx.params
        paths = [given[name] for name in ("json_file", "target") if given.get(name) is not None]
        for path in paths:
            from retrofit.files import check_file

            check_file(path, [one for name in INPUTS for one in _listed(given.get(name))])
        if len({Path(path).resolve() for path in paths}) < len(paths):
            raise RetrofitError(f"{paths[0]} is named twice, for two files: choose another one for --json")
        return super().invoke(ctx)


class Verbs(typer.Typer):
    """The verbs of a room, or a group of them."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(rich_markup_mode=None, add_completion=False, **kwargs)  # rich's pages take twice as long

    def verb(
        self, *examples: str, name: str | None = None, cls: type[Verb] = Verb, **how: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A decorator that makes a function a verb; its --help ends with ``examples``, commands as one types them."""
        lines = "\n".join(["\b", "Example:", *(f"  {example}" for example in examples)])
        return self.command(name, cls=cls, epilog=lines, **how)


def flags(of: Any, leave: Container[str] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a verb a flag for every setting of the dataclass ``of``, but those in ``leave``.

    The verb gets the values that were given on the command line as keyword arguments, and no others.
    """
    keys = {name: key for name, key in settings(of).items() if name not in leave}

    def decorate(verb: Callable[..., Any]) -> Callable[..., Any]:
        only = inspect.Parameter.KEYWORD_ONLY
        own = [part for part in inspect.signature(verb).parameters.values() if part.kind is not part.VAR_KEYWORD]
        own = [part.replace(kind=only) for part in own]
        made = [inspect.Parameter(name, only, default=None, annotation=_flag(key)) for name, key in keys.items()]
        shown = [part for part in own if part.default is part.empty]  # arguments first, as typer wants them

        @functools.wraps(verb)
        def run(**values: Any) -> Any:
            return verb(**{name: value for name, value in values.items() if name not in keys}, **given(keys, values))

        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*shown, *made, *(part for part in own if part not in shown)]
        )
        return run

    return decorate


def given(keys: dict[str, Setting], values: dict[str, Any]) -> dict[str, Any]:
    """What the command line says of ``keys`` among its ``values``."""
    found = {name: value for name, value in values.items() if name in keys and value not in (None, [], ())}
    for name, key in ((name, keys[name]) for name in found):
        # a text that may be left out is left out by none, whatever the recipe says
        if key.kind in (list, dict, object) or (key.kind is str and key.optional):
            found[name] = key.parse(found[name])
    return found


def as_flag(arg: str) -> str:
    """``arg`` with dashes for the underscores of its flag, if it begins with one."""
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else arg


def pairs(flag: str, items: Iterable[str] | None, taken: Container[str] = ()) -> dict[str, Any]:
    """``["a=1", "b=[0, 2]"]`` as a mapping; values are read as YAML.

    Args:
        taken: keys that are refused, since they have flags of their own.

    Raises:
        BadParameter: no ``=``, no such value, a key given twice, or one of ``taken``.
    """
    found: dict[str, Any] = {}
    for item in items or ():
        key, equals, text = item.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{flag} {item}: write it as {flag} KEY=VALUE")
        if key in found:
            raise typer.BadParameter(f"{flag} {key} is given twice: leave one of them out")
        if key in taken:
            raise typer.BadParameter(f"{flag} {key}: that is not an option of a memory: leave it out")
        try:
            found[key] = parse_yaml(text, key)
        except RetrofitError:
            raise typer.BadParameter(f"{flag} {item}: {text!r} cannot be read as a value") from None
    return found


def of_recipe(ctx: typer.Context, recipe: str) -> dict[str, Any]:
    """The memory that ``recipe`` describes, as arguments for :func:`retrofit.patch`.

    Raises:
        BadParameter: flags describe one, too.
        RetrofitError: as :func:`retrofit.recipes.read_memory`.
    """
    for name in ("memory", "window", "sinks", "option", "budget"):
        if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE":
            raise typer.BadParameter(
                f"--{name}: the recipe already describes the memory: leave the flag out, or edit {recipe}"
            )
    from retrofit.recipes import read_memory

    return read_memory(recipe)


def loading(what: object) -> None:
    """Say what is loaded, before torch and transformers are imported for it: that alone takes seconds."""
    if "LOCAL_RANK" not in os.environ:  # one process of several: who started them has said so
        typer.echo(f"loading {what}", err=True)


def _flag(key: Setting) -> Any:
    """The annotation from which typer makes the flag of a setting."""
    value: Any = str if key.kind in (list, dict, object) else key.kind  # lists and mappings are read as YAML
    if key.kind is tuple:
        value = GenericAlias(list, (key.item,))
    name = key.flag or f"--{key.name.replace('_', '-')}"
    names = [name] if key.kind is not bool else [f"{name}/--no-{name.removeprefix('--')}"]
    metavar = "|".join(key.choices) or key.metavar or ("YAML" if key.kind in (list, dict) else None)
    how: dict[str, Any] = {"metavar": metavar, "help": key.described, "rich_help_panel": key.group}
    return Annotated[value | None, typer.Option(*names, *key.short, **how)]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
