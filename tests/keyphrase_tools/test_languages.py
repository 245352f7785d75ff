"""language=: stemmers, words without blanks, and what an English model does with other languages."""

import json
from functools import partial
from pathlib import Path

import pytest
import snowballstemmer
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nltk.stem.porter import PorterStemmer
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    DataCollatorForTokenClassification,
    PreTrainedTokenizerFast,
    XLMRobertaConfig,
    pipeline,
)
from typer.testing import CliRunner

from keyphrase_tools.labels import find_keyphrases, present_keyphrases, tokenize_documents
from lexperts.cli.keyphrases import app
from lexperts_lite.words import LANGUAGES, split_words, stem, stem_phrase
from modeling_seke import SekeConfig, SekeForTokenClassification
from tests.corpora import as_written
from tests.keyphrase_tools.known_answers import TEXT, names, random_text

CORPUS = Path(__file__).resolve().parents[2] / "examples" / "corpus"
ROWS = [json.loads(line) for line in (CORPUS / "languages.jsonl").read_text(encoding="utf-8").splitlines()]


# ---- stems


def test_english_is_the_default_and_porters():
    words = [word for word, _, _ in split_words(TEXT)] + ["Universities", "running", "CAFÉ", "naïveté"]
    porter = PorterStemmer()
    assert (
        list(map(stem, words)) == list(map(partial(stem, language="english"), words)) == list(map(porter.stem, words))
    )


def test_the_languages_have_stemmers():
    assert set(LANGUAGES) <= set(snowballstemmer.algorithms())


@pytest.mark.parametrize(
    "language, one, other",
    [
        ("french", "Réseaux de neurones", "réseau de neurone"),
        ("german", "Tiefe Flussmündungen", "tiefer Flussmündung"),
        ("german", "GROẞE STRASSEN", "große Straße"),
        ("spanish", "Turbinas marinas", "turbina marina"),
        ("portuguese", "Turbinas marinhas", "turbina marinha"),
        ("french", "cafe\u0301s", "café"),
        ("french", "d'estuaires", "L\u2019Estuaire"),
        ("italian", "dell'acqua", "acqua"),
        (None, "Straße 学习", "STRASSE 学习"),
    ],
)
def test_forms_of_a_phrase_have_equal_stems(language, one, other):
    assert stem_phrase(one, language) == stem_phrase(other, language) != ""


@pytest.mark.parametrize(
    "language, one, other",
    [
        (None, "turbines", "turbine"),
        ("french", "aujourd'hui", "hui"),
        ("german", "d'Estuaires", "Estuaires"),
        ("spanish", "réseaux", "réseau"),
    ],
)
def test_other_words_keep_different_stems(language, one, other):
    assert stem_phrase(one, language) != stem_phrase(other, language)


@pytest.mark.parametrize("language", [*LANGUAGES, None])
@settings(max_examples=40, deadline=None)
@given(word=st.text(max_size=12))
def test_any_word_has_a_stem_that_does_not_depend_on_other_words(language, word):
    stem.cache_clear()
    first = stem(word, language)
    stem("independent", language), stem.cache_clear()
    assert stem(word, language) == first == stem(word, language)


@pytest.mark.parametrize("language", ["klingon", "de", "German", "", 5, ["german"]])
def test_an_unknown_language_is_named_with_the_known_ones(lookup, language):
    with pytest.raises(ValueError, match="language=.*Use.*'arabic', 'danish',.*language=None"):
        lookup()("b", language=language)
    with pytest.raises(ValueError, match="'german'"):
        lookup(language=language)


# ---- the pipeline


@pytest.mark.parametrize(
    "language, text, expected",
    [
        ("german", "Baum und Bäume, bald Bäumen", {"Baum": 3, "und": 1, "bald": 1}),
        ("french", "bateau, bateaux; l'eau et eau", {"bateau": 2, "l'eau": 2, "et": 1}),
        ("spanish", "turbina turbinas", {"turbina": 2}),
        ("portuguese", "rede redes Rede", {"rede": 3}),
        (None, "turbine turbines Turbine", {"turbine": 2, "turbines": 1}),
        ("english", "turbine turbines", {"turbine": 2}),
    ],
)
def test_mentions_with_equal_stems_of_the_language_are_one_keyphrase(everything, language, text, expected):
    assert {p["keyphrase"]: len(p["mentions"]) for p in everything(text, language=language)} == expected


def test_chinese_is_read_character_by_character_and_phrases_have_no_blanks(lookup):
    text = "利用潮汐能 (潮汐). 水"
    extract = lookup()
    extract.model.table.data[:] = torch.tensor([0.0, 0.0, 5.0])  # all I: phrases end at punctuation only
    answer = extract(text, language=None)
    assert names(answer) == []  # the brackets are inside the only phrase
    found = extract(text, language=None, candidates=["潮汐", "潮汐能", "水", "能源"])
    by_name = {c["keyphrase"]: [text[m["start"] : m["end"]] for m in c["mentions"]] for c in found}
    assert by_name == {"潮汐": ["潮汐"], "潮汐能": ["潮汐能"], "水": ["水"], "能源": []}
    extract.model.table.data[:] = torch.tensor([5.0, 0.0, 0.0])
    extract.model.table.data[extract.tokenizer.unk_token_id] = torch.tensor([0.0, 0.0, 5.0])
    assert sorted(names(extract(text, language=None))) == sorted(["利用潮汐能", "潮汐", "水"])


def test_the_default_is_english_or_the_configurations(lookup):
    texts = [TEXT, random_text(80)]
    plain = lookup()
    assert plain(texts) == plain(texts, language="english") == lookup(language="english")(texts)
    german = lookup()
    german.model.config.keyphrase_language = "german"
    german.model.table.data[:] = torch.tensor([0.0, 5.0, 0.0])
    assert names(german("Bäume Baum")) == ["Bäume"]
    assert names(german("Bäume Baum", language=None)) == ["Bäume", "Baum"]
    german.model.config.keyphrase_language = "klingon"
    with pytest.raises(ValueError, match="language='klingon' has no stemmer"):
        german("Baum")


@pytest.mark.parametrize("language", ["german", None])
def test_the_configurations_language_is_saved(tiny_seke, tiny_tokenizer, tmp_path, language):
    model = tiny_seke()
    model.config.keyphrase_language = language
    model.classifier.weight.data *= 0
    model.classifier.bias.data[:] = torch.tensor([0.0, 5.0, 0.0])
    for part in (model, tiny_tokenizer):
        part.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).keyphrase_language == language
    answer = pipeline("keyphrase-extraction", model=str(tmp_path))("universe university Bäume Baum")
    assert len(answer) == {"german": 3, None: 4}[language]


# ---- labels and the texts of examples/corpus


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row["language"]))
def test_every_keyphrase_of_the_texts_occurs_by_the_stems_of_its_language(row):
    words = split_words(row["text"])
    assert all(find_keyphrases(words, row["keyphrases"], language=row["language"])) and len(row["keyphrases"]) == 9
    assert len(present_keyphrases(words, row["keyphrases"], language=row["language"])) == 9


def test_english_stems_miss_forms_of_other_languages():
    missed = {row["language"]: find_keyphrases(split_words(row["text"]), row["keyphrases"]).count([]) for row in ROWS}
    assert missed["english"] == missed[None] == 0 and missed["german"] >= 2 and missed["french"] >= 1


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row["language"]))
def test_the_pipeline_scores_the_keyphrases_of_the_texts(everything, row):
    found = everything(row["text"], candidates=row["keyphrases"], language=row["language"])
    for candidate in found:
        assert candidate["score"] > 0 and row["text"][candidate["start"] : candidate["end"]]
    assert len(found) == 9


def test_labels_are_those_of_the_language(tiny_tokenizer):
    batch = {"text": ["Flussmündungen am Fluss"], "keyphrases": [["Flussmündung"]]}
    english, german = (
        tokenize_documents(batch, tiny_tokenizer, language=language) for language in ("english", "german")
    )
    assert (english["num_present"], german["num_present"]) == ([0], [1])
    assert sum(label == 1 for label in german["labels"][0]) == 1
    assert tokenize_documents(batch, tiny_tokenizer) == english


@pytest.mark.parametrize("option, language", [("german", "german"), ("none", None)])
def test_the_command_passes_language_and_diversity_on(sharp_seke, tiny_tokenizer, tmp_path, option, language):
    for part in (sharp_seke(), tiny_tokenizer):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    paths = [str(tmp_path / name) for name in ("texts.jsonl", "out.jsonl")]
    options = [
        "--model",
        str(tmp_path / "model"),
        "--language",
        option,
        "--diversity",
        "0.9",
        "--mentions",
        "--top-k",
        "4",
    ]
    done = CliRunner().invoke(app, ["extract", *paths, *options])
    assert done.exit_code == 0, done.output
    (row,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    extract = pipeline("keyphrase-extraction", model=str(tmp_path / "model"), top_k=4)
    expected = extract(TEXT, language=language, diversity=0.9)
    assert row["keyphrases"] == as_written(expected, mentions=True) and expected != extract(TEXT)


def test_the_command_refuses_an_unknown_language(tmp_path, sharp_seke, tiny_tokenizer):
    for part in (sharp_seke(), tiny_tokenizer):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    paths = [str(tmp_path / name) for name in ("texts.jsonl", "out.jsonl")]
    done = CliRunner().invoke(app, ["extract", *paths, "--model", str(tmp_path / "model"), "--language", "klingon"])
    assert done.exit_code == 2 and "language='klingon'" in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


# ---- a multilingual backbone


@pytest.fixture(scope="module")
def multilingual_tokenizer():
    """A SentencePiece-like tokenizer of the six texts: blanks are part of the pieces, and characters are kept."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([row["text"] for row in ROWS], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=510, **names)


def test_a_model_with_a_multilingual_tokenizer_learns_the_keyphrases_of_every_language(multilingual_tokenizer):
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    encoder = XLMRobertaConfig(
        vocab_size=len(multilingual_tokenizer), max_position_embeddings=512, pad_token_id=1, **sizes
    )
    model = SekeForTokenClassification(SekeConfig(text_config=encoder))
    rows = []
    for row in ROWS:
        batch = {"text": [row["text"]], "keyphrases": [row["keyphrases"]]}
        columns = tokenize_documents(batch, multilingual_tokenizer, language=row["language"])
        assert columns["num_present"] == [9] and len(columns["input_ids"]) == 1
        rows.append({name: columns[name][0] for name in ("input_ids", "attention_mask", "labels")})
    batch = DataCollatorForTokenClassification(multilingual_tokenizer)(rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(80):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=multilingual_tokenizer, top_k=None)
    for row in ROWS:
        language = row["language"]
        found = {_stems(phrase["keyphrase"], language) for phrase in extract(row["text"], language=language)}
        gold = {_stems(phrase, language) for phrase in row["keyphrases"]}
        assert len(found & gold) >= 8 and len(found - gold) <= 1, language
        absent = [c for c in extract(row["text"], language=language, candidates=row["keyphrases"]) if not c["mentions"]]
        assert absent == []


def _stems(phrase, language):
    return tuple(stem(word, language) for word, _, _ in split_words(phrase))
