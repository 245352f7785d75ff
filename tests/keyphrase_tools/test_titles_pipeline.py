"""The pipeline with titles: the model's inputs, whose labels are used, deterministic results."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import BertForTokenClassification, DataCollatorForTokenClassification, EvalPrediction

from keyphrase_tools import KeyphraseExtractionPipeline
from keyphrase_tools.evaluation import ExtractionMetrics, evaluate_pipeline
from keyphrase_tools.labels import tokenize_documents
from lexperts_lite.clean import clean as clean_text
from lexperts_lite.ranking import rank_phrases
from lexperts_lite.words import join_title, split_words

from .known_answers import random_text
from .test_titles import DOCUMENTS, TEXT, TITLE


class MetaBert(BertForTokenClassification):
    """Names the masks, and keeps what it was given; it reads the title as BERT reads a pair."""

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, meta_mask=None, main_mask=None, word_start_mask=None, **_):  # fmt: skip
        self.given = {"meta_mask": meta_mask, "main_mask": main_mask, "word_start_mask": word_start_mask}
        self.given |= {"input_ids": input_ids, "attention_mask": attention_mask}
        return super().forward(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)


class PathBert(MetaBert):
    """Decodes to the label after the most likely, so that it shows who chose."""

    paths = 0

    def decode(self, return_outputs=False, **inputs):
        self.paths += 1
        outputs = self(**inputs)
        labels = ((outputs.logits.argmax(-1) + 1) % 3).where(inputs["word_start_mask"].bool(), -1)
        return (labels, outputs) if return_outputs else labels


@pytest.fixture(scope="module")
def extractor(backbone_config, tiny_tokenizer):
    """extractor(kind, **configuration) -> a pipeline over a tiny model, always with the same weights."""

    def build(kind=MetaBert, tokenizer=tiny_tokenizer, **changes):
        torch.manual_seed(0)
        config = backbone_config("bert", **{"id2label": {0: "B", 1: "I", 2: "O"}, **changes})
        model = kind(config).eval()
        model.classifier.weight.data *= 30
        return KeyphraseExtractionPipeline(model, tokenizer, top_k=None)

    return build


def places(phrases):
    return sorted((p["keyphrase"], p["start"], p["end"], round(p["score"], 4)) for p in phrases)


def forms(phrases):
    return sorted((p["keyphrase"], round(p["score"], 4), len(p["mentions"])) for p in phrases)


def check_places(document, phrases):
    """Each keyphrase and mention is where it says, in the field that it names if there is a title; -> the fields."""
    fields = set()
    for phrase in phrases:
        first = phrase["mentions"][0]
        assert {name: phrase[name] for name in first} == first | {"score": phrase["score"]}
        assert phrase["keyphrase"] == " ".join(piece_of(document, phrase).split())
        for mention in phrase["mentions"]:
            assert list(mention) == [*(["field"] if "field" in phrase else []), "start", "end", "score"]
            assert piece_of(document, mention).strip()
            fields.add(mention.get("field"))
    return fields


def piece_of(document, place):
    return document[place.get("field", "text")][place["start"] : place["end"]]


def mapping(title, text):
    return {"title": title, "text": text}


def test_what_the_model_is_given(extractor, tiny_tokenizer):
    extract = extractor()
    extract([mapping("graph cut", "x-graph ab"), "in", {"text": "of the"}])
    given = {name: values.tolist() for name, values in extract.model.given.items()}
    assert given["input_ids"][0] == tiny_tokenizer("graph cut", "x-graph ab")["input_ids"]
    pad = [0] * 6
    assert given["meta_mask"] == [[1, 1, 1, 0, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, *pad], [1, 0, 0, 0, *pad]]
    assert given["main_mask"] == [[0, 0, 0, 0, 1, 1, 1, 1, 1, 0], [0, 1, 1, 0, *pad], [0, 1, 0, 0, *pad]]
    assert given["word_start_mask"] == [[0, 0, 0, 0, 1, 0, 1, 1, 0, 0], [0, 1, 1, 0, *pad], [0, 1, 0, 0, *pad]]


@pytest.mark.parametrize("kind", [MetaBert, PathBert])
def test_a_document_with_a_title_has_the_same_answer_alone_and_in_a_mixed_batch(extractor, kind):
    extract = extractor(kind)
    documents = [mapping(*document) for document in DOCUMENTS] + [TEXT, random_text(80, 5)]
    alone = [places(extract(document)) for document in documents]
    for batch_size in (1, 3, 16):
        answers = extract(documents, batch_size=batch_size)
        assert [places(answer) for answer in answers] == alone
    assert sum(map(bool, alone)) >= 5
    assert alone[0] != alone[-2] == places(extract(mapping(None, TEXT)))  # the title matters
    for document, answer in zip(documents, answers, strict=True):
        check_places(document if isinstance(document, dict) else {"text": document}, answer)


def test_the_models_own_path_decides_and_its_probabilities_score(extractor):
    extract, by_label = extractor(PathBert), extractor()
    documents = [mapping(TITLE, TEXT), mapping(TITLE, random_text(150, 1)), random_text(100, 2)]
    block = extract.preprocess(documents)
    assert len([*extract.read_windows(block, batch_size=1, decode=True)]) > 1 and len(block.windows) > 6
    for number, document in enumerate(block.documents):
        probabilities, tags = block.probabilities.document(number), block.probabilities.tags(number)
        # the label after B, I, O is I, O, B, whichever number each has; and each word is read in the same window by both
        assert tags.tolist() == ((probabilities.argmax(-1) + 1) % 3).tolist()
        expected = rank_phrases(document.text, document.words, probabilities, tags=tags)
        assert places(extract(documents[number])) == places(expected)
        assert places(expected) != places(rank_phrases(document.text, document.words, probabilities))
    # a threshold of the call or the model decides instead
    expected, extract.model.paths = places(by_label(documents[1], threshold=0.4)), 0
    assert places(extract(documents[1], threshold=0.4)) == expected
    extract.model.config.keyphrase_threshold = 0.4
    assert places(extract(documents[1])) == expected and extract.model.paths == 0


def test_where_the_model_knows_no_meta_text_a_title_is_joined(extractor):
    extract = extractor(BertForTokenClassification)
    documents = [
        mapping(f"\n {TITLE} ", f"\t{TEXT}"),
        mapping(None, f" {TEXT}"),
        mapping(TITLE, ""),
        mapping(" ", TEXT),
    ]
    answer = extract(documents)
    assert forms(answer[0]) == forms(extract(join_title(TITLE, TEXT)))
    fields = [check_places(document, own) for document, own in zip(documents, answer, strict=True)]
    assert fields == [{"title", "text"}, {None}, {"title"}, {None}]
    assert answer[1] == extract(f" {TEXT}") and answer[3] == extract(TEXT)
    assert places(answer[2]) == places(extract(TITLE))


@pytest.mark.parametrize("kind", [BertForTokenClassification, MetaBert])
def test_titles_and_texts_that_need_cleaning(extractor, kind):
    extract, text = extractor(kind), "\nthe net-\nwork is learn\u00ading, in 802.11 of&nbsp;graph\ncuts"
    raw = mapping("  Graph&nbsp;cuts &amp; net\ngraphs ", text)
    answer = extract(raw)
    clean = mapping("Graph cuts & net graphs", "the network is learning, in 802.11 of graph cuts")
    assert forms(answer) == forms(extract(clean)) and answer
    for phrase in answer:
        assert clean_text(" ".join(piece_of(raw, phrase).split())) == " ".join(phrase["keyphrase"].split())


title_or_text = st.text(st.sampled_from([*"ab .?!;-\n\t&\u00ad0", "\u0301", "\ud800"]), max_size=12)


@pytest.fixture(scope="module")
def everywhere(extractor):
    """A model to which each word belongs to a keyphrase, and only the first begins one."""
    extract = extractor(BertForTokenClassification)
    extract.model.classifier.weight.data *= 0
    extract.model.classifier.bias.data[:] = torch.tensor([0.0, 5.0, 0.0])  # B, I, O
    return extract


@settings(max_examples=100, deadline=None)
@given(title_or_text, title_or_text)
def test_no_phrase_is_found_across_title_and_text(everywhere, title, text):
    """Title and text are joined by a mark, and a phrase has none."""
    document = mapping(title, text)
    words = {field: "".join(word for word, _, _ in split_words(clean_text(document[field]))) for field in document}
    for phrase in everywhere(document):
        found = "".join(word for word, _, _ in split_words(phrase["keyphrase"]))
        assert found in words[phrase.get("field", "text")] and piece_of(document, phrase)


def test_a_title_may_be_meta_text_and_joined(extractor, tiny_tokenizer):
    extract = extractor(title_in_main=True)
    joined = join_title(TITLE, TEXT)
    answer = extract(mapping(TITLE, TEXT))
    assert extract.model.given["input_ids"][0].tolist() == tiny_tokenizer(TITLE, joined)["input_ids"]
    assert forms(answer) == forms(extractor()(mapping(TITLE, joined)))
    assert check_places(mapping(TITLE, TEXT), answer) == {"title", "text"}
    assert places(extract(TEXT)) == places(extractor()(TEXT))


def test_a_model_inside_peft_is_read_by_its_own_signature(extractor):
    plain, wrapped = extractor(PathBert), extractor(PathBert)
    wrapped.model.eval()
    peft = get_peft_model(wrapped.model, LoraConfig(task_type="TOKEN_CLS", target_modules=["query"]))
    extract = KeyphraseExtractionPipeline(peft, plain.tokenizer, top_k=None)
    assert extract.reads_titles and not extract.joins_titles
    assert places(extract(mapping(TITLE, TEXT))) == places(plain(mapping(TITLE, TEXT)))
    assert wrapped.model.paths == 1


# ---- scores


@pytest.mark.parametrize("in_main", [False, True])
def test_the_trainers_logits_and_the_pipeline_give_the_same_scores(extractor, tiny_tokenizer, in_main):
    extract = extractor(title_in_main=in_main)
    titles, texts = (list(column) for column in zip(*DOCUMENTS, strict=True))
    titles[2] = "a b c"
    answers = extract([mapping(*document) for document in zip(titles, texts, strict=True)])
    keyphrases = [[p["keyphrase"] for p in answer[::2]] + ["quantum", "graph cut"] for answer in answers]
    main = [join_title(*document) for document in zip(titles, texts, strict=True)] if in_main else texts
    metrics = ExtractionMetrics(
        main, keyphrases, tiny_tokenizer, extract.model.config.id2label, titles=titles, thresholds=(None,)
    )
    batch = {"title": titles, "text": texts, "keyphrases": keyphrases}
    assert metrics.rows == tokenize_documents(batch, tiny_tokenizer, title_as="both" if in_main else "meta")
    names = ("input_ids", "attention_mask", "labels")
    inputs = [dict(zip(names, row, strict=True)) for row in zip(*(metrics.rows[name] for name in names), strict=True)]
    with torch.no_grad():
        logits = extract.model(**DataCollatorForTokenClassification(tiny_tokenizer)(inputs)).logits.numpy()
    scores = metrics(EvalPrediction(logits, None))
    assert scores == pytest.approx(evaluate_pipeline(extract, texts, keyphrases, titles=titles), abs=1e-9)
    assert 0 < scores["f1@10"] < 1
    # negative control: titles matter
    assert scores != pytest.approx(evaluate_pipeline(extract, texts, keyphrases), abs=1e-9)
