# needs: spacy
"""The spaCy component: spans and scores of the pipeline, batches, files, processes, and the entry point."""

import multiprocessing
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from transformers import pipeline

spacy = pytest.importorskip("spacy")
from keyphrase_tools.spacy_component import KeyphraseComponent  # noqa: E402

from .known_answers import random_text  # noqa: E402

TEXTS = [random_text(40, seed=0), "", "Networks: graph-cuts!", "learning " * 400]


@pytest.fixture(scope="module")
def model(sharp_seke, tiny_tokenizer, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    pipeline("keyphrase-extraction", model=sharp_seke(), tokenizer=tiny_tokenizer).save_pretrained(folder)
    return str(folder)


def with_keyphrases(model, **config):
    nlp = spacy.blank("en")
    nlp.add_pipe("lexperts_keyphrases", config={"model": model, **config})
    return nlp


def found(doc, key="keyphrases"):
    group = doc.spans[key]
    return [(span.text, span.label_, score) for span, score in zip(group, group.attrs["scores"], strict=True)]


def test_spans_and_scores_are_those_of_the_pipeline(model):
    extract = pipeline("keyphrase-extraction", model=model)
    doc, phrases = with_keyphrases(model)(TEXTS[0]), extract(TEXTS[0])
    assert phrases and found(doc) == [
        (TEXTS[0][phrase["start"] : phrase["end"]], "KEYPHRASE", phrase["score"]) for phrase in phrases
    ]
    doc = with_keyphrases(model, mentions=True, spans_key="all", options={"top_k": 2})(TEXTS[0])
    mentions = [mention for phrase in extract(TEXTS[0], top_k=2) for mention in phrase["mentions"]]
    assert [(span.start_char, span.end_char) for span in doc.spans["all"]] == [(m["start"], m["end"]) for m in mentions]


def test_a_span_is_whole_tokens(model):
    doc = with_keyphrases(model)("See graph-cutting.")
    tokens = {token.idx for token in doc}
    assert all(span.start_char in tokens for span in doc.spans["keyphrases"])


def test_a_stream_is_read_in_batches_and_in_order(model):
    nlp = with_keyphrases(model)
    docs = list(nlp.pipe(TEXTS * 3, batch_size=5))
    assert [doc.text for doc in docs] == TEXTS * 3
    for doc in docs:
        alone = nlp(doc.text)
        assert [span.text for span in doc.spans["keyphrases"]] == [span.text for span in alone.spans["keyphrases"]]
        scores = (d.spans["keyphrases"].attrs["scores"] for d in (doc, alone))
        assert next(scores) == pytest.approx(next(scores))
    assert not docs[1].spans["keyphrases"]


def test_a_saved_pipeline_opens_again_with_its_settings(model, tmp_path):
    nlp = with_keyphrases(model, options={"top_k": 1})
    nlp.to_disk(tmp_path / "nlp")
    again = spacy.load(tmp_path / "nlp")
    assert found(again(TEXTS[0])) == found(nlp(TEXTS[0])) and len(again(TEXTS[0]).spans["keyphrases"]) == 1
    doc = spacy.tokens.Doc(nlp.vocab).from_bytes(nlp(TEXTS[0]).to_bytes())
    assert found(doc) == found(nlp(TEXTS[0]))


SPAWN = """
import multiprocessing, sys
import spacy

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    nlp = spacy.load(sys.argv[1])
    for doc in nlp.pipe(sys.argv[2:], n_process=2, batch_size=1):
        print([span.text for span in doc.spans["keyphrases"]])
"""


def test_spawned_processes_open_the_model_for_themselves(model, tmp_path):
    nlp = with_keyphrases(model)
    nlp.to_disk(tmp_path / "nlp")
    (tmp_path / "spawn.py").write_text(SPAWN, encoding="utf-8")
    command = [sys.executable, str(tmp_path / "spawn.py"), str(tmp_path / "nlp"), *TEXTS[:2]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    docs = [nlp(text) for text in TEXTS[:2]]
    expected = [[span.text for span in doc.spans["keyphrases"]] for doc in docs]
    assert done.stdout.splitlines() == list(map(str, expected)), done.stderr


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


def test_an_unknown_setting_is_refused(model):
    with pytest.raises(ValueError, match="colour"):
        with_keyphrases(model, colour="red")
    with pytest.raises(TypeError, match="colour"):
        with_keyphrases(model, options={"colour": "red"})(TEXTS[0])


def test_the_component_is_an_entry_point():
    (entry,) = (e for e in entry_points(group="spacy_factories") if e.name == "lexperts_keyphrases")
    assert entry.load() is KeyphraseComponent
