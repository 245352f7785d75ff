"""A tagger as a teacher in `train seke`: noun phrases of a style, word classes, and the ranker that reads them."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import pipeline

from keyphrase_tools.input_documents import read_document
from keyphrase_tools.word_classes import CLASSES, MODIFIER, NOUN, OTHER
from lexperts.recipes.seke import word_classes
from lexperts.recipes.seke.data import Documents
from lexperts.recipes.seke.mixture import HideStyles
from lexperts.recipes.seke.word_classes import add_noun_phrases, classes_by_tags, noun_phrase_spans, open_tagger
from run_tools.errors import UserError
from tests.recipes.test_seke import CORPUS, train

spacy = pytest.importorskip("spacy")
NOUNS = [
    "owl",
    "owls",
    "nest",
    "model",
    "star",
    "stars",
    "dwarf",
    "dwarfs",
    "hole",
    "holes",
    "curve",
    "curves",
    "light",
    "matter",
]
ADJECTIVES = ["grey", "large", "white", "red", "black", "dark", "binary", "angular"]


@pytest.fixture(scope="module")
def tagger_folder(tmp_path_factory):
    """A spaCy pipeline that knows a few words."""
    tagger = spacy.blank("en")
    ruler = tagger.add_pipe("attribute_ruler")
    for tag, words in (("NOUN", NOUNS), ("ADJ", ADJECTIVES)):
        ruler.add([[{"LOWER": word}] for word in words], {"POS": tag})
    ruler.add([[{"LOWER": {"NOT_IN": [*NOUNS, *ADJECTIVES]}}]], {"POS": "X"})
    folder = tmp_path_factory.mktemp("tagger")
    tagger.to_disk(folder)
    return folder


def test_a_word_has_the_class_of_its_token(tagger_folder):
    document = read_document("The grey owls' nest, C++ and a large-scale model.", 0, False, True)
    (found,) = classes_by_tags(open_tagger(str(tagger_folder)), [document])
    named = {word: int(tag) for (word, _, _), tag in zip(document.words, found, strict=True)}
    assert named["grey"] == MODIFIER and named["nest"] == NOUN and named["The"] == OTHER and named["C++"] == OTHER


@pytest.mark.parametrize(
    "classes, expected",
    [
        ([OTHER, MODIFIER, NOUN, OTHER], [(1, 3)]),
        ([NOUN, NOUN, MODIFIER], [(0, 2)]),
        ([MODIFIER, OTHER, NOUN], [(2, 3)]),
        ([], []),
    ],
)
def test_noun_phrases_are_the_longest(classes, expected):
    assert noun_phrase_spans(classes) == expected


def test_a_style_counts_by_its_noun_phrases_without_the_style(tagger_folder):
    texts = ["The grey owls sleep in a nest.", "A large model learns."]
    documents = Documents(texts, [["grey owl", "owls", "sleep", "nest"], ["learns"]], [(0, "words"), (1, "words")])
    found = add_noun_phrases(documents, ["words"], open_tagger(str(tagger_folder)), "english")
    assert found.texts == [*texts, texts[0]] and found.gold[2] == ["grey owl"] and found.files[2] == (2, "")
    assert add_noun_phrases(documents, ["tags"], open_tagger(str(tagger_folder)), "english") == documents


def test_some_styles_are_never_hidden():
    collator = HideStyles(lambda rows: {"style_ids": torch.tensor(rows)}, 1.0, [2])
    assert collator([1, 2, 2, 1, 0])["style_ids"].tolist() == [0, 2, 2, 0, 0]


@pytest.mark.parametrize(
    "name, message", [("no_such_pipeline", "spacy download no_such_pipeline"), ("blank", "no part of speech")]
)
def test_a_tagger_that_cannot_be_used(name, message, tmp_path):
    if name == "blank":
        name = str(tmp_path)
        spacy.blank("en").to_disk(name)
    with pytest.raises(UserError, match=message):
        open_tagger(name)


def test_classes_that_are_worse_than_the_most_frequent_one_are_not_used(
    tiny_seke, tiny_tokenizer, tagger_folder, monkeypatch
):
    extract = pipeline("keyphrase-extraction", model=tiny_seke(), tokenizer=tiny_tokenizer)
    always_noun = np.zeros((3, extract.model.config.hidden_size + 1))
    always_noun[NOUN, 0] = 1  # its bias
    monkeypatch.setattr(
        word_classes, "fit_word_classes", lambda *_: dict(zip(CLASSES, always_noun.tolist(), strict=True))
    )
    texts = ["The owls of the north are not to be seen by day."] * 10
    with pytest.warns(UserWarning, match=r"the most frequent class for \d+.\d%: they are not used"):
        scores = word_classes.add_word_classes(extract, texts, open_tagger(str(tagger_folder)), seed=1)
    assert scores["accuracy"] < scores["most_frequent"]
    assert extract.model.config.keyphrase_word_classes is None


def test_training_with_a_tagger_gives_a_ranker_that_reads_noun_phrases(backbone, tagger_folder, tmp_path):
    """And without an epoch, a model gets a new ranker, and keeps its weights."""
    file = tmp_path / "train.jsonl"
    file.write_text("".join((CORPUS / "train.jsonl").read_text().splitlines(keepends=True)[:16]))
    options = [
        "--train-files", f"phrases={file}", f"words={file}", "--validation-files", f"phrases={file}", f"words={file}",
        "--mixing-temperature", 2, "--rows-per-epoch", 24, "--num-train-epochs", 1, "--lora", "false", "--learning-rate", 0.001,
        "--fit-ranker", "true", "--tagger", tagger_folder, "--as-noun-phrases", "words", "--early-stopping-patience", 0,
    ]  # fmt: skip
    done = train(backbone, tmp_path / "out", *options)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((tmp_path / "out" / "results.json").read_text())
    assert record["word_classes"]["words"] > 500 and 0 < record["word_classes"]["accuracy"] <= 1
    assert record["data"]["train"]["documents"] > 32  # with copies
    extract = pipeline("keyphrase-extraction", model=str(tmp_path / "out"))
    config = extract.model.config
    assert set(config.keyphrase_word_classes) == set(CLASSES) and "best_noun_phrase" in config.keyphrase_ranker
    assert set(config.style_rankers) == {"phrases", "words"} and np.isfinite(
        extract("The grey owls sleep.")[0]["score"]
    )
    options += ["--start-from", tmp_path / "out", "--num-train-epochs", 0, "--ranker-joined", 4]
    done = train(backbone, tmp_path / "again", *options)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "again")]
    assert configs[0]["keyphrase_word_classes"] == configs[1]["keyphrase_word_classes"]
    assert configs[0]["keyphrase_ranker"] != configs[1]["keyphrase_ranker"]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--tagger", "en_core_web_sm"], "--fit-ranker true"),
        (["--as-noun-phrases", "words", "--fit-ranker", "true"], "needs --tagger"),
        (["--num-train-epochs", "0"], "Pass that model by --start-from"),
    ],
)
def test_options_that_need_each_other(options, message, backbone, tmp_path):
    done = train(backbone, tmp_path / "out", "--train-files", CORPUS / "train.jsonl", *options)
    assert done.returncode == 2 and message in done.stderr
