# needs: spacy
"""The spaCy component: spans and scores of the pipeline, batches, files, processes, and the entry point."""

import multiprocessing
import pickle
from importlib.metadata import entry_points

import pytest
from transformers import pipeline

spacy = pytest.importorskip("spacy")
from keyphrase_tools.spacy_component import KeyphraseComponent  # noqa: E402

from .known_answers import random_text  # noqa: E402

TEXTS = [random_text(40, seed=0), "", "Networks: graph-cuts!", "learning " * 100]


@pytest.fixture(scope="module")
def model(extract, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    extract.save_pretrained(folder)
    return str(folder)


def with_keyphrases(model, **config):
    nlp = spacy.blank("en")
    nlp.add_pipe("lexperts_keyphrases", config={"model": model, **config})
    return nlp


def found(doc):
    group = doc.spans["keyphrases"]
    return [(span.text, span.label_, score) for span, score in zip(group, group.attrs["scores"], strict=True)]


def test_spans_and_scores_are_those_of_the_pipeline(model):
    extract = pipeline("keyphrase-extraction", model=model)
    doc, phrases = with_keyphrases(model)(TEXTS[0]), extract(TEXTS[0])
    assert phrases and found(doc) == [
        (TEXTS[0][phrase["start"] : phrase["end"]], "KEYPHRASE", phrase["score"]) for phrase in phrases
    ]
    options = {"top_k": 2, "candidates": ["no such phrase", TEXTS[0].split()[3]]}
    doc = with_keyphrases(model, mentions=True, spans_key="all", options=options)(TEXTS[0])
    mentions = [mention for phrase in extract(TEXTS[0], **options) for mention in phrase["mentions"]]
    assert [(span.start_char, span.end_char) for span in doc.spans["all"]] == [(m["start"], m["end"]) for m in mentions]
    doc = with_keyphrases(model)("See graph-cutting.")  # a span is whole tokens
    assert {span.start_char for span in doc.spans["keyphrases"]} <= {token.idx for token in doc}


def test_a_stream_is_read_in_batches_and_in_order(model):
    nlp = with_keyphrases(model)
    docs = list(nlp.pipe(TEXTS * 2, batch_size=5))
    assert [doc.text for doc in docs] == TEXTS * 2 and not docs[1].spans["keyphrases"]
    for doc in docs[: len(TEXTS)]:
        one, two = found(nlp(doc.text)), found(doc)
        assert [phrase[:2] for phrase in one] == [phrase[:2] for phrase in two]
        assert [phrase[2] for phrase in one] == pytest.approx([phrase[2] for phrase in two])


def test_a_saved_pipeline_opens_again_with_its_settings_and_a_copy_opens_the_model_for_itself(model, tmp_path):
    nlp = with_keyphrases(model, options={"top_k": 1})
    nlp.to_disk(tmp_path / "nlp")
    expected = found(nlp(TEXTS[0]))
    assert found(spacy.load(tmp_path / "nlp")(TEXTS[0])) == expected and len(expected) == 1
    assert found(spacy.tokens.Doc(nlp.vocab).from_bytes(nlp(TEXTS[0]).to_bytes())) == expected
    copy = pickle.loads(pickle.dumps(nlp.get_pipe("lexperts_keyphrases")))
    assert copy._extract is None and found(copy(spacy.blank("en").make_doc(TEXTS[0]))) == expected


@pytest.mark.nightly
def test_spawned_processes_read_a_stream(model):
    nlp, start = with_keyphrases(model), multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        docs = list(nlp.pipe(TEXTS[:2], n_process=2, batch_size=1))
    finally:
        multiprocessing.set_start_method(start, force=True)
    assert [found(doc) for doc in docs] == [found(nlp(text)) for text in TEXTS[:2]]


def test_a_forked_process_is_refused_before_it_waits_for_ever(model):
    component = with_keyphrases(model).get_pipe("lexperts_keyphrases")
    reader, writer = multiprocessing.Pipe(duplex=False)

    def child():
        try:
            writer.send(str(component.extract))
        except RuntimeError as error:
            writer.send(str(error))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert reader.poll() and "spawn" in reader.recv()


def test_the_component_is_an_entry_point():
    (entry,) = (e for e in entry_points(group="spacy_factories") if e.name == "lexperts_keyphrases")
    assert entry.load() is KeyphraseComponent
