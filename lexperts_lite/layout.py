# SPDX-License-Identifier: Apache-2.0
"""May a phrase cross here? Where a text is divided, which words no phrase has, and which are a term that no phrase has a part of.

A text is divided by blank lines, headings, list marks, cells, symbols, speakers' labels, the rows of a table, a list or a form, lines of
code between fences, and dashes or slashes between blanks. A line break within a paragraph does not divide it, since texts from PDFs and
e-mails have lines of a fixed width. URLs, e-mail addresses, paths of files and HTML tags are in no phrase, nor are the labels of
speakers and senders that begin several lines, and the header and signature of an e-mail.

Hyphens and slashes separate words (see `words`), but two words with one hyphen and nothing else between them are one term if
- the second begins with a digit, or the first is a number: "COVID-19", "GPT-3.5", "2,4-D", "3D-printed";
- one of them is a single Latin or Greek letter, the second also with a number: "k-means", "5-HT", "TGF-\u03b21";
- both are acronyms, up to four capitals or capitals inside the word: "RT-PCR", "MERS-CoV", "CRISPR-Cas9";
- the second makes an adjective of the first: "progression-free".
A slash joins capitals and digits if one side has at most two of them: "TCP/IP", "9/11". Other compounds are not terms, since their parts
may be keyphrases ("semi-supervised learning", "CPU/GPU").
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import itemgetter

import numpy as np

from .clean import ADJECTIVES
from .words import FUNCTION_WORDS, JOINERS, Words

NARROW = 40  # characters: whether a shorter line was cut short is unknown
CUT_SHORT = 0.75  # of the usual length of a line, if the next word is added
LONGEST = 60  # characters of two words; longer ones are no term, and would take quadratic time

_J = re.escape(JOINERS)
_BLANKS = " \u00a0\u2000-\u200a"
# a dash or slash between blanks, or several; a separator, a page's end; a tab or three blanks between cells
_CUTS = re.compile(rf"[{_J}](?:[{_J}]++|(?<!\S.)(?!\S))|[\x0b\x0c\x1f\u2029]", re.DOTALL)
_CELLS = re.compile(rf"(?<=\S)(?=[{_BLANKS}]*\t|[{_BLANKS}]{{3}})[{_BLANKS}\t]++(?=\S)")

# what begins a line
_NAME = r"(?![a-z\d_])\w[\w.'\u2019-]*+"
_NAMES = rf"{_NAME}(?: (?:{_NAME}|[0-9]{{1,3}})){{0,3}}"
_SPEAKER = rf"\*{{0,2}}{_NAMES}\*{{0,2}}(?: \([^()\n]{{1,20}}\)|(?:,| [\[@]) ?[0-9:]{{4,8}}\]?)?:\*{{0,2}}(?=\s|$)"
_CLOCK = r"(?:[0-9]{1,4}[-./][0-9]{1,2}[-./][0-9]{1,4},?\s)?[0-9]{1,2}(?::[0-9]{2}){1,2}(?:\s?[AaPp]\.?[Mm]\.?|\s[A-Z]{3})?[\])]?"
_TIME = rf"[\[(]?{_CLOCK}(?:\s[-\u2013])?\s"
_SENDER = rf"{_NAMES},?[^\S\n]+(?:[-\u2013\u2014] )?[\[(]?(?:(?:Today|Yesterday) at )?{_CLOCK}(?=[^\S\n]*$)"
_ROLES = frozenset(("user", "human", "assistant", "system", "question", "answer", "interviewer", "agent", "customer"))
_MARKER = re.compile(
    rf"\s*(?:[{_J}\u00b7\u2022\u2023\u2043]++|[^\w\s.,;:!?)\]}}]{{1,6}}(?=\s)"  # bullets, # headings
    r"|(?:\(?(?:[0-9]{1,3}|[A-Za-z]|[ivxIVX]{1,5})[.)-]|[0-9]{1,2}(?:\.[0-9]{1,2})+\.?|o)\s+"  # 1. a) (iv) 2.1; Word's "o"
    r"|\[?[0-9]{4}-[0-9]{2}-[0-9]{2}|\[?[0-9]{1,2}:[0-9]{2}"  # times of logs and transcripts
    rf"|{_SPEAKER})"
)
_FORM = re.compile(r"[A-Z][\w'-]*+(?: [\w'-]++){0,3}+:\s")  # "Clinical history: ..."
_HEAD = re.compile(
    r"\S+(?: \S+){0,4}?(?: +[-\u2013\u2014=:|\x1f] |: |\t|,(?=[^\s\d])|(?<!\d),(?=\S))"
)  # "respiration - ...", "Anna,34"
_STOP = re.compile(r"[a-z]{3}[.?!] [A-Z]")
_FENCES, _HASH = ("```", "~~~"), re.compile(r"\s*#{1,6}\s")

# what is in no phrase
_LABEL = re.compile(
    rf"^[ \t]*+(?:(?:[-*>#\u2022]{{1,3}}|[0-9]{{1,3}}[.)])[ \t]++)?+"
    rf"(?:({_TIME})(\w[\w.'\u2019-]*+(?: [\w.'\u2019-]++){{0,3}}:)(?=\s|$)|({_SPEAKER}|{_SENDER}))",
    re.MULTILINE,
)
# of an e-mail, to the next blank line; and the line above a quoted one
_SIGNATURE = re.compile(
    r"^-- ?+\r?\n(?:[^\S\n]*+\S.*+\n?){1,8}|^On [^\n]{8,120} wrote:$"
    r"|^(?:(?:kind|best|warm|many) )?(?:(?:regards|wishes|sincerely),?\s*?\n\s*?|(?:thanks|cheers),?[ \t]*\r?)\n"
    r"(?:[^\S\n]*+\S.{1,40}+(?:\n|\Z)){1,4}", re.MULTILINE | re.IGNORECASE,
)  # fmt: skip
_FIELD = r"^([A-Z][A-Za-z-]*+):[^\n]*+(?:\n[ \t]++\S[^\n]*+)*+(?:\n|\Z)"  # of an e-mail's header, with lines that continue it
_FIELDS, _HEADER = re.compile(_FIELD, re.MULTILINE), re.compile(f"(?:{_FIELD}){{2,}}+", re.MULTILINE)
_TLD = r"(?:com|org|net|edu|gov|io|ai|co|dev|app|eu|uk|de|fr)"
_REST = r"[^\s<>\"\u3000-\u9fff\uff00-\uffef]"  # of an address
_SIGN = re.compile(
    rf"@|://|www\.|\.{_TLD}(?![\w-])|10\.[0-9]{{4,9}}/|(?<!\w)/\w|[~.}}]/|\$\w+/|:\\|\\\\\w|\w/[\w./-]{{0,99}}\.[a-z]",
    re.IGNORECASE,
)
_PART = r"/[\w.@+-]++"  # of a path
_ADDRESS = re.compile(
    rf"(?<![a-z0-9+])[a-z][a-z0-9+]{{1,15}}+://{_REST}++"
    rf"|\bwww\.{_REST}++"
    r"|(?<![\w.+-])[\w.+-]{1,64}+@[\w-]++(?:\.[\w-]++)++(?::[\w~][\w./~-]*+)?+"  # also git@github.com:owner/name.git
    rf"|(?<![\w.@-])(?:[\w-]{{1,63}}+\.){{1,5}}+(?<=\.){_TLD}/{_REST}*+"
    # a host alone, unless it may be a name, such as Amazon.com
    rf"|(?<![\w.@-])(?=\w++-|[\w-]++\.[\w-]++\.)(?:[\w-]{{2,63}}+\.){{1,5}}(?-i:{_TLD})(?![\w-])"
    rf"|(?:\bdoi:\s?)?(?<![\w./])10\.[0-9]{{4,9}}/{_REST}++"
    rf"|(?<![\w./])(?:(?:~|\.\.?|\$\w+|\$\{{\w+\}})(?:{_PART})++|(?:{_PART}){{2,}}+)/?|(?:\b[a-z]:|\\)\\\S++"  # of files
    r"|(?<![\w./-])(?:[\w-][\w.-]{0,60}/){1,12}+[\w-]{1,60}+\.[a-z][a-z0-9]{0,4}(?![\w/])",
    re.IGNORECASE,
)
_ATTRIBUTE = r"\s++[\w:.@-]++\s*+=\s*+(?:\"[^\"]*+\"|'[^']*+'|[^\s\"'<>=`]++)"
_FLAG = r"\s++(?:hidden|disabled|checked|async|defer|controls|selected|required|readonly)(?=[\s/>])"
_TAG = re.compile(
    rf"<!--|-->|<[!?][A-Za-z][^<>]*+>|<v [^<>\n]{{1,60}}>|<(?P<end>/?)(?P<name>[A-Za-z][\w:.-]*+)(?:{_ATTRIBUTE}|{_FLAG})*+\s*+/?>",
    re.IGNORECASE,
)

# the terms
_HYPHEN = re.compile(r"(?<=[\w+])[-\u2010-\u2013/](?=\w)")
_LETTER = "[A-Za-z\u0370-\u03ff]"
_SHORT, _LONG = "[A-Z]{2,4}", "[A-Z]{5,}"  # acronyms; a line in capitals has longer words too
_MIXED = "(?:[A-Za-z]*[a-z][A-Z][A-Za-z]*|[A-Z]{2,}[a-z]+|[A-Z][A-Za-z]*[0-9]+)"  # MiniLM, GANs, Cas9
_BY_HYPHEN = re.compile(
    rf".+ [0-9].*|(?:[0-9][0-9.,]*|[1-9]D) .+|{_LETTER} .+|.+ {_LETTER}[0-9]{{0,2}}"
    rf"|(?:{_SHORT}|{_MIXED}) (?:{_SHORT}|{_MIXED})|{_LONG} {_MIXED}|{_MIXED} {_LONG}"
    rf"|.+ {ADJECTIVES}"
)
_BY_SLASH = re.compile(r"[A-Z0-9.]{1,2} [A-Z0-9.]+|[A-Z0-9.]+ (?:[A-Z0-9.]{1,2}|[0-9][0-9.]*)")


def unit_numbers(words: Sequence) -> np.ndarray:
    """The number of the unit of layout that each word belongs to, `(W,)`, in ascending order; -1 for a word of no phrase.

    A phrase from word a to word b - 1 is possible if the numbers of these words are equal and not -1.

    Args:
        words: of `split_words`; others, which come without their text, are one unit.
    """
    if not isinstance(words, Words):
        return np.zeros(len(words), dtype=np.int64)
    if words.units is None:
        starts, begins = [start for _, start, _ in words], np.zeros(len(words) + 1, dtype=np.int64)
        begins[[bisect_left(starts, cut) for cut in divisions(words.text)]] = 1
        hidden = [*hidden_spans(words.text), *label_spans(words.text)]
        inside = [(bisect_right(words, start, key=itemgetter(2)), bisect_left(starts, end)) for start, end in hidden]
        begins[[place for span in inside for place in span]] = 1
        words.units = begins[:-1].cumsum()
        for first, last in inside:
            words.units[first:last] = -1
    return words.units


def in_one_unit(units: np.ndarray, start: int, end: int) -> bool:
    """Whether words from `start` to `end - 1` may be a phrase."""
    return units[start] >= 0 and bool((units[start:end] == units[start]).all())


def continued_words(words: Sequence) -> np.ndarray:
    """Whether each word continues the term of the word before it, `(W,)`; words without their text continue none.

    >>> from lexperts_lite.words import split_words
    >>> continued_words(split_words("a SARS-CoV-2 test")).tolist()
    [False, False, True, True, False]
    """
    if not isinstance(words, Words):
        return np.zeros(len(words), dtype=bool)
    if words.continued is None:
        words.continued, units = np.zeros(len(words), dtype=bool), unit_numbers(words)
        for sign in _HYPHEN.finditer(words.text):
            after = bisect_left(words, sign.end(), key=itemgetter(1))
            if (
                0 < after < len(words)
                and words[after][1] == sign.end()
                and words[after - 1][2] == sign.start()
                and units[after] == units[after - 1] >= 0
            ):
                pair, rule = f"{words[after - 1][0]} {words[after][0]}", _BY_SLASH if sign[0] == "/" else _BY_HYPHEN
                words.continued[after] = len(pair) <= LONGEST and rule.fullmatch(pair) is not None
    return words.continued


def is_whole(continued: np.ndarray, start: int, end: int) -> bool:
    """Whether words from `start` to `end - 1` contain no part of a term without the rest of it."""
    return not continued[start] and not (end < len(continued) and continued[end])


def divisions(text: str) -> Iterator[int]:
    """The places in a text between whose sides no phrase continues."""
    yield from (match.end() for match in _CUTS.finditer(text))
    if "\t" in text or "   " in text or not text.isascii():
        yield from (match.end() for match in _CELLS.finditer(text))
    lines, start = [], 0
    for raw in text.splitlines(keepends=True):
        lines.append((start, raw))
        start += len(raw)
    lengths = sorted(len(raw.strip()) for _, raw in lines if not raw.isspace())
    usual, block, in_code = lengths[len(lengths) // 2] if lengths else 0, [], False
    for start, raw in [*lines, (len(text), "")]:
        fence = raw.strip().startswith(_FENCES)
        in_code ^= fence
        if in_code or fence or not raw.strip():
            yield from block_divisions(block, usual)
            yield start
            block = []
        else:
            block.append((start, raw))


def block_divisions(lines: list[tuple[int, str]], usual: int) -> Iterator[int]:
    """The beginnings of lines that do not continue the one before, in a block of lines with their places, and the ends of list marks.

    Args:
        lines: without blank lines between them.
        usual: the length of a line of the text.
    """
    usual = min(usual, max((len(raw.strip()) for _, raw in lines), default=0))
    markers = [_MARKER.match(raw) for _, raw in lines]
    rows = are_rows([raw.strip() for (_, raw), marker in zip(lines, markers, strict=True) if not marker], usual)
    before, was_capitals = "", False
    for (start, raw), marker in zip(lines, markers, strict=True):
        content = raw.strip()
        capitals = content.isupper() and sum(map(str.isalpha, content)) >= 4
        with_next = len(before) + 1 + len(content.split(maxsplit=1)[0])
        cut_short = usual >= NARROW and with_next <= CUT_SHORT * usual
        if not before or marker or rows or cut_short or capitals != was_capitals or _FORM.match(content):
            yield start
        if marker:
            yield start + marker.end()
        before, was_capitals = "" if marker and _HASH.match(raw) else content, capitals


def are_rows(lines: list[str], usual: int) -> bool:
    """Whether lines are the rows of a table or a list, not of prose that is wrapped.

    They are if all begin with a few words and the same kind of sign; or have as many commas, two or more, if there are three lines or all
    begin with capitals; or if there are three, and hardly any begins or ends as inside a sentence: with a function word or, if lines are
    long, a small letter. Lines are not if a sentence ends within one, or with the last one only.
    """
    if len(lines) < 2:
        return False
    commas = {line.count(",") for line in lines}
    capitals = all(line[0].isupper() or line[0].isdigit() for line in lines)
    if all(map(_HEAD.match, lines)) or (len(commas) == 1 and min(commas) > 1 and (capitals or len(lines) > 2)):
        return True
    ends = [line[-1] in ".?!" for line in lines]
    if (ends[-1] and not any(ends[:-1])) or any(map(_STOP.search, lines)):
        return False
    edges = [(line.split(maxsplit=1)[0], line.rsplit(maxsplit=1)[-1].lower()) for line in lines]
    inside = sum(first in FUNCTION_WORDS or last in FUNCTION_WORDS for first, last in edges)
    return len(lines) > 2 and 4 * inside < len(lines) and (usual < NARROW or capitals)


def hidden_spans(text: str) -> list[tuple[int, int]]:
    """The spans of HTML tags, comments, scripts and styles with their contents, addresses and paths, in order."""
    tags: list[tuple[int, int]] = []
    opened = None  # a comment, a script or a style: its name, and the number of its first tag
    for tag in _TAG.finditer(text) if "<" in text else ():
        name = (tag["name"] or tag[0].strip("<!>")).lower()
        begins = tag[0] == "<!--" if name == "--" else not tag["end"]
        if begins and name in ("--", "script", "style"):
            opened = opened or (name, len(tags))
        tags.append(tag.span())
        if opened and not begins and name == opened[0]:
            tags[opened[1] :] = [(tags[opened[1]][0], tag.end())]
            opened = None
    addresses = [match.span() for match in _ADDRESS.finditer(text)] if _SIGN.search(text) else []
    starts = [start for start, _ in tags]
    outside = [span for span in addresses if not (i := bisect_right(starts, span[0])) or tags[i - 1][1] <= span[0]]
    return sorted(tags + outside)


def label_spans(text: str) -> Iterator[tuple[int, int]]:
    """The spans of the labels of speakers and senders that begin two lines or more, of the headers of e-mails but for their subjects, and
    of signatures. Labels that differ by a number, or that have a time, count as one.
    """
    if "From:" in text:
        for header in _HEADER.finditer(text):
            fields = [*_FIELDS.finditer(text, *header.span())]
            if any(field[1] == "From" for field in fields):
                yield from (field.span() for field in fields if field[1] != "Subject")
    labels = []
    for line in _LABEL.finditer(text) if ":" in text else ():
        timed = line[1] or line[3].count(":") > 1 or not line[3].rstrip("*").endswith(":")
        kind = "turn" if timed or line[3].strip("*:").lower() in _ROLES else re.sub("[0-9]+", "0", line[3])
        labels.append((kind, line.span(2 if line[1] else 3)))
    turns = Counter(kind for kind, _ in labels)
    yield from (span for kind, span in labels if turns[kind] > 1)
    yield from (signature.span() for signature in _SIGNATURE.finditer(text))
