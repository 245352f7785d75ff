"""Candidates and vocabularies: which mentions are found, how they are scored, and what is refused."""

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import pipeline
from typer.testing import CliRunner

from keyphrase_tools.labels import find_keyphrases
from lexperts.cli.keyphrases import app
from lexperts_lite import clean_text
from lexperts_lite.candidates import CandidateSet, _without_overlaps, read_candidates
from lexperts_lite.decoding import apply_temperature
from lexperts_lite.words import split_words, stem
from tests.corpora import as_written, extract_file, lines, write_jsonl
from tests.keyphrase_tools.known_answers import TEXT, names, random_text

ABSENT = {"score": None, "start": None, "end": None, "mentions": []}


# ---- scores and mentions


def test_every_candidate_is_reported_with_the_score_of_its_best_mention(extract):
    candidates = ["energy problem", "quantum", "graph", "deep networks"]
    answer = extract(TEXT, candidates=candidates)
    ((words, p),) = extract.read_words([TEXT])
    place = {word.lower(): i for i, (word, _, _) in reversed(list(enumerate(words)))}
    graphs = [i for i, (word, _, _) in enumerate(words) if word.lower() == "graph"]
    expected = {
        "energy problem": (p[place["energy"], 1] + p[place["problems"], 2]) / 2,
        "deep networks": (p[place["deep"], 1] + p[place["networks"], 2]) / 2,
        "graph": max(p[i, 1] for i in graphs),
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
        known = found[candidate["keyphrase"]]
        same = {(m["start"], m["end"]): m["score"] for m in candidate["mentions"]}
        assert {(m["start"], m["end"]): m["score"] for m in known["mentions"]}.items() <= same.items()


def test_a_candidate_that_the_model_labels_o_is_scored_too(lookup):
    answer = lookup()("x bx c", candidates=["c", "bx"])
    assert names(lookup()("x bx c")) == ["bx"] == names(answer)[:1]
    p_b = 1 / (np.exp(3) + 2)
    assert answer[1]["keyphrase"] == "c" and answer[1]["score"] == pytest.approx(p_b, abs=1e-6)


def test_scores_are_at_the_models_temperature(lookup):
    plain, scaled = lookup(), lookup()
    scaled.model.config.keyphrase_temperature = 2.5
    (one,), (other,) = (extract("x bx c", candidates=["c"]) for extract in (plain, scaled))
    assert other["score"] == pytest.approx(float(apply_temperature(np.array(one["score"]), 2.5)), abs=1e-5)
    assert other["score"] != one["score"]


def test_a_vocabulary_counts_the_mentions_of_synonyms_under_the_name(lookup):
    text = "the graph cut, or b min-cut; networks."
    vocabulary = {"Graph Cuts": ["min cut", "absent form"], "network": None, "D0123": ["lattice"]}
    answer = lookup()(text, candidates=vocabulary)
    by_name = {c["keyphrase"]: c for c in answer}
    assert set(by_name) == set(vocabulary) and answer[-1] == {"keyphrase": "D0123", **ABSENT}
    assert [text[m["start"] : m["end"]] for m in by_name["Graph Cuts"]["mentions"]] == ["graph cut", "min-cut"]
    assert [text[m["start"] : m["end"]] for m in by_name["network"]["mentions"]] == ["networks"]
    assert by_name["Graph Cuts"]["score"] == max(m["score"] for m in by_name["Graph Cuts"]["mentions"])


def test_of_overlapping_mentions_of_one_name_the_longest_counts(lookup):
    text = "graph cut of graph, a a a"
    answer = lookup()(text, candidates={"graph cut": ["graph", "cut"], "a a": []})
    found = {c["keyphrase"]: [text[m["start"] : m["end"]] for m in c["mentions"]] for c in answer}
    assert found == {"graph cut": ["graph cut", "graph"], "a a": ["a a"]}
    both = lookup()(text, candidates=["graph", "graph cut"])
    assert [len(c["mentions"]) for c in sorted(both, key=lambda c: c["keyphrase"])] == [1, 1]


CASES = [
    ("IT and it, Its", ["IT"], {}, {"IT": ["IT"]}),
    ("IT and it", ["IT"], {"match_case": False}, {"IT": ["IT", "it"]}),
    ("IT and it", ["IT", "it"], {}, {"IT": ["IT"], "it": ["IT", "it"]}),
    ("Apple and apples, Apple's", ["Apple"], {}, {"Apple": ["Apple", "apples", "Apple's"]}),
    ("Apple and apples, Apple's", ["Apple"], {"match_case": True}, {"Apple": ["Apple", "Apple's"]}),
    ("python, Python and PYTHON", {"Python": ["python"]}, {"match_case": True}, {"Python": ["python", "Python"]}),
    ("python, Python and PYTHON", {"Python": ["python"]}, {}, {"Python": ["python", "Python", "PYTHON"]}),
    ("GANs, gans; a TCP/IP, tcp/ip", ["GAN", "TCP/IP"], {}, {"GAN": ["GANs"], "TCP/IP": ["TCP/IP", "tcp/ip"]}),
    ("C, C++ and C#; c", ["C", "C++", "C#"], {}, {"C": ["C"], "C++": ["C++"], "C#": ["C#"]}),
    ("R, R-CNN; COVID-19, 2,4-D", ["R", "COVID", "D", "19", "2,4-D"], {}, {"R": ["R"], "COVID": ["COVID"], "2,4-D": ["2,4-D"]}),
    ("Alzheimer\u2019s disease", ["Alzheimer's disease"], {}, {"Alzheimer's disease": ["Alzheimer\u2019s disease"]}),
    ("students' results, the students\u2019 grades", ["students results", "students' grades", "student"], {}, {"students results": ["students' results"], "students' grades": ["students\u2019 grades"]}),
    ("the \ufb01nancial \uff21\uff49 of CO\u2082", ["financial AI", "CO2"], {}, {"financial AI": ["\ufb01nancial \uff21\uff49"], "CO2": ["CO\u2082"]}),
    ('<a href="kinetic-energy">dark energy</a>', ["kinetic energy", "dark energy"], {}, {"dark energy": ["dark energy"]}),
    ("a http://x.org/graph-cut graph", ["graph", "http://x.org/graph-cut"], {}, {"graph": ["graph"], "http://x.org/graph-cut": ["http://x.org/graph-cut"]}),
    ("graph\n\ncut - graph\ncut", ["graph cut"], {}, {"graph cut": ["graph\ncut"]}),
]  # fmt: skip


@pytest.mark.parametrize("text, candidates, options, expected", CASES)
def test_a_mention_is_of_equal_words_and_case_in_one_unit_of_layout(text, candidates, options, expected):
    source = clean_text.CleanText(text)
    words = split_words(source.text)
    found = CandidateSet(candidates).find(words, **options)
    spans = {name: [(words[a][1], words[b - 1][2]) for a, b in spans] for name, spans in found.items()}
    assert {n: [text[slice(*source.source_span(*s))] for s in of] for n, of in spans.items()} == expected


def test_candidates_with_equal_stems_share_their_mentions(lookup):
    one, other = lookup()("the graph cuts", candidates=["graph cut", "graph cuts"])
    assert one["mentions"] == other["mentions"] != []


def test_mentions_are_found_in_title_and_text_but_not_across(lookup):
    document = {"title": " Graph cuts", "text": "cuts of a\ngraph. x"}
    answer = lookup()(document, candidates=["graph", "cut", "cuts. cuts", "learning"])
    by_name = {c["keyphrase"]: c for c in answer}
    assert [m["field"] for m in by_name["graph"]["mentions"]] == ["title", "text"]
    for c in answer[:2]:
        for m in c["mentions"]:
            assert c["keyphrase"] in document[m["field"]][m["start"] : m["end"]].lower()
    assert by_name["cuts. cuts"] == {"keyphrase": "cuts. cuts", "field": None, **ABSENT}
    assert by_name["learning"]["field"] is None


def test_a_list_of_words_matches_whole_words_only(lookup):
    words = ["x", "b-i", "ix", "b", "C++", ""]
    assert lookup()(["graph", "in", ".NET", ""], candidates=["graph"], is_split_into_words=True)[0]["end"] == 5
    answer = lookup()(words, candidates=["b", "i", "b i ix", "c++"], is_split_into_words=True)
    found = {c["keyphrase"]: [(m["start"], m["end"]) for m in c["mentions"]] for c in answer}
    assert found == {"b": [(9, 10)], "i": [], "b i ix": [(2, 8)], "c++": [(11, 14)]}


def test_a_text_from_a_pdf_is_matched_after_cleaning(lookup):
    text = "x bat-\nteries &amp; gra\u00adphs"
    answer = lookup()(text, candidates=["battery", "graph"])
    assert sorted(text[c["start"] : c["end"]] for c in answer) == ["bat-\nteries", "gra\u00adphs"]


def test_in_long_documents_each_mention_is_scored_where_it_is_read(lookup):
    text = "x " * 150 + "bx " + "c " * 100 + "b"
    answer = lookup()(text, candidates=["bx", "b"])
    assert [(c["keyphrase"], c["start"]) for c in answer] == [("bx", 300), ("b", 503)]
    assert answer[0]["score"] == answer[1]["score"] > 0.99
    cut = lookup()(text, candidates=["bx", "x", "b"], on_long="truncate")
    assert [c["keyphrase"] for c in cut] == ["x", "bx", "b"] and [c["score"] for c in cut[1:]] == [None, None]
    assert 1 < len(cut[0]["mentions"]) < 63


def test_top_k_and_min_score_choose_among_candidates(lookup):
    text, candidates = "x bx c p", ["zz", "c", "p", "bx"]
    everything = lookup()(text, candidates=candidates)
    assert names(everything) == ["bx", "p", "c", "zz"]
    assert lookup()(text, candidates=candidates, top_k=2) == everything[:2]
    assert lookup()(text, candidates=candidates, min_score=0.5) == everything[:2]
    many = lookup()(text, candidates=[f"z{i}" for i in range(30)])
    assert len(many) == 30  # the default of ten is for extraction
    assert lookup(candidates=candidates)(text) == everything
    assert names(lookup(candidates=candidates)(text, candidates=None)) == ["bx", "p"]


def test_without_candidates_nothing_changes(extract):
    texts = [TEXT, random_text(50)]
    plain = extract(texts)
    extract(texts, candidates=["graph"])
    assert extract(texts) == extract(texts, candidates=None) == plain


# ---- one list for all, or one per document


def test_one_list_per_document(lookup):
    texts = ["x bx", "c p", "bx"]
    own = [["bx"], {"pair": ["c p"]}, []]
    answers = lookup()(texts, candidates=own)
    assert [names(answer) for answer in answers] == [["bx"], ["pair"], []]
    assert list(lookup()(iter(texts), candidates=own)) == answers
    shared = lookup()(texts, candidates=["bx"])
    assert [[c["score"] is None for c in answer] for answer in shared] == [[False], [True], [False]]


def test_lists_of_documents_stay_with_them_in_any_block_and_batch(lookup):
    texts = [f"x{'x' * (i % 7)} b{chr(97 + i % 20)}" for i in range(150)]
    own = [[f"b{chr(97 + i % 20)}"] for i in range(150)]
    answers = lookup()(texts, candidates=own, batch_size=2)
    assert [names(answer) for answer in answers] == own and all(answer[0]["mentions"] for answer in answers)


# ---- what is refused


@pytest.mark.parametrize(
    "candidates, error, message",
    [
        ("graph", TypeError, "candidates must be a list or a mapping, got a str"),
        (5, TypeError, "got a int"),
        ({"graph": "cut"}, TypeError, r"candidates\['graph'\] must be a list of phrases, got a str: 'cut'"),
        (["graph", 5], TypeError, "candidates must be a list of strings, got a int in it: 5"),
        (["graph", ["cut"]], TypeError, r"got a list in it: \['cut'\]"),
        ({5: []}, TypeError, "got a int in it: 5"),
        ([], ValueError, "candidates is empty, but there is one document"),
        ({}, ValueError, "candidates is empty"),
        ([""], ValueError, "candidates has the empty phrase ''"),
        (["graph", " - "], ValueError, "candidates has the empty phrase ' - '"),
        ({"graph": [" "]}, ValueError, "candidates has the empty phrase ' '"),
        (["a", "a"], ValueError, "candidates has .a. twice"),
        (["graph", "Graph"], ValueError, "candidates has 'Graph' twice: for 'graph' and for 'Graph'"),
        (["semi-supervised", "semi supervised"], ValueError, "'semi supervised' twice"),
        ({"a": ["b"], "c": ["b"]}, ValueError, "candidates has 'b' twice: for 'a' and for 'c'"),
        (["x " * 80], ValueError, r"The candidate 'x x .*' has 80 sub-tokens, but a window of max_length=64 has room for 62"),
        ([["x"]], ValueError, "candidates has 1 lists, but there is one document"),
    ],
)  # fmt: skip
def test_candidates_that_cannot_be_scored_are_named(lookup, candidates, error, message):
    with pytest.raises(error, match=message):
        lookup()("x bx", candidates=candidates)


def test_the_number_of_lists_is_that_of_the_documents(lookup):
    with pytest.raises(ValueError, match="candidates has 1 lists for 2 documents"):
        lookup()(["x", "c"], candidates=[["x"]])
    with pytest.raises(ValueError, match="candidates has 1 lists, but none for document 1"):
        list(lookup()(iter(["x", "c"]), candidates=[["x"]]))
    with pytest.raises(ValueError, match="candidates has 3 lists for 2 documents"):
        list(lookup()(iter(["x", "c"]), candidates=[["x"]] * 3))
    with pytest.raises(ValueError, match=r"candidates\[1\] has the empty phrase ''"):
        lookup()(["x", "c"], candidates=[["x"], [""]])
    assert lookup()([], candidates=[]) == []


def test_a_threshold_has_no_effect_on_candidates(lookup):
    with pytest.raises(ValueError, match="threshold=0.5 has no effect on candidates"):
        lookup()("x", candidates=["x"], threshold=0.5)
    assert names(lookup(threshold=0.5)("x", candidates=["x"])) == ["x"]  # the pipeline's default for extraction


def test_a_longer_window_has_room_for_a_longer_candidate(lookup):
    text = "x " * 15 + "b"
    with pytest.raises(ValueError, match="16.*max_length=12.*10"):
        lookup()(text, candidates=[text], max_length=12)
    assert lookup()(text, candidates=[text])[0]["end"] == len(text)


# ---- matching is that of labels.find_keyphrases


phrases = st.lists(
    st.sampled_from(["graph", "Cuts", "cut", "b-i", "802.11", "é", "学", "習", "!"]), min_size=1, max_size=3
)


@settings(max_examples=150, deadline=None)
@given(st.lists(phrases, max_size=12), st.lists(phrases.map(" ".join), min_size=1, max_size=4))
def test_mentions_are_those_that_labels_find(parts, candidates):
    words = split_words(" ".join(" ".join(part) for part in parts))
    unique = list({" ".join(w.lower() for w, _, _ in split_words(c)): c for c in candidates}.values())
    found, labelled = CandidateSet(unique).find(words), find_keyphrases(words, unique)
    kept = [span for spans in found.values() for span in spans]
    for candidate, spans in zip(unique, labelled, strict=True):
        mine = found.get(candidate, [])
        assert set(mine) <= set(spans)
        assert all(a[1] <= b[0] for a, b in zip(mine, mine[1:], strict=False))
        for start, end in set(spans) - set(mine):  # overlaps another mention of its own, or is inside a longer one
            assert any(a < end and start < b for a, b in mine) or any(a <= start and end <= b for a, b in kept)


def find_by_comparing_all(words, synonyms):
    """The plain version of `CandidateSet.find` for words of one part: each phrase is compared at each word."""
    stems, found = [stem(word) for word, _, _ in words], {}
    phrases = [(name, [stem(word) for word, _, _ in split_words(p)]) for name, own in synonyms.items() for p in own]
    for start in range(len(stems)):
        for name, phrase in phrases:
            if stems[start : start + len(phrase)] == phrase:
                found.setdefault(name, []).append((start, start + len(phrase)))
    kept = {name: _without_overlaps(spans) for name, spans in found.items()}
    every = [span for spans in kept.values() for span in spans]
    outer = {
        name: [s for s in spans if not any(o != s and o[0] <= s[0] and s[1] <= o[1] for o in every)]
        for name, spans in kept.items()
    }
    return {name: spans for name, spans in outer.items() if spans}


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from("abc"), max_size=12),
    st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=3), min_size=1, max_size=6, unique_by=tuple),
)
def test_mentions_are_those_of_comparing_all_phrases_in_the_same_order(text, phrases):
    synonyms = {f"name{i // 2}": [" ".join(p) for p in phrases[i : i + 2]] for i in range(0, len(phrases), 2)}
    vocabulary = CandidateSet(synonyms)
    words = split_words(" ".join(text))
    own = {name: [name, *phrases] for name, phrases in synonyms.items()}
    found, plain = vocabulary.find(words), find_by_comparing_all(words, own)
    assert list(found.items()) == list(plain.items())


def test_accents_may_be_composed_or_not():
    words = split_words(clean_text.clean("cafe\u0301 cre\u0300me"))
    assert CandidateSet(["café crème"]).find(words) == {"café crème": [(0, 2)]}


# ---- corpora and the command


def test_candidates_that_do_not_occur_are_rows_without_a_place(lookup, tmp_path):
    source, output = write_jsonl(tmp_path / "texts.jsonl", [{"text": "x bx"}, {"text": "c"}]), tmp_path / "out.jsonl"
    extract_file(lookup(), source, output, candidates=["x", "bx"])
    first, last = lines(output)
    assert names(first["keyphrases"]) == ["bx", "x"]
    absent = {"score": None, "start": None, "end": None, "field": None}
    assert last["keyphrases"] == [{"keyphrase": "x", **absent}, {"keyphrase": "bx", **absent}]


def test_a_file_of_candidates(tmp_path):
    path = tmp_path / "vocabulary.txt"
    path.write_text("\ufeffgraph cut\tmin cut\t\n\n  energy \n", encoding="utf-8")
    assert read_candidates(path) == {"graph cut": ["min cut"], "energy": []}
    for content, message in (
        ("a\na\tb", "two lines for 'a'"),
        ("\n \n", "has no candidates"),
        ("a\tb\nb", "'b' twice"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_candidates(path)


def test_the_command_scores_a_file_of_candidates(sharp_seke, tiny_tokenizer, tmp_path):
    for part in (sharp_seke(), tiny_tokenizer):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    (tmp_path / "names.txt").write_text("network\tdeep networks\nquantum\nproblems\tenergy Problems\n")
    arguments = [
        "extract",
        tmp_path / "texts.jsonl",
        tmp_path / "out.jsonl",
        "--model",
        tmp_path / "model",
        *("--mentions", "--top-k", "2"),
    ]
    done = CliRunner().invoke(app, [*map(str, arguments), "--candidates", str(tmp_path / "names.txt")])
    assert done.exit_code == 0, done.output
    other = CliRunner().invoke(app, list(map(str, arguments)))
    assert other.exit_code == 2 and "candidates='names.txt" in other.stderr
    (row,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    extract = pipeline("keyphrase-extraction", model=str(tmp_path / "model"))
    candidates = {"network": ["deep networks"], "quantum": [], "problems": ["energy Problems"]}
    expected = extract(TEXT, candidates=candidates, top_k=2)
    assert expected != extract(TEXT, candidates=candidates)
    assert row["keyphrases"] == as_written(expected, mentions=True)


def test_a_corpus_reads_its_candidates_once(lookup, tmp_path, monkeypatch):
    source, read, plain = tmp_path / "texts.jsonl", [], CandidateSet.__init__
    source.write_text("".join(json.dumps({"text": f"bx {i}"}) + "\n" for i in range(100)))

    def counted(self, *args):
        read.append(args)
        plain(self, *args)

    monkeypatch.setattr(CandidateSet, "__init__", counted)
    extract_file(lookup(), source, tmp_path / "out.jsonl", batch_size=2, candidates=["bx"])
    assert len(read) == 1


def test_many_candidates_that_begin_alike_are_found_in_time_in_proportion_to_the_text():
    vocabulary = CandidateSet([f"graph b{i}" for i in range(20_000)] + ["graph", "graph graph"])
    words = split_words("graph " * 10_000)
    vocabulary.find(words[:2])
    start = time.process_time()
    found = vocabulary.find(words)
    assert time.process_time() - start < 5
    assert {name: len(spans) for name, spans in found.items()} == {"graph graph": 5000}
