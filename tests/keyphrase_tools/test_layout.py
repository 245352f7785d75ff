"""May a phrase cross here: where texts are divided, what is hidden, what is a term; and that decoding, candidates, the ranker and labels
agree on them."""

import textwrap
import time
from bisect import bisect_left
from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keyphrase_tools.labels import find_keyphrases, tokenize_documents
from lexperts_lite import extract_keyphrases
from lexperts_lite.candidates import Candidates
from lexperts_lite.clean import clean
from lexperts_lite.features import find_phrases
from lexperts_lite.layout import continued_words, in_one_unit, is_whole, unit_numbers
from lexperts_lite.ranking import rank_phrases
from lexperts_lite.windows import WordProbabilities, encode_windows
from lexperts_lite.words import normalise, split_phrase, split_words, stem

WRAPPED = "In this paper we present a scalable method for discovering web\nservices that are\nannotated with the terms of an ontology of graph\ncuts"

PROSE = "we show that the graph cuts of a large network are found in the time that is needed to read it and that the cuts of small networks"


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
        ("export PATH=/usr/bin:~/go/bin in ./configure.sh or C:\\a\\b, and/or TCP/IP /x", [
            "export PATH =", "[usr bin]", ":", "[~ go bin]", "in", "[. configure . sh]", "or", "[C : \\ a \\ b ,]", "and or TCP IP x"]),
        ("at github.com/graph-cuts/nets by Node.js/React", ["at", "[github.com graph cuts nets]", "by Node.js React"]),
        ("in src/main/App.java by \\\\files\\public of TCP/IP, mg/kg/day.", [
            "in", "[src main App . java]", "by", "[\\ \\ files \\ public]", "of TCP IP , mg kg day ."]),
        ('<a href="kinetic-energy" class=x>dark matter</a>', ['[< a href = " kinetic energy " class = x >]', "dark matter", "[< a >]"]),
        ("a <!-- b --> c <script>d</script> e", ["a", "[< ! b >]", "c", "[< script > d < script >]", "e"]),
        ("if a <b and c> d, x < y > z", ["if a < b and c > d , x < y > z"]),
        ("CHAIR: graph\n\nSpeaker 2 (laughs): yes\nCHAIR: cuts", ["[CHAIR :]", "graph", "Speaker 2 ( laughs ) :", "yes", "[CHAIR :]", "cuts"]),
        ("Graph Cuts: a review", ["Graph Cuts :", "a review"]),
        ("the cuts\n-- \nAda King\nOffice Manager\n\nP.S. nets", ["the cuts", "[Ada King Office Manager]", "P.S. nets"]),
        ("From: Ada King\nTo: B. C,\n  Jo D\nSubject: Graph cuts\n\nBy: nets", ["[From : Ada King To : B . C , Jo D]", "Subject :", "Graph cuts", "By :", "nets"]),
        ("To: the cuts\nAbstract: nets", ["To :", "the cuts", "Abstract :", "nets"]),
        ("SELECT a --\n--- cuts\n", ["SELECT a", "cuts"]),
        ("<script>a <b>cut</b>", ["[< script >]", "a", "[< b >]", "cut", "[< b >]"]),  # without an end
        # found in texts that people sent: rows, marks of lists, symbols, senders
        ("name,age,city\nAnna,34,New York\nBen,41,San Francisco\n", ["name , age , city", "Anna , 34 , New York", "Ben , 41 , San Francisco"]),
        ("Anna, 34, New York\nBen, 41, San Jose", ["Anna , 34 , New York", "Ben , 41 , San Jose"]),
        ("SKILLS\nPython\nMachine learning\nSQL", ["SKILLS", "Python", "Machine learning", "SQL"]),
        ("Deep Learning for the Translation of Long Texts\nGraph Networks with Attention on Many Edges\nProtein Folding and its Many Applications", [
            "Deep Learning for the Translation of Long Texts", "Graph Networks with Attention on Many Edges", "Protein Folding and its Many Applications"]),
        ("\uf0b7 speech recognition\n\uf0d8 protein folding\n\u25cf graph cuts", ["speech recognition", "protein folding", "graph cuts"]),
        ("\u2013speech\n-protein\n\u2217cuts", ["speech", "protein", "cuts"]),
        ("\u2022the cuts of a graph with many nodes and few edges\n\u2022flows", ["\u2022", "the cuts of a graph with many nodes and few edges", "\u2022", "flows"]),
        ("graph\x0ccuts\x0bin nets", ["graph", "cuts", "in nets"]),
        ("12/03/24, 10:02 - Ada King: graph\n12/03/24, 10:04 - Jo: cuts", [
            "12 03 24 , 10 : 02", "[Ada King :]", "graph", "12 03 24 , 10 : 04", "[Jo :]", "cuts"]),
        ("Speaker 1: graph\nSpeaker 2: cuts", ["[Speaker 1 :]", "graph", "[Speaker 2 :]", "cuts"]),
        ("**Ada:** graph\n**Ada:** cuts", ["[* * Ada : * *]", "graph", "[* * Ada : * *]", "cuts"]),
        ("Ada (10:02): graph\nJo (10:03): cuts", ["[Ada ( 10 : 02 ) :]", "graph", "[Jo ( 10 : 03 ) :]", "cuts"]),
        ("Ada King @ 10:02: graph\nJo [10:03]: cuts", ["[Ada King @ 10 : 02 :]", "graph", "[Jo [ 10 : 03 ] :]", "cuts"]),
        ("[10:02] ada: graph\n[10:03] jo: cuts", ["[ 10 : 02", "]", "[ada :]", "graph", "[ 10 : 03", "]", "[jo :]", "cuts"]),
        ("- Ada King: graph\n- Ada King: cuts\n", ["[Ada King :]", "graph", "[Ada King :]", "cuts"]),
        ("**Ada**: graph\n**Ada**: cuts", ["[* * Ada * * :]", "graph", "[* * Ada * * :]", "cuts"]),
        ("\u0141ukasz: graph\n\u0141ukasz: cuts", ["[\u0141ukasz :]", "graph", "[\u0141ukasz :]", "cuts"]),
        ("Ada King  10:02 AM\ngraph\nJo \u2014 Today at 10:03\ncuts", ["[Ada King 10 : 02 AM]", "graph", "[Jo \u2014 Today at 10 : 03]", "cuts"]),
        ("User: graph\nAssistant: cuts", ["[User :]", "graph", "[Assistant :]", "cuts"]),
        ("<v Ada King>graph</v>", ["[< v Ada King >]", "graph", "[< v >]"]),
        ("cuts\n\nKind regards,\n\nAda King\nOffice Manager\n\nOn Tue, 12 Mar, Jo <j@x.org> wrote:\nnets", [
            "cuts", "[Kind regards , Ada King Office Manager On Tue , 12 Mar , Jo < j @ x.org > wrote :]", "nets"]),
        ("Learning for Image\nRecognition\n\n" + PROSE, ["Learning for Image Recognition", PROSE.replace("\n", " ")]),
        ("The European Central\nBank raised interest\nrates. German Finance\nMinister Christian\nLindner welcomed it.", [
            "The European Central Bank raised interest rates . German Finance Minister Christian Lindner welcomed it ."]),
        ("We compare lasso, ridge, and elastic net\nregression, random forests, and trees", [
            "We compare lasso , ridge , and elastic net regression , random forests , and trees"]),
        ("graph cuts \u2192 flows\nnets \u2192 trees", ["graph cuts", "flows", "nets", "trees"]),
        ("1- graph cuts\n2- flows\no nets\no trees", ["1", "graph cuts", "2", "flows", "o", "nets", "o", "trees"]),
    ],
)  # fmt: skip
def test_units_of(text, expected):
    assert units_of(text) == expected


TERM = ["graph", "cuts", "Python", "neural", "machine", "translation", "SQL", "protein", "folding", "New", "York"]
TERM = st.lists(st.sampled_from(TERM), min_size=1, max_size=3).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(TERM, min_size=3, max_size=9), st.sampled_from(["{}", "{} - how a {} works", "{},34,{}"]), st.randoms())
def test_the_order_of_the_lines_of_a_list_does_not_matter(terms, form, random):
    lines = [form.format(term, term) for term in terms]
    text = "\n".join(random.sample(lines, len(lines)))
    units = units_of(text)
    assert sorted(units) == sorted(unit for line in lines for unit in units_of(line)) and len(units) >= len(lines)
    phrases = extract_keyphrases(text, top_k=None, threshold=None)
    assert phrases and all(any(phrase["keyphrase"] in line for line in lines) for phrase in phrases)


@settings(max_examples=60, deadline=None)
@given(st.integers(20, 100), st.sampled_from(["\n", "\r\n", "\n  "]))
def test_wrapped_prose_is_one_unit(width, end):
    assert len(units_of(end.join(textwrap.wrap(PROSE, width)))) == 1


@pytest.mark.parametrize(
    "text, expected",
    [
        ("SARS-CoV-2, IL-6 and COVID-19", ["SARS~CoV~2", ",", "IL~6", "and", "COVID~19"]),
        ("2,4-D 5-HT GPT-3.5 10-year 3D-printed", ["2,4~D", "5~HT", "GPT~3.5", "10~year", "3D~printed"]),
        ("k-means, \u03b1-synuclein, 3D U-Net, T-cell", ["k~means", ",", "\u03b1~synuclein", ",", "3D", "U~Net", ",", "T~cell"]),
        ("RT-PCR MERS-CoV CRISPR-Cas9 BiLSTM-CRF", ["RT~PCR", "MERS~CoV", "CRISPR~Cas9", "BiLSTM~CRF"]),
        ("TCP/IP I/O CI/CD 9/11 HTTP/1.1", ["TCP~IP", "I~O", "CI~CD", "9~11", "HTTP~1.1"]),
        ("TGF-\u03b21 progression-free survival", ["TGF~\u03b21", "progression~free", "survival"]),
        ("vaccine-preventable diseases", ["vaccine~preventable", "diseases"]),
        ("semi-supervised, state-of-the-art, Coca-Cola", ["semi", "supervised", ",", "state", "of", "the", "art", ",", "Coca", "Cola"]),
        ("CPU/GPU and/or C/C++ GPU-based REAL-TIMES", ["CPU", "GPU", "and", "or", "C", "C++", "GPU", "based", "REAL", "TIMES"]),
        ("a - 2, a -2, pre- and 2", ["a", "2", ",", "a", "2", ",", "pre", "and", "2"]),
        ("k\n-means http://x.org/k-means", ["k", "means", "http", ":", "x.org", "k", "means"]),  # two lines; hidden
        ("\u5317\u4eac-\u4e0a\u6d77", list("\u5317\u4eac\u4e0a\u6d77")),
    ],
)  # fmt: skip
def test_terms_of(text, expected):
    words, joined = split_words(text), ""
    for (word, _, _), continues in zip(words, continued_words(words), strict=True):
        joined += ("~" if continues else " ") + word
    assert joined.split() == expected


PIECES = [
    "graph", "cuts", "C++", "C#", "Node.js", "R&D", "AT&T", ".NET", "F#", "TCP/IP", "3D-printed", "Bayes\u2019s", "\ufb01nance", "IT", "e.g.",
    ",", " - ", "-", "\n", "\n\n", "\n- ", "\t", "snake_case", "a@b.org", "<b>", "http://x.org/graph-cuts", "CHAIR:", "U.S. graph",
    "SARS-CoV-2", "k-cuts", "2,4-D", "CoV", "D", "ASP.NET", "IL-6", "COVID-19", "5-HT", "Ca2+", "\u03b1-synuclein", "H2O2", "CI/CD", "U-Net",
]  # fmt: skip
pieces = st.lists(st.sampled_from(PIECES), min_size=1, max_size=14)


def read_labels(text, words, rows, tokenizer):
    """The probabilities (W, 3) of a model that is sure of the labels of the rows."""
    windows, read = encode_windows([text], [[span for _, *span in words]], tokenizer), WordProbabilities([len(words)])
    for window, labels in zip(windows, rows["labels"], strict=True):
        read.add(window, np.eye(3)[np.maximum(labels, 0)])
    return read.document(0)


@settings(max_examples=60, deadline=None)
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


@settings(max_examples=60, deadline=None)
@given(pieces, st.randoms())
def test_no_phrase_is_of_two_units_or_a_part_of_a_term(parts, random):
    text = clean(" ".join(parts))
    words, units = split_words(text), unit_numbers(split_words(text))
    p = np.random.default_rng(random.getrandbits(32)).dirichlet([1, 1, 1], size=len(words)).reshape(-1, 3)
    (ranked,) = find_phrases([(words, p)])
    spans = [*ranked.spans.tolist()]
    starts = [start for _, start, _ in words]
    mentions = [mention for phrase in rank_phrases(text, words, p) for mention in phrase["mentions"]]
    spans += [(bisect_left(starts, mention["start"]), bisect_left(starts, mention["end"])) for mention in mentions]
    candidates = {" ".join(part.strip().split()): None for part in parts}
    candidates = [part for part in candidates if split_phrase(part) and not set("/@<") & set(part)]
    candidates = {normalise(part): part for part in [*candidates, *map(" ".join, pairwise(candidates))]}
    assert all(is_whole(continued_words(words), *span) for span in spans)
    spans += [span for of in Candidates([*candidates.values(), "x"]).find(words).values() for span in of]
    spans += [span for of in find_keyphrases(words, list(candidates.values())) for span in of]
    assert all(in_one_unit(units, *span) for span in spans)


def test_a_label_that_continues_over_a_boundary_is_two_phrases():
    text = "neural network\n\nGraph cuts"
    found = rank_phrases(text, split_words(text), np.array([[0, 1, 0], [0, 0, 1], [0, 0.1, 0.9], [0, 0, 1.0]]))
    assert [(phrase["keyphrase"], phrase["score"]) for phrase in found] == [("neural network", 1), ("Graph cuts", 1)]


@pytest.mark.parametrize("ruler", ["." * 20_000, "=-" * 5000, "_" * 20_000, "\u2550" * 9000, ". . \n" * 4000])
def test_a_ruler_costs_nothing(tiny_tokenizer, ruler):
    """The model reads as many windows as without it, and at most three sub-tokens and words more."""
    text = clean(f"graph {ruler} cuts")
    words = split_words(text)
    (window,) = encode_windows([text], [[span for _, *span in words]], tiny_tokenizer)
    assert len(words) <= 5 and len(window.word_starts) <= 2 + 5
    assert units_of(text)[-1].split()[-1] == "cuts" and find_keyphrases(words, ["graph cuts"]) == [[]]


SIGNS = [
    "<a ", "a@", "@ ", "https://a ", "<!--", "a.com/", "a=b ", "<a b=", "\t", "- ", "1. ", "\n", "C&", "&a", "x+", "<script>", "<!-- a ",
    "/a", "/a ", "~/", "a/", "_a ", "A 10:02\n", "Regards\n", "A: ", "A: a\n", "A a: b\n", "```\n", "--\na\n", "From: a\n",
]  # fmt: skip


@pytest.mark.parametrize("sign", SIGNS)
def test_the_time_is_in_proportion_to_the_text(sign):
    unit_numbers(split_words(clean(sign)))
    start = time.process_time()
    unit_numbers(split_words(clean(sign * 20_000)))
    assert time.process_time() - start < 3  # a quarter; quadratic: minutes
