"""Phrases and their features: against one document, one phrase and one mention after the other, and by hand."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lexperts_lite.clean import known_words
from lexperts_lite.decoding import B, I, O, begin_units, join_probabilities, mention_scores, tag_spans, word_tags
from lexperts_lite.features import FEATURES, LABEL_THRESHOLD, MAX_WORDS, MIN_PROBABILITY, find_phrases
from lexperts_lite.layout import continued_words, in_one_unit, is_whole, unit_numbers
from lexperts_lite.position_rank import position_ranks
from lexperts_lite.words import FUNCTION_WORDS, is_phrase, split_words, stem


def log_odds(p):
    return np.log((p + 1e-3) / (1 - p + 1e-3))


class Plain:
    """The plain version of `find_phrases` for one document: `phrases` has the spans and features of each."""

    def __init__(self, words, p, classes, language):
        self.words, self.units, self.continued = words, unit_numbers(words), continued_words(words)
        self.p = join_probabilities(begin_units(p, self.units), self.continued)
        self.other, self.noun = classes[:, 0], classes[:, 2]
        self.allowed = [is_phrase([word]) and unit >= 0 for (word, _, _), unit in zip(words, self.units, strict=True)]
        self.stems = [stem(word, language) for word, _, _ in words]
        self.functional = [language == "english" and self.is_function_word(i) for i in range(len(words))]
        counted = np.array(self.allowed, dtype=bool) & ~np.array(self.functional, dtype=bool)
        number, zeros = [sorted(set(self.stems)).index(stem) for stem in self.stems], np.zeros(len(words), dtype=int)
        self.ranks = position_ranks(np.array(number, dtype=int), zeros, np.arange(len(words)), counted)
        self.labelled = set(tag_spans(word_tags(self.p, LABEL_THRESHOLD), self.units))
        places = range(len(words))
        spans = [(a, b) for a in places for b in range(a + 1, a + 1 + MAX_WORDS) if self.may_be(a, b)]
        probable = {self.key(span) for span in spans if self.is_probable(*span)}
        of: dict = {
            key: [span for span in spans if self.key(span) == key] for key in map(self.key, spans) if key in probable
        }
        self.phrases = sorted(((own, self.features(own)) for own in of.values()), key=lambda phrase: phrase[0][0])

    def key(self, span):
        return tuple(self.stems[slice(*span)])

    def may_be(self, a, b):
        within = b <= len(self.words) and in_one_unit(self.units, a, b) and is_whole(self.continued, a, b)
        return within and all(self.allowed[a:b])

    def is_probable(self, a, b):
        return not all(self.functional[a:b]) and (
            self.span(a, b) >= MIN_PROBABILITY or self.is_longest_noun_phrase(a, b)
        )

    def is_function_word(self, i):
        """Whether a word is an article, a preposition, a pronoun or the like, and not an acronym such as "IT"."""
        word = self.words[i][0]
        beside = [self.words[j][0] for j in (i - 1, i + 1) if self.beside(i, j)]
        beside = [other for other in beside if is_phrase([other])]
        acronym = word.isupper() and len(word) > 1 and not (beside and all(other.isupper() for other in beside))
        return word.lower() in FUNCTION_WORDS and not acronym

    def beside(self, i, j):
        """Whether word j is in the unit of word i."""
        return 0 <= j < len(self.words) and self.units[j] == self.units[i]

    def span(self, a, b):
        """p(B) p(I) ..., a term is labelled at once, and not p(I) of the word after."""
        p = self.p[a, B] * np.prod([1 if self.continued[i] else self.p[i, I] for i in range(a + 1, b)])
        return p * (1 - (self.p[b, I] if self.beside(a, b) else 0))

    def is_longest_noun_phrase(self, a, b):
        def inside(i):
            return (
                self.beside(a, i)
                and self.allowed[i]
                and max(self.noun[i], 1 - self.other[i] - self.noun[i]) > self.other[i]
            )

        run = a
        while inside(run):
            run += 1
        nouns = [i for i in range(a, run) if self.noun[i] >= 1 - self.other[i] - self.noun[i]]
        return not inside(a - 1) and bool(nouns) and nouns[-1] + 1 == b

    def noun_phrase(self, a, b):
        other, noun = self.other, self.noun
        before = other[a - 1] if self.beside(a, a - 1) and self.allowed[a - 1] else 1
        after = noun[b] if self.beside(a, b) and self.allowed[b] else 0
        return (1 - other[a:b]).min() * noun[b - 1] * before * (1 - after)

    def features(self, spans):
        """What the mentions of a phrase say about it."""
        p, allowed = self.p, self.p[np.array(self.allowed)]
        span, nouns = np.array([self.span(*s) for s in spans]), np.array([self.noun_phrase(*s) for s in spans])
        first, n = spans[0][0], spans[0][1] - spans[0][0]
        known = known_words()
        ranks = [known.get(word.lower().replace("é", "e"), len(known)) for word, _, _ in self.words[first : first + n]]
        rarity = np.log((np.array(ranks) + 1) / (len(known) + 1))
        return {
            "span": log_odds(span.max()),
            "labels": log_odds(mention_scores(p, spans).max()),
            "inside": log_odds(max(1 - p[a:b, O].max() for a, b in spans)),
            "expected_mentions": np.log1p(span.sum()),
            "mentions": np.log(len(spans)),
            "first": np.log1p(first),
            "relative_first": first / len(p),
            "one_word": n == 1,
            "two_words": n == 2,
            "three_words": n == 3,
            "more_words": n > 3,
            "labelled": any(s in self.labelled for s in spans),
            "function_word": any(self.functional[a] or self.functional[b - 1] for a, b in spans),
            "document": np.log(len(p)),
            "density": np.log((1 - allowed[:, O]).mean() + 1e-3),
            "begins": np.log1p(allowed[:, B].sum()),
            "central": self.ranks[first : first + n].sum(),
            "rare_word": rarity[0] if n == 1 else 0,
            "rarest": rarity.max(),
            "most_frequent": rarity.min(),
            "noun_phrase": nouns.mean(),
            "best_noun_phrase": nouns.max(),
            "noun_phrases": np.log1p(nouns.sum()),
        }


def spans_of(table):
    """The mentions of each phrase."""
    spans = [tuple(span) for span in table.spans.tolist()]
    return [spans[a:b] for a, b in pairwise(table.bounds)]


WORDS = "graph cuts Graphs cut , a of net café IT OF GRAPH - a@b.org k-cuts 2-D D"


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([*WORDS.split(), "\n\n"]), max_size=14), min_size=1, max_size=4),
    st.sampled_from(["english", "german", None]),
    st.randoms(),
    st.booleans(),
)
def test_a_batch_of_documents_has_the_phrases_of_the_plain_version(documents, language, random, sure):
    """Also where a label, a phrase or a repetition would run on into the next document or unit of layout."""
    rng, read, classes = np.random.default_rng(random.getrandbits(32)), [], []
    for parts in documents:
        words = split_words(" ".join(parts))
        read.append((words, rng.dirichlet([9, 1, 1] if sure else [1, 1, 1], len(words)).reshape(-1, 3)))
        classes.append(rng.dirichlet([1, 1, 1], len(words)).reshape(-1, 3))
    for (words, p), of, table in zip(read, classes, find_phrases(read, language, classes), strict=True):
        plain = Plain(words, p, of, language)
        assert spans_of(table) == [spans for spans, _ in plain.phrases]
        if plain.phrases:
            features = np.array([[features[name] for name in FEATURES] for _, features in plain.phrases], dtype=float)
            np.testing.assert_allclose(table.features, features, rtol=1e-9, atol=1e-12)
            scores = np.concatenate([mention_scores(plain.p, spans) for spans, _ in plain.phrases])
            np.testing.assert_allclose(table.scores, scores, rtol=1e-9)
    (alone,) = find_phrases(read[:1], language, classes[:1])  # in any batch to the last bit
    np.testing.assert_array_equal(alone.features, find_phrases(read, language, classes)[0].features)


def candidates_of(text, row, language="english"):
    """The phrases of a text in which all words have the same probabilities."""
    words = split_words(text)
    (table,) = find_phrases([(words, np.tile(row, (len(words), 1)))], language)
    return {" ".join(word for word, _, _ in words[a:b]) for spans in spans_of(table) for a, b in spans}


def test_function_words_alone_are_no_phrase():
    """Whatever the model labels: "the" and "such as" say nothing, "state of the art" and the acronym IT do."""
    text, row = "The US is a state of the art such as IT does.", [0.1, 0.6, 0.3]
    assert {"US", "IT", "state of the", "state", "art", "the art"} <= candidates_of(text, row)
    assert not {"The", "is", "a", "of", "the", "such", "as", "is a", "of the", "such as"} & candidates_of(text, row)
    assert {"The", "such as"} <= candidates_of(text, row, "german")
    capitals = candidates_of("THE LAWS OF MOTION\n\nThe IT department, IBM IT services and A STATE OF IT", row)
    assert "IT" in capitals and not {"THE", "OF", "A", "OF IT"} & capitals
