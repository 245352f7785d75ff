"""The page of the app, in Gradio. What it shows is computed in the other modules."""

import os
from functools import partial
from pathlib import Path

from .marks import experts_html, keyphrases_html, message_html, section, yake_html
from .mixtures import MAX_CHARACTERS, Mixture, routing_html
from .reading import FLOOR, Reader
from .samples import ROUTED, SAMPLES
from .settings import AppSettings
from .writing import Writers
from .yake_reader import INSTALL, is_installed, read_by_yake

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
try:
    import gradio as gr
except ImportError as error:
    raise ImportError("The app needs Gradio. Install it with: pip install 'lexperts[app]'") from error

from .writing_tabs import writing_tabs

TITLE = "Lexperts: keyphrases"
ANY_STYLE = "any"
MOST = 50  # keyphrases that the page shows
WIDE = 900  # pixels from which settings are open at first
KEPT = 3600  # seconds that results and uploads are kept
HIDDEN = {"api_visibility": "private", "show_progress": "hidden"}
CSS = Path(__file__).parent / "style.css"
# Gradio adds its own class to the selectors of `css`, so rules for that class itself are in the head.
HEAD = """<style>@media (max-width: 640px) {
  .gradio-container, .gradio-container main {
    padding: .5rem !important; width: 100% !important; max-width: 100vw !important; box-sizing: border-box !important;
  }
}</style>"""


def open_reader(settings: AppSettings) -> Reader:
    """The keyphrase model, opened once for all visitors."""
    from keyphrase_tools.loading import open_extractor

    return Reader(open_extractor(settings.model, device=settings.device, trust_remote_code=settings.trust_remote_code))


def build_page(settings: AppSettings, reader: Reader | None = None, mixture: Mixture | None = None) -> gr.Blocks:
    """The page with its tabs.

    Args:
        reader, mixture: already open; by default those that the settings name.
    """
    reader = reader or open_reader(settings)
    if mixture is None and settings.mixture is not None:
        mixture = Mixture(settings.mixture)
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(KEPT, KEPT), fill_width=True) as page:
        gr.HTML(
            "<header class='lx-head'><h1>Lexperts</h1><p>Keyphrases of your texts, and which expert of the model reads "
            "which word. Nothing leaves the machine that runs this page.</p></header>"
        )
        with gr.Tab("One text"):
            text_tab(page, settings, reader)
        writing_tabs(Writers(settings.device, settings.max_characters))
        if mixture is not None:
            with gr.Tab("Mixture"):
                routing_tab(page, mixture)
    return page


def text_tab(page: gr.Blocks, settings: AppSettings, reader: Reader) -> None:
    """A text, its keyphrases, YAKE's, and its experts."""
    found = gr.State(None, time_to_live=KEPT)  # what was read: a Reading and YAKE's keyphrases
    with gr.Row(equal_height=False):
        with gr.Column(min_width=280):
            text = gr.Textbox(
                SAMPLES["Tidal power"], label="Text", lines=11, max_lines=20, elem_id="lx-text-box",
                placeholder="Type or paste a text in English. Keyphrases appear while you type.",
            )  # fmt: skip
            with gr.Row():
                samples = [gr.Button(f"Sample: {name}", size="sm", min_width=120) for name in SAMPLES]
                upload = gr.UploadButton(
                    "Open a text file", size="sm", min_width=120, file_types=[".txt", ".md"], elem_id="lx-upload"
                )
            with gr.Accordion("Settings", open=False, elem_id="lx-settings") as options:
                style, controls = text_controls(reader)
            message = gr.HTML(elem_id="lx-message", padding=False)
        with gr.Column(min_width=280):
            ours = gr.HTML(keyphrases_html(None), elem_id="lx-ours", padding=False)
    with gr.Row(equal_height=False):
        with gr.Column(min_width=280):
            experts = gr.HTML(experts_html(None), elem_id="lx-experts", padding=False)
        with gr.Column(min_width=280):
            yake = gr.HTML(note_without_yake(), elem_id="lx-yake", padding=False)
    wide = gr.Checkbox(visible=False)
    page.load(
        lambda is_wide: gr.update(open=is_wide),
        wide,
        options,
        js=f"() => [innerWidth >= {WIDE}]",
        queue=False,
        **HIDDEN,
    )

    def select(result, is_automatic: bool, threshold: float, top_k: float):
        if result is None:
            return keyphrases_html(None), note_without_yake()
        reading, peers = result
        shown = keyphrases_html(reading, None if is_automatic else threshold, int(top_k))
        return shown, note_without_yake() if peers is None else yake_html(reading.text, peers[: int(top_k)])

    def read(content: str, chosen: str, *options):
        if len(content) > settings.max_characters:
            problem = f"The text has {len(content):,} characters; the limit is {settings.max_characters:,}. Shorten it."
            return gr.skip(), message_html(problem), gr.skip(), gr.skip(), gr.skip()
        if not content.strip():
            return None, "", *select(None, *options), experts_html(None)
        reading = reader.read(content, None if chosen == ANY_STYLE else chosen)
        result = reading, read_by_yake(content, MOST) if is_installed() else None
        return result, "", *select(result, *options), experts_html(reading)

    inputs, outputs = [text, style, *controls], [found, message, ours, yake, experts]
    for event in (text.change, style.input, page.load):
        event(read, inputs, outputs, trigger_mode="always_last", concurrency_id="model", **HIDDEN)
    automatic, threshold, _ = controls
    automatic.change(lambda on: gr.update(interactive=not on), automatic, threshold, queue=False, **HIDDEN)
    for control in controls:
        control.change(select, [found, *controls], [ours, yake], trigger_mode="always_last", **HIDDEN)
    for button, content in zip(samples, SAMPLES.values(), strict=True):
        button.click(partial(str, content), None, text, queue=False, **HIDDEN)
    upload.upload(partial(open_text, settings), upload, [text, message], trigger_mode="always_last", **HIDDEN)


def text_controls(reader: Reader) -> tuple:
    """The style; and what selects among the phrases that were found: whether the model chooses, the threshold, and the maximum."""
    style = gr.Radio(
        [ANY_STYLE, *reader.styles], value=ANY_STYLE, label="Style", visible=bool(reader.styles), elem_id="lx-style",
        info="The habits of annotation to follow.",
    )  # fmt: skip
    automatic = gr.Checkbox(True, label="Let the model choose how many", elem_id="lx-automatic")
    threshold = gr.Slider(
        FLOOR, 0.99, 0.2, step=0.01, label="Threshold", elem_id="lx-threshold", interactive=False,
        info="The lowest score that is shown." if reader.ranks else "The lowest probability of a word in a keyphrase.",
    )  # fmt: skip
    top_k = gr.Slider(1, MOST, 10, step=1, label="At most", elem_id="lx-top-k")
    return style, [automatic, threshold, top_k]


def note_without_yake() -> str:
    """What is shown in YAKE's place without it."""
    if is_installed():
        return section("YAKE, for comparison", "")
    return section("YAKE, for comparison", f'<p class="lx-note">Not installed. To compare: <code>{INSTALL}</code></p>')


def open_text(settings: AppSettings, path: str):
    """The content of an uploaded text file and a message, one of which changes nothing."""
    file = Path(path)
    try:
        if file.stat().st_size > 4 * settings.max_characters + 3:  # bytes of UTF-8
            raise ValueError(
                f"it has more than the {settings.max_characters:,} characters that are allowed. Upload a part of it"
            )
        return file.read_text(encoding="utf-8-sig"), ""
    except UnicodeDecodeError:
        return gr.skip(), message_html(f"{file.name} is not a text in UTF-8. Save it as plain text in UTF-8.")
    except ValueError as error:
        return gr.skip(), message_html(f"{file.name} cannot be opened: {error}.")


def routing_tab(page: gr.Blocks, mixture: Mixture) -> None:
    """A text, and the experts that the mixture selects for it."""
    text = gr.Textbox(ROUTED, label="Text", lines=3, max_length=MAX_CHARACTERS, elem_id="lx-routed-text")
    message, drawing = gr.HTML(elem_id="lx-routed-message", padding=False), gr.HTML(elem_id="lx-routing", padding=False)

    def route_text(content: str):
        try:
            return "", routing_html(mixture.route(content))
        except ValueError as error:
            return message_html(str(error)), gr.skip()

    for event in (text.change, page.load):
        event(route_text, text, [message, drawing], trigger_mode="always_last", concurrency_id="mixture", **HIDDEN)


def theme() -> gr.Theme:
    """System fonts, so that nothing is loaded from elsewhere, and colours with a contrast of at least 4.5."""
    font = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
    mono = ["ui-monospace", "Menlo", "Consolas", "monospace"]
    return gr.themes.Base(primary_hue="blue", neutral_hue="slate", font=font, font_mono=mono).set(
        button_primary_background_fill="#0b5cad", button_primary_background_fill_hover="#094a8c",
        button_primary_background_fill_dark="#0b5cad", button_primary_text_color="#ffffff",
        block_info_text_color="#4b5563", block_info_text_color_dark="#cbd5e1",
        block_label_text_color="#1f2937", block_title_text_color="#1f2937",
        input_placeholder_color="#5b6472", input_placeholder_color_dark="#aab4c2",
    )  # fmt: skip


def launch(settings: AppSettings, *, host: str | None = None, port: int | None = None, wait: bool = True, **parts):
    """Serves the page.

    Args:
        host, port: by default what the environment says (`GRADIO_SERVER_NAME`, as on a Space), or 127.0.0.1 and the first free port
            from 7860.
        wait: until it is stopped; otherwise returns the page, whose `close()` ends it.
        parts: of `build_page`.
    """
    page = build_page(settings, **parts)
    page.queue(default_concurrency_limit=1, max_size=64)
    page.launch(
        server_name=host, server_port=port, share=False, quiet=True, prevent_thread_lock=True, show_error=True, ssr_mode=False,
        max_file_size=max(1_000_000, 5 * settings.max_characters), footer_links=[], theme=theme(), css=CSS.read_text(encoding="utf-8"), head=HEAD,
    )  # fmt: skip
    print(f"the app is at {page.local_url}", flush=True)
    if wait:
        page.block_thread()
    return page
