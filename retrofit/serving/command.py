"""``retrofit serve``: an OpenAI API on an exported model, by the engine that is installed."""

from typing import Annotated

import typer

from retrofit.options import Verbs

app = Verbs()


@app.verb(
    "retrofit serve runs/first/model",
    "retrofit serve user/first-model --port 9000 --max-model-len 8192",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def serve(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="An exported model: a folder or a Hub id.")],
    engine: Annotated[
        str | None, typer.Option(help="vllm or transformers; by default vllm if it is installed.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
) -> None:
    """Serve MODEL over OpenAI's API.

    vLLM answers many requests at once, transformers serve one at a time. Options that are not listed here go to the
    engine.
    """
    from .serve import serve

    serve(model, engine, host, port, ctx.args)
