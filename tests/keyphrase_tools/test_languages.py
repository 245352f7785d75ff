"""language=: stemmers, words without blanks, and what an English model does with other languages."""

import json
from pathlib import Path

import pytest
import snowballstemmer
import torch
from nltk.stem.porter import PorterStemmer
from transformers import AutoConfig, pipeline

from keyphrase_tools.labels import find_keyphrases, present_keyphrases
from lexperts_lite.words import LANGUAGES, split_words, stem, stem_phrase
from tests.keyphrase_tools.known_answers import TEXT, names

CORPUS = Path(__file__).resolve().parents[2] / "examples" / "corpus"
ROWS = [json.loads(line) for line in (CORPUS / "languages.jsonl").read_text(encoding="utf-8").splitlines()]
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row["language"]))


def test_english_is_the_default_and_porters():
    words = [word for word, _, _ in split_words(TEXT)] + ["Universities", "running", "CAFÉ", "naïveté"]
    assert list(map(stem, words)) == [stem(word, "english") for word in words] == list(map(PorterStemmer().stem, words))
    assert set(LANGUAGES) <= set(snowballstemmer.algorithms())


@pytest.mark.parametrize("language, one, other, same", [
    ("french", "Réseaux de neurones", "réseau de neurone", True), ("german", "Tiefe Flussmündungen", "tiefer Flussmündung", True),
    ("german", "GROẞE STRASSEN", "große Straße", True), ("spanish", "Turbinas marinas", "turbina marina", True),
    ("portuguese", "Turbinas marinhas", "turbina marinha", True), ("french", "cafe\u0301s", "café", True),
    ("french", "d'estuaires", "L\u2019Estuaire", True), ("italian", "dell'acqua", "acqua", True),
    (None, "Straße 学习", "STRASSE 学习", True), (None, "turbines", "turbine", False), ("french", "aujourd'hui", "hui", False),
    ("german", "d'Estuaires", "Estuaires", False), ("spanish", "réseaux", "réseau", False),
])  # fmt: skip
def test_forms_of_a_phrase_have_equal_stems(language, one, other, same):
    assert (stem_phrase(one, language) == stem_phrase(other, language) != "") is same


@pytest.mark.parametrize("language, text, expected", [
    ("french", "bateau, bateaux; l'eau et eau", {"bateau": 2, "l'eau": 2, "et": 1}),
    (None, "turbine turbines Turbine", {"turbine": 2, "turbines": 1}),
    ("english", "fibre fiber, analysed analyzed, dialogues dialog; four", {"fibre": 2, "analysed": 2, "dialogues": 2, "four": 1}),
    ("english", "organisations organization, anaemia anemia; defence defense, programme program, oedema edema", {
        "organisations": 2, "anaemia": 2, "defence": 2, "programme": 2, "oedema": 2}),
    ("english", "aluminium aluminum, grey gray; sulphate sulfate, organisational organizational", {
        "aluminium": 2, "grey": 2, "sulphate": 2, "organisational": 2}),
    ("english", "turbine turbines, colour color", {"turbine": 2, "colour": 2}), ("german", "colour color", {"colour": 1, "color": 1}),
])  # fmt: skip
def test_mentions_with_equal_stems_of_the_language_are_one_keyphrase(everything, language, text, expected):
    assert {p["keyphrase"]: len(p["mentions"]) for p in everything(text, language=language)} == expected


def test_chinese_is_read_character_by_character_and_phrases_have_no_blanks(lookup):
    text = "利用潮汐能 (潮汐). 水"
    extract = lookup()
    extract.model.table.data[:] = torch.tensor([0.0, 0.0, 5.0])  # all I: phrases end at punctuation only
    assert names(extract(text, language=None)) == []  # the brackets are inside the only phrase
    found = extract(text, language=None, candidates=["潮汐", "潮汐能", "水", "能源"])
    by_name = {c["keyphrase"]: [text[m["start"] : m["end"]] for m in c["mentions"]] for c in found}
    assert by_name == {"潮汐": ["潮汐"], "潮汐能": ["潮汐能"], "水": ["水"], "能源": []}
    extract.model.table.data[:] = torch.tensor([5.0, 0.0, 0.0])
    extract.model.table.data[extract.tokenizer.unk_token_id] = torch.tensor([0.0, 0.0, 5.0])
    assert sorted(names(extract(text, language=None))) == sorted(["利用潮汐能", "潮汐", "水"])


@pytest.mark.parametrize("language, number", [("german", 3), (None, 4)])
def test_the_configurations_language_is_saved(tiny_seke, tiny_tokenizer, tmp_path, language, number):
    model = tiny_seke()
    model.config.keyphrase_language = language
    model.classifier.weight.data *= 0
    model.classifier.bias.data[:] = torch.tensor([0.0, 5.0, 0.0])
    for part in (model, tiny_tokenizer):
        part.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).keyphrase_language == language
    extract, text = pipeline("keyphrase-extraction", model=str(tmp_path)), "universe university Bäume Baum"
    assert len(extract(text)) == number and len(extract(text, language="english")) == 3
    extract.model.config.keyphrase_language = "klingon"
    with pytest.raises(ValueError, match="language='klingon' has no stemmer"):
        extract(text)


@each_row
def test_every_keyphrase_of_the_texts_occurs_by_the_stems_of_its_language_and_is_scored(everything, row):
    language, words = row["language"], split_words(row["text"])
    assert all(find_keyphrases(words, row["keyphrases"], language=language))
    assert len(present_keyphrases(words, row["keyphrases"], language=language)) == 9
    found = everything(row["text"], candidates=row["keyphrases"], language=language)
    assert len(found) == 9 and all(c["score"] > 0 and row["text"][c["start"] : c["end"]] for c in found)
    missed = find_keyphrases(words, row["keyphrases"]).count([])  # by English stems
    assert missed >= {"german": 2, "french": 1}.get(language, 0) and (missed == 0 or language not in ("english", None))


@pytest.mark.parametrize("text", [
    "Senior DevOps Engineer. Kubernetes, Terraform, Ansible, Prometheus, Grafana, Jenkins, GitLab, Helm, Istio, Envoy, Kafka, RabbitMQ",
    "paracetamol, ibuprofen, amoxicillin, metformin, atorvastatin, omeprazole, salbutamol, ramipril, bisoprolol, furosemide, sertraline",
    "Jos\u00e9 Garc\u00eda, Zo\u00eb M\u00fcller, Anna Kowalska, John Smith, Mary Okafor, Ben Tanaka, Lena Petrov, Tom Rossi, Eva Larsen, Jan Novak",
])  # fmt: skip
def test_a_list_of_names_is_no_other_language(everything, text, caplog):
    everything._warned_of_language = False
    everything(text + ". " + text)
    assert not any("English" in record.getMessage() for record in caplog.records)


@each_row
def test_a_text_that_is_not_english_is_named_once(everything, row, caplog):
    everything._warned_of_language = False
    texts = ["Graph cuts", row["text"], row["text"]]
    for options, expected in (({"language": row["language"]}, 0), ({}, 1), ({}, 0)):
        caplog.clear()
        everything(texts, **options)
        shown = [record.getMessage() for record in caplog.records if "English" in record.getMessage()]
        assert len(shown) == (expected if row["language"] != "english" else 0)
        assert all("ocument 1 " in line for line in shown)
