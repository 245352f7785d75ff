"""Texts as sentences, and as pieces that an encoder can read. By rules, without data or models.

A cut is a place between two characters. Pieces go from one cut to the next, so that together they are the whole text:
`"".join(pieces) == text`.
"""

import re
from collections.abc import Callable

Count = Callable[[list[str]], list[int]]  # the number of tokens of each text

STOPS = ".!?…‽؟۔।"
WIDE_STOPS = "。！？｡"  # after these no space follows
CLOSERS = "\"'”’»)\\]›」』"
OPENERS = "\"'“‘«(["
LINE_ENDS = "\n\r\v\f\x85\u2028\u2029"
# Possessive (++), and begun at a run's first sign only: a run of a hundred thousand dots is read once.
BOUNDARY = re.compile(
    rf"(?<![{STOPS}])(?P<stop>[{STOPS}]++)(?P<closed>[{CLOSERS}]*+)(?:\[\d{{1,4}}\])?(?=\s|\Z)"
    rf"|(?P<wide>[{WIDE_STOPS}]++[{CLOSERS}]*+)"
    rf"|(?P<line>[{LINE_ENDS}]\s*+)"
)
SPACE = re.compile(r"\s*+")
CLAUSE = re.compile(r"[,;:–—](?=\s)|[，；：、]|\s[–—-](?=\s)")
LONGEST_WORD = 40  # characters before a stop that are looked at


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# A name or a number follows: no sentence ends here.
BEFORE_NAMES = words(
    """adm approx brig ca capt cf cmdr col cpl dr e.g eg esp et fig figs fr gen gov hon i.e ie incl lieut lt maj messrs
    mlle mme mr mrs ms mt mx nr pres prof rep resp rev sen sgt sra st supt v viz vs"""
)
# A number follows, or a sentence has ended.
BEFORE_NUMBERS = words(
    """apr april art aug ch chap dec eq eqs feb jan jul jun mar no nos nov oct p para pp pt ref refs sec sect sep sept tab
    vol vols"""
)
# The next sentence begins with a common word, or it is none.
OFTEN_INSIDE = words("al bros co corp dept inc jr ltd sr univ")
STARTERS = words(
    """a after all also although an and as at because before but by during each even every finally first for from he her
    here his how however i if in it its later many meanwhile moreover most my no nor not now of on once one only or our
    she since so some such that the their then there therefore these they this those though thus to today under until
    we what when where whether which while who why with yet you your"""
)
ACRONYM = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]|[^\W\d_]")  # U.S, e.g, J


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Where sentences stand: `text[start:end]`, without the spaces around them. Lines break at paragraph ends."""
    spans, start = [], 0
    for cut in sentence_cuts(text):
        piece = text[start:cut]
        if body := piece.strip():
            begin = start + len(piece) - len(piece.lstrip())
            spans.append((begin, begin + len(body)))
        start = cut
    return spans


def sentence_cuts(text: str) -> list[int]:
    """Behind each sentence and the spaces that follow it; the last cut is the end of the text."""
    cuts, refused = [], -1
    cased = any(sign.isupper() for sign in text)
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
    """Whether a sentence ends with this stop; `cut` is where the next word begins, or the end of the text."""
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
    # "1. First" at the beginning of a line or a sentence; at the end of a text "3." may be the beginning of "3.5"
    head = re.split(f"[{LINE_ENDS}]", before)[-1].removesuffix(last).rstrip()
    numbered = last.isdigit() and len(last) <= 3 and (not head or head[-1] in STOPS + CLOSERS + ":")
    return not (numbered or (not word and last[-1:].isdigit()))


def last_sentence_end(text: str) -> int:
    """Behind the last stop that ends a sentence, 0 if there is none."""
    end, cased = 0, any(sign.isupper() for sign in text)
    for match in BOUNDARY.finditer(text):
        cut = SPACE.match(text, match.end()).end()
        if match["line"] is None and (match["wide"] or ends_sentence(text, match, cut, cased)):
            end = match.end()
    return end


def trim_to_sentence(text: str) -> str:
    """What was written until a length limit, up to its last sentence end.

    Where not one sentence is complete, an ellipsis stands in the place of the last word, which may be half a word (the
    only word stays).
    """
    text = text.strip()
    if end := last_sentence_end(text):
        return text[:end]
    whole = text.rsplit(maxsplit=1)
    return f"{whole[0].rstrip(' ,;:–—-(')}…" if whole else ""


def split_to_fit(text: str, limit: int, count: Count) -> list[str]:
    """Neighbouring sentences together, in as few pieces of at most `limit` tokens as they need, and these alike in size.

    A sentence that is too long is divided at its clauses, a clause between words, and a word alone inside.

    Args:
        text: of any length.
        limit: tokens a piece may have.
        count: texts -> the number of tokens of each, without special ones.

    Raises:
        ValueError: for a limit into which not one character fits.
    """
    if not text:
        return []
    size = count([text.strip()])[0]
    return [text] if size <= limit else [piece for piece, _ in _fit(text, size, limit, count, level=0)]


def _fit(text: str, size: int, limit: int, count: Count, level: int) -> list[tuple[str, int]]:
    """A text of `size` tokens, more than the limit -> pieces and their tokens; each level divides it more finely."""
    parts = LEVELS[level](text) if level < len(LEVELS) else _chunks(text, size, limit)
    if len(parts) == 1:
        return _fit(text, size, limit, count, level + 1)
    fitting = []
    for part, tokens in zip(parts, count([part.strip() for part in parts]), strict=True):
        fitting += [(part, tokens)] if tokens <= limit else _fit(part, tokens, limit, count, level + 1)
    return join_evenly(fitting, limit, count)


def _sentences(text: str) -> list[str]:
    return _between(text, sentence_cuts(text))


def _clauses(text: str) -> list[str]:
    return _between(text, [SPACE.match(text, match.end()).end() for match in CLAUSE.finditer(text)])


def _words(text: str) -> list[str]:
    return re.findall(r"\s*+\S++\s*+", text)


LEVELS = (_sentences, _clauses, _words)


def _chunks(text: str, size: int, limit: int) -> list[str]:
    if len(text) < 2:
        raise ValueError(
            f"{text!r} alone has {size} tokens, and a piece of the text may have {limit}. Use a tokenizer that needs "
            "fewer, or an encoder that reads more."
        )
    step = -(-len(text) // max(2, -(-size // limit)))
    return [text[start : start + step] for start in range(0, len(text), step)]


def _between(text: str, cuts: list[int]) -> list[str]:
    places = [0, *cuts, len(text)]
    return [text[a:b] for a, b in zip(places, places[1:], strict=False) if b > a]


def join_evenly(parts: list[tuple[str, int]], limit: int, count: Count) -> list[tuple[str, int]]:
    """Neighbours joined into as few runs of at most `limit` tokens as there can be, the longest as short as it can be.

    parts: texts with their tokens; so is what is returned.
    """
    sizes = [size for _, size in parts]
    fewest = len(_runs(sizes, limit))
    low, high = max(sizes), limit
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_runs(sizes, middle)) <= fewest else (middle + 1, high)
    runs = _runs(sizes, low)
    joined = ["".join(text for text, _ in parts[a:b]) for a, b in runs]
    pieces = []
    # Two parts may have more tokens together than alone: a run that grew over the limit is parted in two.
    for piece, size, (a, b) in zip(joined, count([piece.strip() for piece in joined]), runs, strict=True):
        if size <= limit or b - a == 1:
            pieces.append((piece, size))
            continue
        middle = (a + b) // 2
        for c, d in ((a, middle), (middle, b)):
            pieces += join_evenly(parts[c:d], limit, count)
    return pieces


def _runs(sizes: list[int], limit: int) -> list[tuple[int, int]]:
    """(start, end) of neighbours taken together as long as their sizes allow it."""
    runs, start, total = [], 0, 0
    for place, size in enumerate(sizes):
        if total + size > limit and place > start:
            runs.append((start, place))
            start, total = place, 0
        total += size
    return [*runs, (start, len(sizes))]


def readable(text: str) -> str:
    """The text with lone surrogates replaced one for one: tokenizers refuse to read them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "".join("\ufffd" if "\ud800" <= sign <= "\udfff" else sign for sign in text)
    return text
