"""`retrofit serve`: the engine that is there, started on an exported model; there is no server of our own."""

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NoReturn

from patches.errors import RetrofitError, nearest

from ..loading import load_config

ENGINES = ("vllm", "transformers")
VLLM = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
TRANSFORMERS = [sys.executable, "-m", "retrofit.serving.transformers_server", "serve"]


def engine_command(
    model: str, engine: str | None, host: str, port: int, rest: Sequence[str] = ()
) -> tuple[list[str], str]:
    """The command that serves ``model``, and a sentence on what the engine can do.

    Args:
        model: an exported model, a folder or a Hub id.
        engine: ``"vllm"`` or ``"transformers"``; None takes vLLM if it is installed.
        host, port: where to listen.
        rest: further options of the engine.

    Raises:
        RetrofitError: no such model, no such engine, or what the engine needs is not installed.
    """
    load_config(model)
    there = find_spec("vllm") is not None
    if engine is None:
        engine = "vllm" if there else "transformers"
    where = ["--host", host, "--port", str(port), *rest]
    if engine == "vllm":
        if not there:
            raise RetrofitError("vLLM is not installed: pip install 'retrofit-lm[vllm]', or --engine transformers")
        return [*VLLM, model, *where], "vLLM answers many requests at once"
    if engine == "transformers":
        absent = [name for name in ("fastapi", "uvicorn", "openai") if find_spec(name) is None]
        if absent:
            raise RetrofitError(
                f"transformers serve needs {', '.join(absent)}: pip install 'transformers[serving]'; or, to answer "
                "many at once, 'retrofit-lm[vllm]'"
            )
        return [*TRANSFORMERS, model, *where], "transformers serve answers one request at a time"
    raise RetrofitError(f"--engine {engine}{nearest(engine, ENGINES)}: choose {' or '.join(ENGINES)}")


def serve(model: str, engine: str | None, host: str, port: int, rest: Sequence[str] = ()) -> NoReturn:
    """Become the engine; arguments and errors as :func:`engine_command`."""
    command, says = engine_command(model, engine, host, port, rest)
    print(f"{says}: http://{host}:{port}/v1, stop with Ctrl-C", file=sys.stderr, flush=True)
    os.execv(command[0], command)
