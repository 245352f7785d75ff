"""The demo app of `lexperts app` and of `examples/space`: keyphrases, definitions, summaries, and the experts that read a text."""

import os
import re
from collections.abc import Callable, Iterable
from functools import cache, partial, wraps
from html import escape
from pathlib import Path
from threading import Lock

import numpy as np
import pandas as pd
from transformers import AutoConfig, pipeline

from keyphrase_tools.loading import locate_extractor, open_extractor
from merge_tools.routing import open_mixture, route_text
from modeling_lexicon.terms_lexicon import may_occur
from run_tools.packaged import locate_model

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
try:
    import gradio as gr
except ImportError as error:
    raise ImportError("The app needs Gradio. Install the extra lexperts[app].") from error

SAMPLE = (
    "A tidal power station of the classic type closes a bay with a tidal barrage. At high water the sluice gates are shut, and "
    "once the tide outside has fallen far enough, the stored water leaves through bulb turbines, a mode called ebb generation. "
    "The usable energy grows with the square of the tidal range, so only a few estuaries are worth the civil works."
)


def for_visitors(answer: Callable) -> Callable:
    """A method of `Answers` for the page, which shows an error that a visitor can fix as one line, and JSON without lone surrogates."""

    @wraps(answer)
    def run(self, *values):
        try:
            return answer(self, *(re.sub("[\ud800-\udfff]", "\ufffd", x) if isinstance(x, str) else x for x in values))
        except (ValueError, ImportError) as error:
            raise gr.Error(escape(str(error)), print_exception=False) from error  # Gradio shows messages as HTML

    return run


class Answers:
    """What the tabs show: by a keyphrase pipeline, a mixture of `open_mixture`, and default models, each of which is opened on first
    use, on `device`. `routed` is the model of `extract` on PyTorch, whose experts are shown, if `extract` is a graph.
    """

    def __init__(self, extract, mixture=None, device: str | None = None, max_characters: int = 20_000, routed=None):
        self.extract, self.mixture, self.max_characters = extract, mixture, max_characters
        self.routed = routed or extract
        self.default_pipeline = cache(partial(pipeline, device=device))  # an ImportError says how to install its model
        self.lock = Lock()  # of `extract`, which two tabs use: a tokenizer cannot be used by two threads at once
        gates = self.routed.read([SAMPLE], gates=True).gates.get(0, np.zeros((0, 0)))
        self.expert_names = [f"expert {e + 1}" for e in range(gates.shape[-1])] if mixture is None else mixture[2]

    def check(self, name: str, text: str) -> str:
        """The text. Raises a `ValueError` if it is empty or too long."""
        if not text.strip():
            raise ValueError(f"The {name} is empty. Type or paste one.")
        if len(text) > self.max_characters:
            raise ValueError(f"The {name} has {len(text):,} characters; the limit is {self.max_characters:,}.")
        return text

    @for_visitors
    def keyphrases(self, text: str, generate: bool, style: str, lowest: float, at_most: int):
        """The text with keyphrases marked by their ranks, and the rows of the table. With `lowest` 0 the model chooses how many."""
        if not text.strip():
            return None, None
        self.check("text", text)
        if generate:
            found = self.default_pipeline("keyphrase-generation")(text)
            phrases = [phrase for phrase in found if phrase["score"] >= lowest][:at_most]
        else:
            with self.lock:
                phrases = self.extract(text, top_k=at_most, min_score=lowest or None, style=style or None)
        rows, marks = [], []
        for rank, phrase in enumerate(phrases, start=1):
            rows.append([rank, phrase["keyphrase"], round(phrase["score"], 3)])
            mentions = phrase.get("mentions", [phrase] if phrase["start"] is not None else [])
            marks += [(mention["start"], mention["end"], str(rank)) for mention in mentions]
        return highlight(text, marks), rows

    @for_visitors
    def define(self, term: str, context: str) -> tuple[str, float]:
        """The definition of a term in a context, and the geometric mean of its tokens' probabilities."""
        row = {"term": self.check("term", term).strip(), "context": self.check("context", context).strip()}
        if not may_occur(row["term"], row["context"]):
            gr.Warning("The context does not contain the term.")
        found = self.default_pipeline("definition-modeling")(row)
        return found["definition"], round(found["score"], 2)

    @for_visitors
    def summarize(self, text: str, dataset: str) -> str:
        """The summary of a text, by the experts of a data set of the model."""
        (found,) = self.default_pipeline("moe-summarization")(self.check("text", text), dataset=dataset or None)
        return found["summary_text"]

    @for_visitors
    def experts(self, text: str):
        """The text with each word or token marked by the expert of the largest weight, and the mean weights in each layer."""
        if not text.strip():
            return None, None
        self.check("text", text)
        spans, weights, layers = self._read_words(text) if self.mixture is None else self._read_tokens(text)
        if not spans:
            return None, None
        names, best = self.expert_names, weights.mean(0).argmax(-1)
        marks = [(start, end, names[expert]) for (start, end), expert in zip(spans, best, strict=True)]
        means = pd.DataFrame(weights.mean(1), columns=names).assign(layer=layers)
        return highlight(text, marks), means.melt("layer", var_name="expert", value_name="weight")

    def _read_words(self, text: str) -> tuple[list, np.ndarray, list[str]]:
        """Spans of W words, the probabilities `(1, W, E)` of the keyphrase model's router, and its name."""
        with self.lock:
            block = self.routed.read([text], gates=True)
        words, gates = block.documents[0].words, block.gates.get(0, np.zeros((0, 0)))
        read = np.flatnonzero(~np.isnan(gates).any(-1))  # the other words begin no sub-token
        places = [block.documents[0].to_source(*words[i][1:]) for i in read]
        return [(place["start"], place["end"]) for place in places], gates[None, read], ["keyphrase model"]

    def _read_tokens(self, text: str) -> tuple[list, np.ndarray, list[str]]:
        """Spans of T tokens, the weights `(R, T, E)` of the mixture's routers, and their names."""
        _, tokenizer, names = self.mixture
        routing = route_text(*self.mixture, text)
        weights = np.zeros((*routing.experts.shape[:2], len(names)))
        np.put_along_axis(weights, routing.experts, routing.weights, -1)
        spans = tokenizer(text, return_offsets_mapping=True, return_token_type_ids=False)["offset_mapping"]
        return spans, weights, routing.routers


def highlight(text: str, marks: Iterable[tuple[int, int, str]]) -> dict:
    """The value of `gr.HighlightedText`: of marks that overlap the longest, then the first, and the words between them without a label,
    since it breaks lines only between entities.
    """
    words = [(word.start(), word.end(), None) for word in re.finditer(r"\S+\s*", text)]
    taken, covered = [], set[int]()
    for start, end, label in [*sorted(marks, key=lambda mark: mark[0] - mark[1]), *words]:
        if start < end and covered.isdisjoint(range(start, end)):
            covered.update(range(start, end))
            taken.append({"start": start, "end": end, "entity": label})
    return {"text": text, "entities": taken}


def build_page(answers: Answers) -> gr.Blocks:
    """The page with its four tabs."""
    tab = partial(gr.Interface, flagging_mode="never", clear_btn=None, analytics_enabled=False, deep_link=False)
    live = partial(tab, live=True, show_progress="minimal")
    styles = getattr(answers.extract.model.config, "styles", None) or []
    names = answers.expert_names
    colours = {name: f"hsl({360 * e // len(names)}, 70%, 60%)" for e, name in enumerate(names)}
    with gr.Blocks(title="Lexperts", analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        gr.Markdown("# Lexperts\nKeyphrases of a text, and which expert reads which word. Nothing is sent elsewhere.")
        with gr.Tab("Keyphrases"):
            inputs = [
                gr.Textbox(SAMPLE, label="Text", lines=10, placeholder="Keyphrases appear while you type."),
                gr.Checkbox(label="Generate keyphrases, also those that do not occur in the text"),
                gr.Radio([("any", ""), *styles], value="", label="Style", visible=bool(styles)),
                gr.Slider(0, 0.99, 0, step=0.01, label="Lowest score", info="With 0 the model chooses how many."),
                gr.Slider(1, 50, 10, step=1, label="At most"),
            ]
            marked = gr.HighlightedText(label="The longest of overlapping keyphrases, by rank")
            table = gr.Dataframe(
                headers=["rank", "keyphrase", "score"], datatype=["number", "str", "number"], label="Keyphrases"
            )
            shown = [live(answers.keyphrases, inputs, [marked, table])]
        with gr.Tab("Definitions"):
            term = gr.Textbox("current", label="Term")
            context = gr.Textbox("The current in the wire is measured in amperes.", label="Context", lines=3)
            score = gr.Number(label="Probability of its tokens (geometric mean)")
            tab(answers.define, [term, context], [gr.Textbox(label="Definition"), score], submit_btn="Define")
        with gr.Tab("Summaries"):
            try:
                datasets = AutoConfig.from_pretrained(locate_model(None, "moe-summarization")).datasets
            except ImportError as error:
                gr.Markdown(str(error))
            else:
                kind = gr.Radio([*datasets, ("none", "")], value=datasets[0], label="Experts of a kind of text")
                summary = gr.Textbox(label="Summary", lines=5, info="Check it against the text: it can be wrong.")
                inputs = [gr.Textbox(SAMPLE, label="Text", lines=10), kind]
                tab(answers.summarize, inputs, summary, submit_btn="Summarise")
        with gr.Tab("Experts"):
            if names:
                marked = gr.HighlightedText(label="Largest weight", color_map=colours, show_legend=True)
                plot = gr.BarPlot(x="layer", y="weight", color="expert", color_map=colours, label="Mean weights")
                shown.append(live(answers.experts, gr.Textbox(SAMPLE, label="Text", lines=10), [marked, plot]))
            else:
                gr.Markdown("The keyphrase model has no experts. `--mixture DIR` shows those of a mixture.")
        for each in shown:
            page.load(each.fn, each.input_components, each.output_components, api_visibility="private")
    return page


def launch(
    model: str | None = None, *, mixture: str | Path | None = None, device: str | None = None, trust_remote_code: bool = False,
    max_characters: int = 20_000, host: str | None = None, port: int | None = None, wait: bool = True,
) -> gr.Blocks:  # fmt: skip
    """Serves the page.

    Args:
        model, mixture, ...: as the options of `lexperts app`. A mixture is on the CPU.
        host, port: by default those of the environment (`GRADIO_SERVER_NAME`), or 127.0.0.1 and the first free port from 7860.
        wait: until it is stopped; otherwise returns the page, whose `close()` ends it.
    """
    extract = open_extractor(model, device=device, trust_remote_code=trust_remote_code)
    weights, routed = locate_model(model), None
    if mixture is None and locate_extractor(model, device) != weights:
        routed = open_extractor(weights, device=device, trust_remote_code=trust_remote_code)
    page = build_page(Answers(extract, mixture and open_mixture(mixture), device, max_characters, routed))
    theme = gr.themes.Base(font=["system-ui"], font_mono=["monospace"]).set(block_info_text_color="*neutral_600")
    options = {"quiet": True, "show_error": True, "ssr_mode": False, "footer_links": [], "max_file_size": "1mb"}
    page.queue(max_size=64).launch(server_name=host, server_port=port, theme=theme, prevent_thread_lock=True, **options)
    print(f"the app is at {page.local_url}", flush=True)
    if wait:
        page.block_thread()
    return page
