"""`lexperts app`: the demo app in a browser."""

from pathlib import Path
from typing import Annotated

import typer

from run_tools.servers import check_host

from .common import Debug, Device, Model, TrustRemoteCode, user_errors
from .corpus_options import check_local


def app(
    model: Model = None,
    mixture: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, metavar="DIR", help="A mixture, whose routing a third tab draws."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port to listen on; by default the first free one from 7860.")
    ] = None,
    max_characters: Annotated[int, typer.Option(min=1, help="Maximum length of a text.")] = 20_000,
    max_file_mb: Annotated[int, typer.Option(min=1, help="Maximum size of an uploaded file in MB.")] = 20,
    max_documents: Annotated[int, typer.Option(min=1, help="Maximum number of documents in a file.")] = 2_000,
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
):
    """Open the demo app: keyphrases marked in a text, the experts that read it, and files of documents.

    \b
    Example:
      lexperts app
      lexperts app --mixture mixture --port 8080
    """
    with user_errors(debug):
        check_local("local", device, model=model)
        check_host("--host", host)
        from ..app import AppSettings, launch

        limits = {"max_characters": max_characters, "max_file_mb": max_file_mb, "max_documents": max_documents}
        print("opening the keyphrase model; the address of the page follows", flush=True)
        settings = AppSettings(model, mixture, device, trust_remote_code, **limits)
        launch(settings, host=host, port=port)
