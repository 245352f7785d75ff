"""Generated keyphrases of the documents of files: the model behind `lexperts keyphrases generate`."""

from pathlib import Path

from run_tools.loading import describe_load_errors, open_config, open_pipeline, parse_device
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
SORT_WINDOW = 16  # batches that are sorted by length together


def open_generator(
    name: str,
    batch_size: int,
    device: str | None,
    options: dict,
    examples: list[dict] | None = None,
    embedder: str = "minilm",
    embedding_cache: Path | None = None,
):
    """Loads a model -> a function from documents to keyphrases, for `run_over`.

    Args:
        options: of the pipeline keyphrase-generation, such as `num_keyphrases` and `num_beams`.
        examples: rows with keyphrases, which are candidates for near documents; see `NearExamples`.
        embedder, embedding_cache: for these.

    Raises:
        OSError: if the model or the embedder cannot be opened.
        ValueError: for invalid options, a model that generates no keyphrases, and with examples one that scores none.
    """
    prepare_process()
    with describe_load_errors("--model", name):
        kind = open_config(name).model_type
    if kind not in MODEL_TYPES:
        raise ValueError(
            f"--model {name!r} is a {kind} model, which generates no keyphrases. Train one with `lexperts train "
            "exhird`, or use `lexperts keyphrases extract`."
        )
    with describe_load_errors("--model", name):
        generate = open_pipeline(TASK, name, device=parse_device(device))
    near = None
    if examples is not None:
        from .near_examples import NearExamples

        near = NearExamples(examples, embedder, embedding_cache)

    def process(documents: list[dict]) -> list[dict]:
        documents = near.add_candidates(documents) if near else documents
        results = [{"keyphrases": phrases} for phrases in generate(documents, batch_size=batch_size, **options)]
        for phrase in (phrase for result in results for phrase in result["keyphrases"]):
            # without a title there is none
            phrase["field"] = phrase.get("field", "text") if phrase["present"] else None
        return results

    process([{"text": "Keyphrases."}])  # raises errors of options
    return process


def types() -> dict:
    """The Arrow types of the results."""
    import pyarrow

    return {
        "keyphrases": pyarrow.list_(
            pyarrow.struct([(name, pyarrow.type_for_alias(kind)) for name, kind in FIELDS.items()])
        )
    }
