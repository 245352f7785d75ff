"""`lexperts app`: the demo app in a browser."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lexperts_lite.servers import bind

from .common import Device, Model, TrustRemoteCode

FolderOption = partial(typer.Option, exists=True, file_okay=False)


def app(
    context: typer.Context,
    model: Model = None,
    mixture: Annotated[Path | None, FolderOption(metavar="DIR", help="A mixture, whose experts are shown.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="By default the first free one from 7860.")] = None,
    max_characters: Annotated[int, typer.Option(min=1, help="Maximum length of a text.")] = 20_000,
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
):
    """Open the app in a browser. It has keyphrases, definitions, summaries, and the experts that read a text.

    \b
    Example:
      lexperts app
      lexperts app --mixture mixture --port 8080
    """
    bind(host, port or 0).close()  # before the model is opened, which takes seconds
    print("opening the keyphrase model; the address of the page follows", flush=True)
    from ..app import launch

    launch(**context.params)
