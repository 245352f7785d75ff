"""Candidates: which mentions are found, and how they are scored."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import pipeline
from typer.testing import CliRunner

from keyphrase_tools.labels import find_keyphrases
from lexperts.cli.keyphrases import app
from lexperts_lite.candidates import Candidates
from lexperts_lite.clean import CleanText
from lexperts_lite.decoding import apply_temperature
from lexperts_lite.words import split_words
from tests.corpora import as_written, extract_file, lines, write_jsonl
from tests.keyphrase_tools.known_answers import TEXT, names, random_text

ABSENT = {"score": None, "start": None, "end": None, "mentions": []}


def test_every_candidate_is_reported_with_the_score_of_its_best_mention(extract):
    answer = extract(TEXT, candidates=["energy problem", "quantum", "graph", "deep networks"])
    block = extract.read([TEXT])
    words, p = block.documents[0].words, block.probabilities.document(0)
    places = [word.lower() for word, _, _ in words]
    energy, deep = places.index("energy"), places.index("deep")
    expected = {
        "energy problem": (p[energy, 1] + p[energy + 1, 2]) / 2,
        "deep networks": (p[deep, 1] + p[deep + 1, 2]) / 2,
        "graph": max(p[i, 1] for i, word in enumerate(places) if word == "graph"),
    }
    assert {c["keyphrase"]: c["score"] for c in answer[:3]} == pytest.approx(expected, abs=1e-6)
    assert names(answer)[:3] == sorted(expected, key=expected.get, reverse=True)
    assert answer[3] == {"keyphrase": "quantum", **ABSENT}
    (graph,) = [c for c in answer if c["keyphrase"] == "graph"]
    assert [TEXT[m["start"] : m["end"]] for m in graph["mentions"]] == ["Graph", "graph"]
    assert (graph["start"], graph["end"]) == (0, 5)


def test_an_extracted_keyphrase_has_the_same_score_as_a_candidate(extract):
    text = random_text(30, 3)
    found = {p["keyphrase"]: p for p in extract(text, top_k=None)}
    scored = extract(text, candidates=list(found))
    assert len(scored) == len(found) > 3
    for candidate in scored:
        assert all(mention in candidate["mentions"] for mention in found[candidate["keyphrase"]]["mentions"])


def test_scores_are_at_the_models_temperature_also_of_words_that_the_model_labels_o(lookup):
    plain, scaled = lookup(), lookup()
    scaled.model.config.keyphrase_temperature = 2.5
    (one,), (other,) = (extract("x bx c", candidates=["c"]) for extract in (plain, scaled))
    assert one["score"] == pytest.approx(1 / (np.exp(3) + 2), abs=1e-6)
    assert other["score"] == pytest.approx(float(apply_temperature(np.array(one["score"]), 2.5)), abs=1e-5)


CASES = [
    ("IT and it, Its", ["IT"], {"IT": ["IT"]}),
    ("GANs, gans; a TCP/IP, tcp/ip", ["GAN", "TCP/IP"], {"GAN": ["GANs"], "TCP/IP": ["TCP/IP", "tcp/ip"]}),
    ("Apple and apples, Apple's", ["Apple"], {"Apple": ["Apple", "apples", "Apple's"]}),
    ("the graph cuts", ["graph cut", "graph cuts"], {"graph cut": ["graph cuts"]}),
    ("C, C++ and C#; c", ["C", "C++", "C#"], {"C": ["C"], "C++": ["C++"], "C#": ["C#"]}),
    ("R, R-CNN; COVID-19, 2,4-D", ["R", "COVID", "D", "19", "2,4-D"], {"R": ["R"], "COVID": ["COVID"], "2,4-D": ["2,4-D"]}),
    ("Alzheimer\u2019s disease", ["Alzheimer's disease"], {"Alzheimer's disease": ["Alzheimer\u2019s disease"]}),
    ("students' results, the students\u2019 grades", ["students results", "students' grades", "student"], {"students results": ["students' results"], "students' grades": ["students\u2019 grades"]}),
    ("the \ufb01nancial \uff21\uff49 of CO\u2082", ["financial AI", "CO2"], {"financial AI": ["\ufb01nancial \uff21\uff49"], "CO2": ["CO\u2082"]}),
    ('<a href="kinetic-energy">dark energy</a>', ["kinetic energy", "dark energy"], {"dark energy": ["dark energy"]}),
    ("a http://x.org/graph-cut graph", ["graph", "http://x.org/graph-cut"], {"graph": ["graph"]}),
    ("graph\n\ncut - graph\ncut", ["graph cut"], {"graph cut": ["graph\ncut"]}),
    ("cafe\u0301 cre\u0300me; bat-\nteries, gra\u00adphs", ["café crème", "battery", "graph"], {"café crème": ["cafe\u0301 cre\u0300me"], "battery": ["bat-\nteries"], "graph": ["gra\u00adphs"]}),
]  # fmt: skip


@pytest.mark.parametrize("text, candidates, expected", CASES)
def test_a_mention_is_of_equal_words_in_one_unit_of_layout(text, candidates, expected):
    source = CleanText(text)
    words = split_words(source.text)
    found = Candidates(candidates).find(words)
    spans = {name: [(words[a][1], words[b - 1][2]) for a, b in spans] for name, spans in found.items()}
    assert {n: [text[slice(*source.source_span(*s))] for s in of] for n, of in spans.items()} == expected


def test_mentions_are_found_in_title_and_text_but_not_across(lookup):
    document = {"title": " Graph cuts", "text": "cuts of a\ngraph. x"}
    answer = lookup()(document, candidates=["graph", "cut", "cuts. cuts", "learning"])
    by_name = {c["keyphrase"]: c for c in answer}
    assert [m["field"] for m in by_name["graph"]["mentions"]] == ["title", "text"]
    for c in answer[:2]:
        assert all(c["keyphrase"] in document[m["field"]][m["start"] : m["end"]].lower() for m in c["mentions"])
    assert by_name["cuts. cuts"] == {"keyphrase": "cuts. cuts", "field": None, **ABSENT}


def test_top_k_and_min_score_choose_among_candidates(lookup):
    text, candidates = "x bx c p", ["zz", "c", "p", "bx"]
    everything = lookup()(text, candidates=candidates)
    assert names(everything) == ["bx", "p", "c", "zz"]
    assert lookup()(text, candidates=candidates, top_k=2) == everything[:2]
    assert lookup()(text, candidates=candidates, min_score=0.5) == everything[:2]
    assert len(lookup()(text, candidates=[f"z{i}" for i in range(30)])) == 30  # the default of ten is for extraction
    assert lookup(candidates=candidates)(text) == everything
    assert names(lookup(candidates=candidates)(text, candidates=None)) == ["bx", "p"]


WORDS = st.sampled_from(["graph", "Cuts", "cut", "b-i", "802.11", "é", "学", "習", "!", "ab", "bc"])
phrases = st.lists(WORDS, min_size=1, max_size=3)


@settings(max_examples=80, deadline=None)
@given(st.lists(phrases, max_size=12), st.lists(phrases.map(" ".join), min_size=1, max_size=4))
def test_mentions_are_those_that_labels_find(parts, given_phrases):
    words = split_words(" ".join(" ".join(part) for part in parts))
    candidates = Candidates(given_phrases)
    unique = candidates.phrases()
    found, labelled = candidates.find(words), find_keyphrases(words, unique)
    kept = [span for spans in found.values() for span in spans]
    for candidate, spans in zip(unique, labelled, strict=True):
        mine = found.get(candidate, [])
        assert set(mine) <= set(spans)
        assert all(a[1] <= b[0] for a, b in zip(mine, mine[1:], strict=False))
        for start, end in set(spans) - set(mine):  # overlaps another mention of its own, or is inside a longer one
            assert any(a < end and start < b for a, b in mine) or any(a <= start and end <= b for a, b in kept)


def test_a_file_of_documents_is_scored_and_absent_candidates_have_no_place(folder, tmp_path):
    source = write_jsonl(tmp_path / "texts.jsonl", [{"text": TEXT}])
    (tmp_path / "names.txt").write_text("\ufeffdeep networks\n\nquantum\n energy Problems \n", encoding="utf-8")
    arguments = ["extract", source, tmp_path / "out.jsonl", "--model", folder, "--mentions", "--candidates"]
    done = CliRunner().invoke(app, [*map(str, arguments), str(tmp_path / "names.txt")])
    assert done.exit_code == 0, done.output
    other = CliRunner().invoke(app, list(map(str, arguments[:-1])))
    assert other.exit_code == 2 and "candidates='names.txt" in other.stderr
    candidates = ["deep networks", "quantum", "energy Problems"]
    extract = pipeline("keyphrase-extraction", model=folder)
    (row,) = lines(tmp_path / "out.jsonl")
    assert row["keyphrases"] == as_written(extract(TEXT, candidates=candidates), mentions=True)
    extract_file(extract, source, tmp_path / "plain.jsonl", candidates=candidates)
    (row,) = lines(tmp_path / "plain.jsonl")
    absent = {"score": None, "start": None, "end": None, "field": None}
    assert row["keyphrases"][-1] == {"keyphrase": "quantum", **absent}


SUFFIXES = ["", "able", "ed", "er", "ers", "ing", "ings", "ion", "ions", "ive", "s", "ful"]


def test_time_is_in_proportion_to_the_text_whatever_the_candidates():
    """Many that begin alike, and many that share stems with each other."""
    alike = [f"graph b{i}" for i in range(5_000)] + ["graph", "graph graph"]
    stemmed = [f"connect{a} adjust{b} adapt{c}" for a in SUFFIXES for b in SUFFIXES for c in SUFFIXES][:1500]
    for candidates, text in ((alike, "graph " * 10_000), (stemmed, "connect adjust adapt . " * 6000)):
        given_candidates, words = Candidates(candidates), split_words(text)
        given_candidates.find(words[:2])
        start = time.process_time()
        found = given_candidates.find(words)
        assert time.process_time() - start < 3  # a twentieth; names times places: minutes
        assert sum(map(len, found.values())) <= len(words) and len(found) <= 2
