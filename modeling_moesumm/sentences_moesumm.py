# SPDX-License-Identifier: Apache-2.0
"""Rule-based sentence splitting, and windows of whole sentences for texts that are too long for a model.

A cut is a position between two characters. Parts are the texts between cuts, so nothing is lost: `"".join(parts) == text`.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import pairwise

Count = Callable[[list[str]], list[int]]  # the number of tokens of each text

STOPS = ".!?…‽؟۔।"
WIDE_STOPS = "。！？｡"  # after these no space follows
CLOSERS = "\"'”’»)\\]›」』"
LINE_ENDS = "\n\r\v\f\x85\u2028\u2029"
# possessive (++), and matched from the first character of a run only, so that long runs of dots take linear time
BOUNDARY = re.compile(
    rf"(?<![{STOPS}])(?P<stop>[{STOPS}]++)[{CLOSERS}]*+(?:\[\d{{1,4}}\])?(?=\s|\Z)"
    rf"|(?P<wide>[{WIDE_STOPS}]++[{CLOSERS}]*+)"
    rf"|(?P<line>[{LINE_ENDS}]\s*+)"
)
SPACE = re.compile(r"\s*+")
WORDS = re.compile(r"\s*+\S++|\s++")
LONGEST_WORD = 40  # characters before and after a stop that are examined
LAST_WORD = re.compile(r"[^\s\"'“‘«(\[]*\Z")
# a full stop after these, and after single letters, ends no sentence
ABBREVIATION = re.compile(
    r"(?:[^\W\d_]\.)*[^\W\d_]|adm|al|apr|approx|art|aug|brig|bros|ca|capt|cf|ch|chap|cmdr|co|col|corp|cpl|dec|dept|dr|eqs?|esp|et|"
    r"feb|figs?|fr|gen|gov|hon|ie|inc|incl|jan|jr|jul|jun|lieut|lt|ltd|maj|mar|messrs|mlle|mme|mrs?|ms|mt|mx|nos|nov|nr|oct|op|"
    r"para|pp|pres|prof|pt|refs?|rep|resp|rev|sec|sect|sen|sept?|sgt|sra?|st|supt|tab|univ|viz|vols?|vs",
    re.IGNORECASE,
)
REPEATED = 4  # words in a row that are compared
MARKS = ".,;:!?…()[]\"'“”‘’"  # that make no other word of one
LIST_NUMBER = re.compile(rf"(?:\A|[{LINE_ENDS}])\s*\d{{1,3}}\Z")


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """The sentences as `(start, end)`, without surrounding spaces. Paragraphs end sentences too."""
    spans = []
    for start, cut in pairwise([0, *sentence_cuts(text)]):
        part = text[start:cut]
        if body := part.strip():
            begin = start + len(part) - len(part.lstrip())
            spans.append((begin, begin + len(body)))
    return spans


def sentence_cuts(text: str) -> list[int]:
    """The positions after each sentence and the spaces that follow it; the last one is the end of the text."""
    return sorted({cut for _, cut in sentence_ends(text)} | {len(text)} - {0})


def sentence_ends(text: str) -> Iterator[tuple[re.Match, int]]:
    """The match of `BOUNDARY` at the end of each sentence, and the position after the spaces that follow it."""
    cased = any(map(str.isupper, text))
    for match in BOUNDARY.finditer(text):
        cut = SPACE.match(text, match.end()).end()
        if match["line"]:
            is_blank = len(re.findall(r"\r\n|[\n\r\v\f\x85\u2028\u2029]", match.group())) > 1
            ends = is_blank or not (cased and text[cut : cut + 1].islower())  # or the line is wrapped
        else:
            ends = match["wide"] is not None or ends_sentence(text, match, cut, cased)
        if ends:
            yield match, cut


def ends_sentence(text: str, match: re.Match, cut: int, cased: bool) -> bool:
    """Whether a sentence ends with this match of `BOUNDARY`, after which the next word begins at `cut`; `cased` is whether the
    text has uppercase letters.
    """
    following = text[cut : cut + 1]
    if following and (following in ".,;:!?…" or (cased and following.islower())):
        return False
    if match["stop"] != ".":
        return True
    before = text[max(0, match.start() - LONGEST_WORD) : match.start()]
    last = LAST_WORD.search(before)[0]
    if ABBREVIATION.fullmatch(last) or LIST_NUMBER.search(before):
        return False
    return bool(following) or not last[-1:].isdigit()  # at the end of a cut text "3." may be a part of "3.5"


def trim_to_sentence(text: str) -> str:
    """Cuts a text that reached its length limit at its last sentence end.

    If no sentence is complete, an ellipsis replaces the last word, which may be incomplete; a single word is kept.
    """
    text = text.strip()
    if end := max((match.end() for match, _ in sentence_ends(text) if not match["line"]), default=0):
        return text[:end]
    whole = text.rsplit(maxsplit=1)
    return f"{whole[0].rstrip(' ,;:–—-(')}…" if whole else ""


def without_repeats(text: str) -> str:
    """The text without sentences all of whose runs of `REPEATED` words precede them; one that goes in a circle ends after its first
    round. Runs of a short sentence begin in the one before it: of two lines `None.` below different labels, none is a repetition.
    """
    kept, last, seen = "", list[str](), set[tuple[str, ...]]()
    for start, cut in pairwise([0, *sentence_cuts(text)]):
        part, written = text[start:cut], text[start:cut].split()
        words = [word.strip(MARKS).casefold() for word in written]
        own = words if len(words) >= REPEATED else last + words
        runs = {tuple(own[i : i + REPEATED]) for i in range(max(len(own) - REPEATED, 0) + 1)}
        if words == last or runs <= seen:
            continue
        if (end := second_round(words)) is not None:
            part = trim_to_sentence(" ".join(written[: end + 1])).replace(".…", ".") + " "
        kept, last, seen = kept + part, words[:end], seen | runs
    return kept.strip()


def second_round(words: list[str]) -> int | None:
    """Where words, `REPEATED` or more, repeat those just before them."""
    same = ((k, i, max(REPEATED, i - k)) for i in range(len(words)) for k in range(i) if words[k] == words[i])
    return next((i for k, i, size in same if words[k : k + size] == words[i : i + size]), None)


def split_to_fit(text: str, limit: int, count: Count) -> list[str]:
    """Splits a text into as few parts of about `limit` tokens as possible, of similar sizes, at sentence ends. A sentence that
    is too long is split between words, and a word inside. `count` returns the number of tokens of each text.
    """
    units = list(units_that_fit(text, limit, count, level=0))
    sizes = [size for _, size in units]
    fewest = len(pack(sizes, limit))
    smallest = bisect_left(range(limit), True, key=lambda size: len(pack(sizes, size)) <= fewest)
    return ["".join(unit for unit, _ in units[a:b]) for a, b in pack(sizes, smallest)]


def units_that_fit(text: str, limit: int, count: Count, level: int) -> Iterator[tuple[str, int]]:
    """The sentences with their tokens; of those with more than the limit the words, and of such words the characters."""
    cuts = [0, *sentence_cuts(text)]
    units = [text[a:b] for a, b in pairwise(cuts)] if level == 0 else WORDS.findall(text) if level == 1 else list(text)
    for unit, size in zip(units, count(units), strict=True):
        if size <= limit or level == 2:
            yield unit, size
        else:
            yield from units_that_fit(unit, limit, count, level + 1)


def pack(sizes: list[int], limit: int) -> list[tuple[int, int]]:
    """Groups neighbours greedily into runs `(start, end)` of at most `limit`, or of one."""
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
