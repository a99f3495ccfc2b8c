"""The `retrofit` command: the verbs by name, each imported from its room when it is used, and how mistakes end."""

import errno
import importlib
import importlib.util
import logging
import os
import sys
import traceback
from itertools import pairwise
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_group

UsageError: Any = typer.BadParameter.__base__  # typer gives it no public name

# where each verb is defined; --help shows them in this order
ROOMS = {
    "demo": "distill.command",
    "distill": "distill.command",
    "patch": "retrofit.command",
    "merge": "retrofit.command",
    "convert": "retrofit.command",
    "generate": "retrofit.command",
    "serve": "retrofit.serving.command",
    "eval": "retrofit.evaluation.command",
    "report": "retrofit.report.command",
    "bench": "retrofit.bench.command",
    "estimate": "retrofit.costs.command",
    "recipes": "distill.command",
    "push": "retrofit.command",
    "doctor": "retrofit.command",
}


class Verbs(TyperGroup):
    """The command itself. Every mistake of the user ends in one line on stderr and status 2, Ctrl-C in status 130.

    One process of several leaves what it has to say, a traceback too, to the launcher, which says it once.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all verbs."""
        return list(ROOMS)

    def get_command(self, ctx: Any, name: str) -> Any:
        """The verb of that name, or None."""
        # where there is none, all are wanted: one of them may be meant
        for verb in [name] if name in ROOMS else ROOMS:
            if verb not in self.commands:
                self.commands[verb] = get_group(importlib.import_module(ROOMS[verb]).app).commands[verb]
        return self.commands.get(name)

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run the command line and end the process."""
        _quieten()
        try:
            _check_surroundings(args[0] if args else kwargs.get("args") or sys.argv[1:])
            sys.exit(super().main(*args, **{**kwargs, "standalone_mode": False}))
        except Exception as error:
            message = _sentence(error)
            if not _told_launcher(message or traceback.format_exc()):
                if not message:
                    raise
                typer.echo(f"error: {message}", err=True)
            sys.exit(2 if message else 1)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None


def _check_surroundings(arguments: list[str]) -> None:
    """Refuse what no verb can work with, before any tries.

    Raises:
        BadParameter: an argument is not UTF-8, or an output has no name.
        OSError: the current folder is gone.
    """
    for argument in arguments:
        if not argument.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in argument):
            raise typer.BadParameter(f"{argument!a} is not UTF-8: write it in UTF-8, or rename the file")
    for flag, value in pairwise(arguments):
        if flag in ("-o", "--output", "--json") and not value:
            raise typer.BadParameter(f"{flag} is empty: name what is to be written")
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise OSError(error.errno, "the current folder was removed: change to another one") from None


def _quieten() -> None:
    """Keep what other libraries say in passing off both streams: stdout has results, stderr what we say.

    Their errors are shown.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # of the bars that say nothing of their own, such as "Loading weights"
    for chatty in (logging.lastResort, logging.getLogger("torch.utils._pytree"), logging.getLogger("DeepSpeed")):
        if chatty is not None:
            chatty.addFilter(_worth_showing)


def _worth_showing(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or record.name.partition(".")[0] in ("patches", "retrofit", "distill")


def _sentence(error: Exception) -> str:
    """What the user did wrong and can do about it, in one line; empty if the mistake is ours."""
    said = ""
    if isinstance(error, UsageError):
        path = error.ctx.command_path if error.ctx else "retrofit"
        said = f"{error.format_message().rstrip('.')} (see {path} --help)"
    elif isinstance(error, OSError) and error.strerror is not None:
        # the file that the error of a full disk names may be one that is only read
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        named = f"{error.filename}: " if error.filename and not full else ""
        advice = ": what was being written was not kept, make room and try again" if full else ""
        said = named + error.strerror + advice
    elif isinstance(error, ImportError):
        said = _missing()
    elif isinstance(error, ValueError):
        from patches.errors import RetrofitError

        said = str(error) if isinstance(error, RetrofitError) else ""
    return " ".join(said.split())


def _missing() -> str:
    """Which package is not there, or has another in its place."""
    try:
        from retrofit.import_guard import check_sibling

        for name in ("patches", "distill"):
            check_sibling(name)
    except ImportError as error:
        return str(error)
    absent = [name for name in ("accelerate", "datasets") if importlib.util.find_spec(name) is None]
    return f"this needs {' and '.join(absent)}: pip install 'retrofit-lm[train]'" if absent else ""


def _told_launcher(message: str) -> bool:
    """Whether this is one process of several, whose launcher now has ``message`` to print once."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return False
    from distill.parallel import tell_launcher

    return tell_launcher(message)


# rich's help pages take twice as long to appear
app = typer.Typer(cls=Verbs, rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)


@app.callback(
    invoke_without_command=True,
    epilog="\b\nExample:\n  retrofit demo\n"
    "  retrofit distill Qwen/Qwen2.5-0.5B --data corpus.txt --output runs/first\n"
    '  retrofit generate runs/first/model --prompt "Once upon a time"',
)
def root(ctx: typer.Context) -> None:
    """Give a pretrained language model a bounded memory: patch its attention, distil it against itself, ship it."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


main = app

if __name__ == "__main__":
    main()
