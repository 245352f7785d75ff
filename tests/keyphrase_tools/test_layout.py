"""Units of layout: where texts are divided, what is hidden, and that decoding, candidates, the ranker and labels agree on them."""

import time
from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keyphrase_tools.labels import find_keyphrases, tokenize_documents
from lexperts_lite.candidates import CandidateSet
from lexperts_lite.clean_text import clean
from lexperts_lite.layout import hidden_spans, in_one_unit, unit_numbers
from lexperts_lite.phrase_features import find_phrases
from lexperts_lite.ranking import rank_phrases
from lexperts_lite.windows import WordProbabilities, encode_windows
from lexperts_lite.words import normalise, split_phrase, split_words, stem

WRAPPED = "In this paper we present a scalable method for discovering web\nservices that are\nannotated with the terms of an ontology of graph\ncuts"


def units_of(text):
    """The words of each unit, and those that are hidden in brackets."""
    words = split_words(clean(text))
    parts = groupby(zip(unit_numbers(words), words, strict=True), key=lambda pair: pair[0])
    parts = [(unit, " ".join(word for _, (word, _, _) in of)) for unit, of in parts]
    return [f"[{part}]" if unit < 0 else part for unit, part in parts]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("graph\ncuts in\r\nlines", ["graph cuts in lines"]),
        ("a neural network\n\nGraph cuts", ["a neural network", "Graph cuts"]),
        ("a\r\n \t\r\nb\u2029c", ["a", "b", "c"]),
        ("Topics:\n- speech recognition\n- protein folding", ["Topics :", "speech recognition", "protein folding"]),
        ("* a b\n\u2022 c d\n+ e\n\u2013 f", ["*", "a b", "\u2022", "c d", "+", "e", "f"]),
        ("graphs\n1. cuts\n2) flows\n(iv) nets\n2.1 Trees", ["graphs", "1 .", "cuts", "2 )", "flows", "( iv )", "nets", "2.1", "Trees"]),
        ("- first", ["first"]),
        ("Procedure: CT scan\nClinical history: pain\nTo-do list of all: none", ["Procedure :", "CT scan", "Clinical history : pain", "To do list of all : none"]),
        ("we see that\nthe results of the second test: none", ["we see that the results of the second test : none"]),
        ("```\nmake install\nmake test\n```\nas lines\nof text", ["` ` `", "make install", "make test", "` ` `", "as lines of text"]),
        ("PaymentService - Connection pool", ["PaymentService", "Connection pool"]),
        ("speech / text \u2013 audio -- video", ["speech", "text", "audio", "video"]),
        ("semi-supervised and/or pre- and post-war 3\u20137", ["semi supervised and or pre and post war 3 7"]),
        ("churn models\nEDUCATION\nUniversity of Graz", ["churn models", "EDUCATION", "University of Graz"]),
        ("GRAPH CUTS\nAND FLOWS", ["GRAPH CUTS AND FLOWS"]),
        ("the cuts\n# Flows\nin nets", ["the cuts", "#", "Flows", "in nets"]),
        ("name\tage   size | cut\n\t of", ["name", "age", "size | cut of"]),
        ("the budget\nOKAFOR: we agree\nDr. Ada King: no", ["the budget", "OKAFOR :", "we agree", "Dr . Ada King :", "no"]),
        ("[10:15] pool\n2024-05-01 12:00 leak", ["[ 10 : 15", "] pool", "2024 05 01", "12 : 00 leak"]),
        (WRAPPED.replace("services that are\n", "services "), [" ".join(WRAPPED.replace(" that are", "").split())]),
        (WRAPPED, [" ".join(WRAPPED.split()[:14]), " ".join(WRAPPED.split()[14:])]),  # a line that ends early
        ("see https://x.org/quantum-chem?a=b, now", ["see", "[https : x.org quantum chem ? a = b ,]", "now"]),
        ("to a-b.c@kinetic-energy.org or www.graph-cut.de", ["to", "[a b . c @ kinetic energy.org]", "or", "[www . graph cut . de]"]),
        ("HTTPS://X.ORG/A b s3://graph-cut/c d", ["[HTTPS : X . ORG A]", "b", "[s3 : graph cut c]", "d"]),
        ("clone git@x.org:graph-cut/nets.git now", ["clone", "[git @ x.org : graph cut nets . git]", "now"]),
        ("<SCRIPT>a</script> b <style guide> c", ["[< SCRIPT > a < script >]", "b < style guide > c"]),
        ("name\u00a0\u00a0\u00a0age\n   of\u2003\u2003\u2003graphs", ["name", "age of", "graphs"]),
        ("at quantum-chem.org, en.graph.org. Amazon.com and Node.js", ["at", "[quantum chem.org]", ",", "[en . graph.org]", ". Amazon.com and Node.js"]),
        ("doi:10.1000/x-y of 10.1234/graph.cut ; 10.5 / 3 U.S.de", ["[doi : 10.1000 x y]", "of", "[10.1234 graph . cut]", "; 10.5", "3 U.S . de"]),
        ("at github.com/graph-cuts/nets by Node.js/React", ["at", "[github.com graph cuts nets]", "by Node.js React"]),
        ('<a href="kinetic-energy" class=x>dark matter</a>', ['[< a href = " kinetic energy " class = x >]', "dark matter", "[< a >]"]),
        ("a <!-- b --> c <script>d</script> e", ["a", "[< ! b >]", "c", "[< script > d < script >]", "e"]),
        ("if a <b and c> d, x < y > z", ["if a < b and c > d , x < y > z"]),
        ("CHAIR: graph\n\nSpeaker 2 (laughs): yes\nCHAIR: cuts", ["[CHAIR :]", "graph", "Speaker 2 ( laughs ) :", "yes", "[CHAIR :]", "cuts"]),
        ("[10:02] Jo: pool\n[10:03] Jo: leak", ["[ 10 : 02", "]", "[Jo :]", "pool", "[ 10 : 03", "]", "[Jo :]", "leak"]),
        ("Graph Cuts: a review", ["Graph Cuts :", "a review"]),
        ("the cuts\n-- \nAda King\nOffice Manager\n\nP.S. nets", ["the cuts", "[Ada King Office Manager]", "P.S. nets"]),
        ("From: Ada King\nTo: B. C,\n  Jo D\nSubject: Graph cuts\n\nBy: nets", ["[From : Ada King To : B . C , Jo D]", "Subject :", "Graph cuts", "By :", "nets"]),
        ("To: the cuts\nAbstract: nets", ["To :", "the cuts", "Abstract :", "nets"]),
        ("SELECT a --\n--- cuts\n", ["SELECT a", "cuts"]),
        ("", []),
    ],
)  # fmt: skip
def test_units_of(text, expected):
    assert units_of(text) == expected


@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_a_signature_ends_at_a_blank_line_whatever_ends_a_line(end):
    lines = ["Dear Ann,", "", "the turbines turn.", "", "-- ", "John Smith", "Acme Laboratory", "", "A postscript."]
    words = split_words(end.join(lines))
    hidden = [word for word, unit in zip((word for word, _, _ in words), unit_numbers(words), strict=True) if unit < 0]
    assert [word for word in hidden if word.isalpha()] == ["John", "Smith", "Acme", "Laboratory"]


def test_words_without_their_text_are_one_unit():
    assert unit_numbers(["a", "b"]).tolist() == unit_numbers([("a", 0, 1), ("b", 3, 4)]).tolist() == [0, 0]


# ---- one function for decoding, the ranker, candidates and labels

PIECES = [
    "graph", "cuts", "C++", "C#", "Node.js", "R&D", "AT&T", ".NET", "F#", "TCP/IP", "3D-printed", "Bayes\u2019s", "\ufb01nance", "IT", "e.g.",
    ",", " - ", "-", "\n", "\n\n", "\n- ", "\t", "snake_case", "a@b.org", "<b>", "http://x.org/graph-cuts", "CHAIR:", "U.S. graph",
    "SARS-CoV-2", "k-cuts", "2,4-D", "CoV", "D",
]  # fmt: skip
pieces = st.lists(st.sampled_from(PIECES), min_size=1, max_size=14)


def read_labels(text, words, rows, tokenizer):
    """The probabilities (W, 3) of a model that is sure of the labels of the rows."""
    windows, read = encode_windows([text], [[span for _, *span in words]], tokenizer), WordProbabilities([len(words)])
    for window, labels in zip(windows, rows["labels"], strict=True):
        read.add(window, np.eye(3)[np.maximum(labels, 0)])
    return read.document(0)


@settings(max_examples=300, deadline=None)
@given(pieces, st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map(" ".join), max_size=5))
@example(["C++", "C", "C#", "Node.js", ".NET", "R&D", "AT&T", "TCP/IP", "3D-printed"], ["C#", ".NET", "Node.js", "R&D"])
def test_perfect_labels_decode_to_the_phrases_that_coverage_counts(tiny_tokenizer, parts, keyphrases):
    text = clean(" ".join(parts))
    rows, words = tokenize_documents({"text": [text], "keyphrases": [keyphrases]}, tiny_tokenizer), split_words(text)
    found = rank_phrases(text, words, read_labels(text, words, rows, tiny_tokenizer))
    gold = [tuple(map(stem, split_phrase(phrase))) for phrase in keyphrases]
    returned = {tuple(map(stem, split_phrase(phrase["keyphrase"]))) for phrase in found}
    assert returned <= set(gold)
    assert sum(rows["num_present"]) == sum(phrase in returned for phrase in gold)


TERMS = "C++ C# F# Node.js ASP.NET .NET R&D AT&T TCP/IP 3D-printed 2,4-D SARS-CoV-2 IL-6 COVID-19 5-HT Ca2+ \u03b1-synuclein"
TERMS += " H2O2 k-means CI/CD ext4 U.S."


@pytest.mark.parametrize("term", [*TERMS.split(), "3D U-Net"])
def test_a_term_with_signs_is_returned_whole(tiny_tokenizer, term):
    text = f"we use {term} in the lab, not C"
    rows, words = tokenize_documents({"text": [text], "keyphrases": [[term]]}, tiny_tokenizer), split_words(text)
    (found,) = rank_phrases(text, words, read_labels(text, words, rows, tiny_tokenizer))
    assert (found["keyphrase"], text[found["start"] : found["end"]]) == (term, term)
    assert rows["num_present"] == rows["num_keyphrases"] == [1]


def test_phrases_that_decoding_drops_are_not_covered(tiny_tokenizer):
    batch = {
        "text": ["an i.e. graph; graph cut of snake_case, k-means"],
        "keyphrases": [["i.e.", "snake_case", "graph", "graph cut", "means"]],
    }
    rows = tokenize_documents(batch, tiny_tokenizer)
    assert (sum(rows["num_keyphrases"]), sum(rows["num_present"])) == (5, 2)


@settings(max_examples=200, deadline=None)
@given(pieces, st.randoms())
def test_no_phrase_is_of_two_units(parts, random):
    text = clean(" ".join(parts))
    words, units = split_words(text), unit_numbers(split_words(text))
    p = np.random.default_rng(random.getrandbits(32)).dirichlet([1, 1, 1], size=len(words)).reshape(-1, 3)
    (ranked,) = find_phrases([(words, p)])
    spans = [*ranked.spans.tolist()]
    starts, ends = {start: i for i, (_, start, _) in enumerate(words)}, {end: i for i, (_, _, end) in enumerate(words)}
    mentions = [mention for phrase in rank_phrases(text, words, p) for mention in phrase["mentions"]]
    spans += [(starts[mention["start"]], ends[mention["end"]] + 1) for mention in mentions]
    candidates = {" ".join(part.strip().split()): None for part in parts}
    candidates = [part for part in candidates if split_phrase(part) and not set("/@<") & set(part)]
    candidates = {normalise(part): part for part in [*candidates, *map(" ".join, pairwise(candidates))]}
    spans += [span for of in CandidateSet(list(candidates.values())).find(words).values() for span in of]
    spans += [span for of in find_keyphrases(words, list(candidates.values())) for span in of]
    assert all(in_one_unit(units, *span) for span in spans)


def test_a_label_that_continues_over_a_boundary_is_two_phrases():
    text = "neural network\n\nGraph cuts"
    found = rank_phrases(text, split_words(text), np.array([[0, 1, 0], [0, 0, 1], [0, 0.1, 0.9], [0, 0, 1.0]]))
    assert [(phrase["keyphrase"], phrase["score"]) for phrase in found] == [("neural network", 1), ("Graph cuts", 1)]


@pytest.mark.parametrize("part", ["<script>", "<STYLE a=b>", "<!-- a "])
def test_elements_without_an_end_take_linear_time(part):
    text = part * 40_000
    start = time.process_time()
    spans = hidden_spans(text + "graph <b>cut</b>")
    assert time.process_time() - start < 2  # a quarter of a second; quadratic: minutes
    assert spans[-2:] == [(len(text) + 6, len(text) + 9), (len(text) + 12, len(text) + 16)]


@pytest.mark.parametrize(
    "ruler", ["." * 20_000, "-" * 50_000, "- " * 5000, "=-" * 5000, "_" * 20_000, "\u2550" * 9000, ". . \n" * 4000]
)
def test_a_ruler_costs_nothing(tiny_tokenizer, ruler):
    """The model reads as many windows as without it, and at most three sub-tokens and words more."""
    text = clean(f"graph {ruler} cuts")
    words = split_words(text)
    (window,) = encode_windows([text], [[span for _, *span in words]], tiny_tokenizer)
    assert len(words) <= 5 and len(window.word_starts) <= 2 + 5
    assert units_of(text)[-1].split()[-1] == "cuts" and find_keyphrases(words, ["graph cuts"]) == [[]]


SIGNS = ["<a ", "a@", "@ ", "https://a ", "<!--", "a.com/", "a=b ", "<a b=", "\t", "- ", "1. ", "\n", "C&", "&a", "x+"]


@pytest.mark.parametrize("sign", [*SIGNS, "A: ", "A: a\n", "A a: b\n", "```\n", "--\na\n", "From: a\n"])
def test_the_time_is_in_proportion_to_the_text(sign):
    unit_numbers(split_words(clean(sign)))
    start = time.process_time()
    unit_numbers(split_words(clean(sign * 50_000)))
    assert time.process_time() - start < 5
