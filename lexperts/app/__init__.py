"""The demo app: keyphrases of a text, of many documents, and the routing of a merged mixture, in a browser.

`lexperts app` starts it; `examples/space` is the same app as a Space of the Hub. It needs the extra `app` (Gradio), and no network.
"""

from .settings import AppSettings

__all__ = ["AppSettings", "launch"]


def launch(settings: AppSettings | None = None, **options):
    """Builds the app and serves it until it is stopped; see `page.launch`."""
    from .page import launch as launch_page

    return launch_page(settings or AppSettings(), **options)
