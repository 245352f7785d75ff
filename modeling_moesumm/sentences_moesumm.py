# SPDX-License-Identifier: Apache-2.0
"""Rule-based sentence splitting, and splitting of long texts into parts that fit an encoder.

A cut is a position between two characters. Parts are the texts between cuts, so nothing is lost:
`"".join(parts) == text`.
"""

import re
from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise

Count = Callable[[list[str]], list[int]]  # the number of tokens of each text

STOPS = ".!?…‽؟۔।"
WIDE_STOPS = "。！？｡"  # after these no space follows
CLOSERS = "\"'”’»)\\]›」』"
OPENERS = "\"'“‘«(["
LINE_ENDS = "\n\r\v\f\x85\u2028\u2029"
# Possessive (++), and matched from the first character of a run only, so that long runs of dots take linear time.
BOUNDARY = re.compile(
    rf"(?<![{STOPS}])(?P<stop>[{STOPS}]++)(?P<closed>[{CLOSERS}]*+)(?:\[\d{{1,4}}\])?(?=\s|\Z)"
    rf"|(?P<wide>[{WIDE_STOPS}]++[{CLOSERS}]*+)"
    rf"|(?P<line>[{LINE_ENDS}]\s*+)"
)
SPACE = re.compile(r"\s*+")
CLAUSE = re.compile(r"[,;:–—](?=\s)|[，；：、]|\s[–—-](?=\s)")
LONGEST_WORD = 40  # characters before and after a stop that are examined


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


# Followed by a name or a number: never the end of a sentence.
BEFORE_NAMES = words(
    """adm approx brig ca capt cf cmdr col cpl dr e.g eg esp et fig figs fr gen gov hon i.e ie incl lieut lt maj messrs
    mlle mme mr mrs ms mt mx nr pres prof rep resp rev sen sgt sra st supt v viz vs"""
)
# Not the end of a sentence if a number follows.
BEFORE_NUMBERS = words(
    """apr april art aug ch chap dec eq eqs feb jan jul jun mar no nos nov oct p para pp pt ref refs sec sect sep sept tab
    vol vols"""
)
# The end of a sentence only if a common first word follows.
OFTEN_INSIDE = words("al bros co corp dept inc jr ltd sr univ")
STARTERS = words(
    """a after all also although an and as at because before but by during each even every finally first for from he her
    here his how however i if in it its later many meanwhile moreover most my no nor not now of on once one only or our
    she since so some such that the their then there therefore these they this those though thus to today under until
    we what when where whether which while who why with yet you your"""
)
ACRONYM = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]|[^\W\d_]")  # U.S, e.g, J


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """The sentences as `(start, end)`, without surrounding spaces. Paragraphs end sentences too."""
    spans, start = [], 0
    for cut in sentence_cuts(text):
        part = text[start:cut]
        if body := part.strip():
            begin = start + len(part) - len(part.lstrip())
            spans.append((begin, begin + len(body)))
        start = cut
    return spans


def sentence_cuts(text: str) -> list[int]:
    """The positions after each sentence and the spaces that follow it; the last one is the end of the text."""
    cuts, refused = [], -1
    cased = any(character.isupper() for character in text)
    for match in BOUNDARY.finditer(text):
        cut = SPACE.match(text, match.end()).end()
        if match["line"]:
            gap = match.group()
            blank = len(re.findall(r"\r\n|[\n\r\v\f\x85\u2028\u2029]", gap)) > 1
            wrapped = cut == refused or (cased and text[cut : cut + 1].islower())
            ends = blank or not wrapped
        else:
            ends = match["wide"] is not None or ends_sentence(text, match, cut, cased)
            refused = -1 if ends else cut
        if ends and cut < len(text) and (not cuts or cut > cuts[-1]):
            cuts.append(cut)
    return [*cuts, len(text)] if text else []


def ends_sentence(text: str, match: re.Match, cut: int, cased: bool) -> bool:
    """Whether a sentence ends with this match of `BOUNDARY`, after which the next word begins at `cut`.

    `cased` is whether the text has uppercase letters.
    """
    following = text[cut : cut + LONGEST_WORD].split(maxsplit=1)
    word = following[0] if following else ""
    if word and (word[0] in ".,;:!?…" or (cased and word[0].islower())):
        return False
    before = text[max(0, match.start() - LONGEST_WORD) : match.start()]
    if match["stop"] != "." or match["closed"]:
        return not (word and before and before[-1] in OPENERS and len(match["stop"]) > 1)  # "... he began so
    last = before.split()[-1].lstrip(OPENERS) if before and not before[-1].isspace() else ""
    lower = last.lower()
    if lower in BEFORE_NAMES:
        return False
    if lower in BEFORE_NUMBERS:
        return not (word[:1].isdigit() or word[:1] in tuple("(#§"))
    if ACRONYM.fullmatch(last) or lower in OFTEN_INSIDE:
        return not word or word.strip(OPENERS + ",").lower() in STARTERS
    # "1. First" at the beginning of a line or a sentence; at the end of a truncated text "3." may be a part of "3.5"
    head = re.split(f"[{LINE_ENDS}]", before)[-1].removesuffix(last).rstrip()
    numbered = last.isdigit() and len(last) <= 3 and (not head or head[-1] in STOPS + CLOSERS + ":")
    return not (numbered or (not word and last[-1:].isdigit()))


def last_sentence_end(text: str) -> int:
    """The position after the last stop that ends a sentence, 0 if there is none."""
    end, cased = 0, any(character.isupper() for character in text)
    for match in BOUNDARY.finditer(text):
        cut = SPACE.match(text, match.end()).end()
        if match["line"] is None and (match["wide"] or ends_sentence(text, match, cut, cased)):
            end = match.end()
    return end


def trim_to_sentence(text: str) -> str:
    """Cuts a text that reached its length limit at its last sentence end.

    If no sentence is complete, an ellipsis replaces the last word, which may be incomplete; a single word is kept.
    """
    text = text.strip()
    if end := last_sentence_end(text):
        return text[:end]
    whole = text.rsplit(maxsplit=1)
    return f"{whole[0].rstrip(' ,;:–—-(')}…" if whole else ""


def split_to_fit(text: str, limit: int, count: Count) -> list[str]:
    """Splits a text into as few parts of at most `limit` tokens as possible, of similar sizes, at sentence ends.

    A sentence that is too long is split at its clauses, a clause between words, and a word inside.

    Args:
        text: of any length.
        limit: tokens per part.
        count: returns the number of tokens of each text, without special tokens.

    Raises:
        ValueError: for a limit that is too small for a single character.
    """
    if not text:
        return []
    size = count([text.strip()])[0]
    return [text] if size <= limit else [part for part, _ in _split(text, size, limit, count, level=0)]


def _split(text: str, size: int, limit: int, count: Count, level: int) -> list[tuple[str, int]]:
    """Splits a text of `size` tokens, more than the limit, into parts with their tokens; each level is finer."""
    parts = SPLITTERS[level](text) if level < len(SPLITTERS) else _split_word(text, size, limit)
    if len(parts) == 1:
        return _split(text, size, limit, count, level + 1)
    fitting = []
    for part, tokens in zip(parts, count([part.strip() for part in parts]), strict=True):
        fitting += [(part, tokens)] if tokens <= limit else _split(part, tokens, limit, count, level + 1)
    return join_evenly(fitting, limit, count)


def _split_clauses(text: str) -> list[str]:
    return _split_at(text, [SPACE.match(text, match.end()).end() for match in CLAUSE.finditer(text)])


def _split_word(text: str, size: int, limit: int) -> list[str]:
    if len(text) < 2:
        raise ValueError(
            f"{text!r} has {size} tokens, more than the limit of {limit}. Use a tokenizer that needs fewer, or an encoder "
            "with more positions."
        )
    step = -(-len(text) // max(2, -(-size // limit)))
    return [text[start : start + step] for start in range(0, len(text), step)]


def _split_at(text: str, cuts: list[int]) -> list[str]:
    return [text[a:b] for a, b in pairwise([0, *cuts, len(text)]) if b > a]


SPLITTERS = (
    lambda text: _split_at(text, sentence_cuts(text)),
    _split_clauses,
    lambda text: re.findall(r"\s*+\S++\s*+", text),  # words
)


def join_evenly(parts: list[tuple[str, int]], limit: int, count: Count) -> list[tuple[str, int]]:
    """Joins neighbouring parts into as few runs of at most `limit` tokens as possible, the longest as short as possible.

    `parts` and the result are texts with their tokens.
    """
    sizes = [size for _, size in parts]
    fewest = len(_pack(sizes, limit))
    smallest = bisect_left(range(limit), True, lo=max(sizes), key=lambda size: len(_pack(sizes, size)) <= fewest)
    runs = _pack(sizes, smallest)
    joined = ["".join(text for text, _ in parts[a:b]) for a, b in runs]
    result = []
    # Joined parts may have more tokens than separate ones: a run that exceeds the limit is halved.
    for text, size, (a, b) in zip(joined, count([text.strip() for text in joined]), runs, strict=True):
        if size <= limit or b - a == 1:
            result.append((text, size))
            continue
        middle = (a + b) // 2
        result += join_evenly(parts[a:middle], limit, count) + join_evenly(parts[middle:b], limit, count)
    return result


def _pack(sizes: list[int], limit: int) -> list[tuple[int, int]]:
    """Groups neighbours greedily into runs `(start, end)` of at most `limit`."""
    runs, start, total = [], 0, 0
    for index, size in enumerate(sizes):
        if total + size > limit and index > start:
            runs.append((start, index))
            start, total = index, 0
        total += size
    return [*runs, (start, len(sizes))]


def replace_surrogates(text: str) -> str:
    """The text with each lone surrogate replaced by U+FFFD; tokenizers do not accept them."""
    return re.sub(r"[\ud800-\udfff]", "\ufffd", text)
