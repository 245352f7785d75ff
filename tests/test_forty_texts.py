"""The forty texts of benchmarks, their lists of verdicts, and the rules for phrases that are on no list."""

import doctest
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(name="verdicts")
def fixture_verdicts(benchmark_module):
    return benchmark_module("verdicts")


@pytest.fixture(name="text")
def fixture_text(verdicts):
    """A text with a speaker, a signature and a term."""
    text = (
        "LEWIS: The stormwater levy pays for SARS-CoV-2 tests. We voted for it, and they reopened.\n\n"
        "Lewis said that trade deals and a new trade deal help.\n--\nNadia Brandt"
    )
    verdicts_of_phrases = [("stormwater levy", "good"), ("tests", "too general"), ("trade deals", "acceptable")]
    return verdicts.JudgedText("news_1", text, verdicts_of_phrases)


def test_there_are_four_texts_of_ten_kinds(verdicts):
    texts = verdicts.read_texts()
    assert set(Counter(text.kind for text in texts).values()) == {verdicts.TEXTS}
    assert len({text.kind for text in texts}) == 10
    assert all(100 <= len(text.text.split()) <= 600 for text in texts)


def test_every_phrase_of_the_lists_is_in_its_text(verdicts):
    missing = [
        (text.name, phrase)
        for text in verdicts.read_texts()
        for phrase in text.verdicts
        if not text.find(phrase.split())
    ]
    assert not missing


def test_every_text_has_good_phrases_and_bad_ones(verdicts):
    for text in verdicts.read_texts():
        found = Counter(text.verdicts.values())
        assert found[verdicts.GOOD] >= 5, text.name
        assert len(text.verdicts) > found[verdicts.GOOD] + found[verdicts.ACCEPTABLE], text.name


def test_the_docstrings_examples_hold(verdicts):
    result = doctest.testmod(verdicts)
    assert result.attempted >= 1 and result.failed == 0


@pytest.mark.parametrize(
    "phrase, verdict, reason",
    [
        ("Stormwater levy", "good", ""),
        ("tests", "too general", ""),
        ("stormwater", "fragment", "stormwater levy"),
        ("levy pays for", "fragment", "function word"),
        ("CoV-2", "fragment", "term"),
        ("2 tests", "fragment", "term"),
        ("voted", "verb", "pronoun"),
        ("reopened", "verb", "pronoun"),
        ("Nadia Brandt", "label", "signature"),
        ("LEWIS", "unknown", ""),  # also in a sentence
        ("SARS-CoV-2", "unknown", ""),
        ("quantum", "unknown", "not in the text"),
    ],
)
def test_the_verdict_on_a_phrase(text, phrase, verdict, reason):
    (found,) = text.judge([phrase])
    assert found.verdict == verdict and reason in found.reason


def test_a_speaker_is_a_label(verdicts):
    text = verdicts.JudgedText("transcript_1", "OKAFOR: We pay.\n[10:02] Jo: ok\nMs Okafor spoke.", [])
    assert [one.verdict for one in text.judge(["Jo", "Okafor"])] == ["label", "unknown"]


def test_the_second_of_two_near_duplicates_counts(text):
    found = text.judge(["new trade deal", "trade deals", "stormwater", "stormwater levy"])
    assert [one.verdict for one in found] == ["unknown", "near-duplicate", "fragment", "good"]
    assert found[1].reason == "of new trade deal"
    assert [one.verdict for one in text.judge(["trade deals", "tests"])] == ["acceptable", "too general"]


@pytest.mark.parametrize("phrase_verdicts", [[("levy", "nice")], [("levy", "good"), ("Levy", "fragment")]])
def test_lists_that_are_wrong_are_refused(verdicts, phrase_verdicts):
    with pytest.raises(ValueError, match="nice" if len(phrase_verdicts) == 1 else "Levy"):
        verdicts.JudgedText("news_1", "a levy", phrase_verdicts)


def test_a_line_without_a_text_is_refused(verdicts, tmp_path):
    (tmp_path / "news_1.txt").write_text("a levy\n", encoding="utf-8")
    (tmp_path / "verdicts.tsv").write_text("news_1\tlevy\tgood\nnews_2\tlevy\tgood\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 2"):
        verdicts.read_texts(tmp_path)


def test_counts_are_of_the_top_five_by_kind(benchmark_module, verdicts, text):
    benchmark = benchmark_module("forty_texts")
    phrases = ["stormwater levy", "tests", "voted", "CoV-2", "SARS-CoV-2", "trade deals"]
    row = benchmark.judge([text], [[{"keyphrase": phrase} for phrase in phrases]])
    counts = {name: count for name, count in row["all"].items() if count}
    assert counts == {"phrases": 5, "good": 1, "too general": 1, "verb": 1, "fragment": 1, "unknown": 1}
    assert row["kinds"] == {"news": row["all"]}
    assert [phrase for phrase, *_ in row["texts"]["news_1"]] == phrases[:5]
    assert "40.0% fragment, verb, near-duplicate" in benchmark.describe({"system": "a", **row})
