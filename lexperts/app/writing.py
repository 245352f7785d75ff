"""What the models over SmolLM2 write: definitions, summaries and generated keyphrases. Each model is opened on first use."""

from html import escape
from threading import Lock

from run_tools.packaged import DEFAULT_MODELS, is_installed, locate_model

from .marks import bar, section

DEFINITIONS, SUMMARIES, PHRASES = "definition-modeling", "moe-summarization", "keyphrase-generation"
NO_DATASET = "none"  # the main expert alone


class Writers:
    """The models that are installed, by their tasks.

    Args:
        device: of all models.
        max_characters: of a text.
    """

    def __init__(self, device: str | None, max_characters: int):
        self.device, self.max_characters = device, max_characters
        self.tasks = [task for task in (DEFINITIONS, SUMMARIES, PHRASES) if is_installed(DEFAULT_MODELS[task])]
        self._opened: dict = {}
        self._lock = Lock()

    def open(self, task: str):
        """The pipeline of a task."""
        from run_tools.loading import open_pipeline

        with self._lock:
            if task not in self._opened:
                self._opened[task] = open_pipeline(task, locate_model(None, task), device=self.device)
        return self._opened[task]

    @property
    def datasets(self) -> list[str]:
        """The names of the summariser's data sets, by its configuration; the model is not opened."""
        from run_tools.loading import open_config

        return list(open_config(locate_model(None, SUMMARIES)).datasets)

    def check(self, what: str, text: str) -> str:
        """The text without surrounding white space. Raises a `ValueError` for one that is empty or too long."""
        if not text.strip():
            raise ValueError(f"The {what} is empty. Type or paste one.")
        if len(text) > self.max_characters:
            raise ValueError(
                f"The {what} has {len(text):,} characters; the limit is {self.max_characters:,}. Shorten it."
            )
        return text.strip()

    def define(self, term: str, context: str) -> str:
        """The definition of a term as a part of the page."""
        row = {"term": self.check("term", term), "context": self.check("context", context)}
        found = self.open(DEFINITIONS)(row)
        missing = "" if row["term"].lower() in row["context"].lower() else " The context does not contain the term."
        note = f"Its tokens have a probability of {found['score']:.2f} (geometric mean).{missing}"
        return section(escape(row["term"]), f'<p class="lx-text">{escape(found["definition"])}</p>', note)

    def summarize(self, text: str, dataset: str) -> str:
        """The summary of a text as a part of the page."""
        chosen = None if dataset == NO_DATASET else dataset
        (found,) = self.open(SUMMARIES)(self.check("text", text), dataset=chosen)
        words = len(text.split()), len(found["summary_text"].split())
        by = f"by the deputies of {escape(dataset)}" if chosen else "by SmolLM2 alone"
        note = f"{words[1]:,} words for {words[0]:,}, {by}. Check it against the text: it can be wrong."
        return section("Summary", f'<p class="lx-text">{escape(found["summary_text"])}</p>', note)

    def generate(self, title: str, text: str) -> str:
        """The generated keyphrases of a text as a part of the page."""
        document = {"text": self.check("text", text)} | ({"title": title.strip()} if title.strip() else {})
        found = self.open(PHRASES)(document)
        if not found:
            return section("Tags", '<p class="lx-note">None. Paste a longer text.</p>')
        rows = "".join(
            f'<tr><th scope="row">{escape(phrase["keyphrase"])}</th><td>{"yes" if phrase["present"] else "no"}</td>'
            f'<td class="lx-score">{phrase["score"]:.2f}{bar(phrase["score"])}</td></tr>'
            for phrase in found
        )
        head = '<thead><tr><th scope="col">tag</th><th scope="col">in the text</th><th scope="col" class="lx-score">probability</th></tr></thead>'
        note = "In the order in which the model writes them. A probability is that of a tag, given those before it."
        return section("Tags", f'<table class="lx-list">{head}<tbody>{rows}</tbody></table>', note)
