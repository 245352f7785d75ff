"""Terms in their contexts, also in another form, and the window of a long context around them."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from modeling_lexicon import terms_lexicon
from modeling_lexicon.terms_lexicon import find_term, may_occur, says_nothing, truncate_context_around


@pytest.mark.parametrize(
    "term, context, found",
    [
        ("primary", "Closed primaries, then a primary.", "primary"),  # the word itself first
        ("closed primary", "They hold closed primaries.", "closed primaries"),
        ("advance", "We are advancing.", "advancing"),
        ("primary election", "Two primary elections", "primary elections"),
        ("stop", "It stopped.", "stopped"),
        ("care", "A car", None),
        ("cat", "A catalogue of dogs", None),
        ("to", "nowhere at all", None),
        ("ice-cream", "Two ice creams", "ice creams"),
        ("e-mail", "Send emails.", "emails"),
        ("website", "Our web site is down.", "web site"),
        ("U.S.", "the US economy", "US"),
        ("a dog", "The dog barked.", "dog"),
        ("café", "A cafe is shut.", "cafe"),
        ("CO2", "Less CO₂, please.", "CO₂"),
        ("neural network", "deep neural net-\nworks", "neural net-\nworks"),
        ("C++", "Neither C nor C++.", "C++"),
        ("Acme, Inc.", "That is “Acme Inc”", "Acme Inc"),
        ("*rose*", "Two ‘roses’ —", "roses"),
        ("…", "And then … —", "…"),
        ("नदी", "नदे", None),
    ],
)
def test_a_term_is_found_in_its_context_in_another_form(term, context, found):
    place = find_term(term, context)
    assert (place and context[slice(*place)]) == found


@pytest.mark.parametrize(
    "term, context, found", [("go", "They went.", "went"), ("break the ice", "He broke the ice!", "broke the ice")]
)
def test_irregular_forms_are_found_by_a_lemmatizer_and_possible_without_one(term, context, found, monkeypatch):
    monkeypatch.setattr(terms_lexicon, "find_lemmas", lambda: None)
    assert find_term(term, context) is None
    assert may_occur(term, context) and not may_occur("art", "The party started late.")
    lemmas = {"mice": {"NOUN": ("mouse",)}, "went": {"VERB": ("go",)}, "broke": {"ADJ": ("broke",), "VERB": ("break",)}}
    monkeypatch.setattr(terms_lexicon, "find_lemmas", lambda: lambda word: lemmas.get(word, {}))
    assert context[slice(*find_term(term, context))] == found and may_occur(term, context)
    assert not may_occur("moose", "The mice ate.") and not may_occur("…", "none")


def test_a_lemmatizer_knows_which_endings_are_those_of_a_word(monkeypatch):
    known = {"car": {"NOUN": ("car",)}, "cars": {"NOUN": ("car",)}, "cares": {"VERB": ("care",)}}
    monkeypatch.setattr(terms_lexicon, "find_lemmas", lambda: lambda word: known.get(word, {}))
    assert may_occur("car", "Two cars") and not may_occur("car", "She cares.") and may_occur("blog", "He blogged.")


@pytest.mark.parametrize(
    "term, empty, full",
    [
        ("sheep", "a sheep.", "a kind of sheep"), ("buffalo", "A buffalo is a buffalo.", "a big buffalo"), ("銀行", "銀行。", "銀行の人"),
        ("recursion", "the process of recursion.", "the process of a call"), ("to run", "The act of “run”", "the state"),
    ],
)  # fmt: skip
def test_a_term_and_the_words_around_it_are_no_definition(term, empty, full):
    assert says_nothing(empty, term) and not says_nothing(full, term)


def test_a_long_context_is_truncated_around_the_term():
    def words(count):
        return lambda text: len(text.split()) <= count

    assert truncate_context_around("axe", "a b c axe d e", words(3)) == "c axe d"
    assert truncate_context_around("axe", "a b", lambda text: False) is None
    assert truncate_context_around("to chop", "a b c chopped d e", words(4)) == "c chopped d"
    assert truncate_context_around("axe", "longer words than this", lambda text: len(text) <= 14) == "longer words"


WRITTEN = [
    ("bank", "bank"), ("U.S.", "U.S."), ("U.S.", "(U.S.,"), (".NET", ".net"), ("Acme, Inc.", "Acme, Inc."),
    ("Acme Inc", "Acme, Inc."), ("bank", "“bank”"), ("“bank”", "bank"), ("bank", "*bank*"), ("*bank*", "bank"),
    ("bank", "river/bank"), ("bank", "bank—of"), ("bank", "l’bank’"), ("C++", "C++."), ("…", "…"), ("Straße", "x/STRASSE!"),
    ("to  prune", "pruned,"), ("नदी", "नदी।"), ("銀行", "銀行"), ("銀行", "“銀行”の"),
]  # fmt: skip
FILLER = {" ": "wxyz ßİ.—", "": "河岸にある。"}


@given(st.sampled_from(WRITTEN), st.sampled_from(list(FILLER)), st.data())
@settings(max_examples=40, deadline=None)
def test_a_truncated_context_has_its_term(pair, space, data):
    term, written = pair
    before, after = (space.join(data.draw(st.text(FILLER[space], min_size=50, max_size=300)).split()) for _ in "ab")
    context = f"{before}{space}{written}{space}{after}"
    assume(find_term(term, context) is not None or space == " ")
    limit = data.draw(st.integers(len(written), 49))
    window = truncate_context_around(term, context, lambda text: len(text) <= limit)
    assert find_term(term, window) and len(window) <= limit and window in " ".join(context.split())
