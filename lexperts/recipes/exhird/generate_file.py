"""Generated keyphrases of the documents of files: the process behind `lexperts keyphrases generate`."""

from dataclasses import dataclass
from pathlib import Path

from run_tools.corpus.documents import check_document
from run_tools.corpus.failures import process_valid
from run_tools.fingerprints import describe_model, hash_tokenizer
from run_tools.model_loading import open_config, open_pipeline
from run_tools.model_options import describe_load_errors, parse_device
from run_tools.packaged import locate_model
from run_tools.processes import prepare_process

FIELDS = {
    "keyphrase": "string",
    "present": "bool",
    "score": "double",
    "start": "int64",
    "end": "int64",
    "field": "string",
}
TASK = "keyphrase-generation"
MODEL_TYPES = ("exhird", "exhird_causal")  # keyphrase generators
SORT_WINDOW = 16  # batches that are sorted by length together, and counted as progress together


@dataclass
class GenerationProcess:
    """Generates keyphrases of rows; see `run_tools.corpus.block_runs.Process`.

    Args:
        model: folder or Hub id of a keyphrase generator; by default the packaged one.
        text_column, title_column: columns of the texts, and of the titles or `None`.
        batch_size: documents per batch.
        device: by default an accelerator if there is one.
        options: of the pipeline keyphrase-generation, such as `num_keyphrases` and `num_beams`.
        examples: rows with keyphrases, which are candidates for near documents; see `NearExamples`.
        embedder, embedding_cache: for these.
    """

    results = ("keyphrases",)

    model: str | None
    text_column: str
    title_column: str | None
    batch_size: int
    device: str | None
    options: dict
    examples: list[dict] | None = None
    embedder: str = "minilm"
    embedding_cache: Path | None = None

    def describe(self) -> dict:
        """The settings. Loads the model.

        Raises:
            OSError: if the model or the embedder cannot be opened.
            ValueError: for invalid options, a model that generates no keyphrases, and with examples one that scores none.
        """

        device = parse_device(self.device)
        prepare_process()
        name = locate_model(self.model, TASK)
        with describe_load_errors("--model", name):
            kind = open_config(name).model_type
        if kind not in MODEL_TYPES:
            raise ValueError(
                f"--model {name!r} is a {kind} model, which generates no keyphrases. Train one with `lexperts train "
                "exhird`, or use `lexperts keyphrases extract`."
            )
        with describe_load_errors("--model", name):
            self.generate = open_pipeline(TASK, name, device=device)
        model, tokenizer = self.generate.model, self.generate.tokenizer
        self.near = None
        if self.examples is not None:
            from .near_examples import NearExamples

            self.near = NearExamples(self.examples, self.embedder, self.embedding_cache)
        self.generate(self.with_candidates([{"text": "Keyphrases."}]), batch_size=self.batch_size, **self.options)
        identity = describe_model(model, tokenizer, name)
        if (subwords := getattr(tokenizer, "subword_tokenizer", None)) is not None:
            identity["tokenizer"]["sha256"] += hash_tokenizer(subwords)
        columns = {"text_column": self.text_column, "title_column": self.title_column}
        settings = {**columns, "batch_size": self.batch_size, **self.options}
        return {**identity, **settings, **(self.near.identity if self.near else {})}

    def with_candidates(self, documents: list[dict]) -> list[dict]:
        """Documents, with the keyphrases of near examples if there are some."""
        return self.near.add_candidates(documents) if self.near else documents

    def process_rows(self, rows: list[dict], progress=lambda documents: None) -> list[dict]:
        """`keyphrases`, or `error`, of each row."""

        def check(row: dict) -> tuple[dict | None, str | None]:
            document = {"text": row.get(self.text_column), "title": row.get(self.title_column)}
            return check_document(document, self.text_column, self.title_column)

        def generate(documents: list[dict]) -> list[list[dict]]:
            found, step = [], SORT_WINDOW * self.batch_size
            for start in range(0, len(documents), step):
                part = self.with_candidates(documents[start : start + step])
                found += self.generate(part, batch_size=self.batch_size, **self.options)
                progress(len(part))
            return found

        found = process_valid(generate, rows, check, progress)
        for phrase in (phrase for phrases, error in found if error is None for phrase in phrases):
            # without a title there is none
            phrase["field"] = phrase.get("field", "text") if phrase["present"] else None
        return [{"error": error} if error else {"keyphrases": phrases} for phrases, error in found]

    def types(self) -> dict:
        """The Arrow types of the values to add."""
        import pyarrow

        phrase = pyarrow.struct([(name, pyarrow.type_for_alias(kind)) for name, kind in FIELDS.items()])
        return {"keyphrases": pyarrow.list_(phrase), "error": pyarrow.string()}
