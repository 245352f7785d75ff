"""The tabs of what the models over SmolLM2 write, in Gradio."""

from collections.abc import Callable

import gradio as gr

from .marks import message_html
from .samples import CONTEXT, QUESTION, SAMPLES, TERM
from .writing import DEFINITIONS, NO_DATASET, PHRASES, SUMMARIES, Writers

FIRST = "The first click opens the model, which can take half a minute."


def writing_tabs(writers: Writers) -> None:
    """A tab for each model that is installed."""
    for task, name, tab in (
        (DEFINITIONS, "Definitions", definitions_tab),
        (SUMMARIES, "Summaries", summaries_tab),
        (PHRASES, "Tags", tags_tab),
    ):
        if task in writers.tasks:
            with gr.Tab(name):
                tab(writers)


def definitions_tab(writers: Writers) -> None:
    """A term in a context, and its definition."""
    gr.Markdown(f"What a term means where it is used. {FIRST}")
    with gr.Row():
        term = gr.Textbox(TERM, label="Term", max_length=200, scale=1, min_width=200, elem_id="lx-term")
        context = gr.Textbox(CONTEXT, label="Context", lines=2, scale=3, min_width=280, elem_id="lx-context")
    answer_on_click("Define", writers.define, [term, context], "lx-definition")


def summaries_tab(writers: Writers) -> None:
    """A text, and its summary."""
    gr.Markdown(f"A summary by the experts of one kind of text. {FIRST}")
    text = gr.Textbox(SAMPLES["Tidal power"], label="Text", lines=8, max_lines=14, elem_id="lx-summarized")
    datasets = writers.datasets
    dataset = gr.Radio(
        [*datasets, NO_DATASET], value=datasets[0], label="Kind of text", elem_id="lx-dataset",
        info=f"{NO_DATASET}: SmolLM2 without experts.",
    )  # fmt: skip
    answer_on_click("Summarise", writers.summarize, [text, dataset], "lx-summary")


def tags_tab(writers: Writers) -> None:
    """A question, and its tags."""
    gr.Markdown(f"Tags of a technical question, also those that it does not contain. {FIRST}")
    title = gr.Textbox(QUESTION["title"], label="Title", max_length=500, elem_id="lx-question-title")
    text = gr.Textbox(QUESTION["text"], label="Question", lines=5, max_lines=14, elem_id="lx-question")
    answer_on_click("Write tags", writers.generate, [title, text], "lx-tags")


def answer_on_click(label: str, answer: Callable[..., str], inputs: list, element: str) -> None:
    """A button, and what `answer` returns for the inputs, or its `ValueError` as a message."""
    button = gr.Button(label, variant="primary", elem_id=f"{element}-start")
    message, output = gr.HTML(elem_id=f"{element}-message", padding=False), gr.HTML(elem_id=element, padding=False)

    def run(*values):
        try:
            return "", answer(*values)
        except ValueError as error:
            return message_html(str(error)), gr.skip()

    button.click(
        run, inputs, [message, output], concurrency_id="writers", api_visibility="private", show_progress_on=[output]
    )
