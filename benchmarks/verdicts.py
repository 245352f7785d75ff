"""What a careful reader says about the keyphrases of `forty_texts`: lists of verdicts, and rules for phrases that are on no list.

`verdicts.tsv` has a line for each judged phrase: the text, the phrase, and one of LISTED. Whether a phrase is a near-duplicate depends
on the phrases before it, so this is a rule and not on the lists. A phrase that neither the list nor a rule decides is UNKNOWN: add it to
the list, whichever system found it.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from keyphrase_tools.phrase_features import FUNCTION_WORDS
from keyphrase_tools.terms import continued_words, is_whole
from keyphrase_tools.words import normalise, split_phrase, split_words, stem

FOLDER = Path(__file__).resolve().parent / "forty_texts"
GOOD, ACCEPTABLE, FRAGMENT, VERB, GENERAL, DUPLICATE, LABEL, OTHER, UNKNOWN = (
    "good", "acceptable", "fragment", "verb", "too general", "near-duplicate", "label", "other", "unknown",
)  # fmt: skip
LISTED = (GOOD, ACCEPTABLE, FRAGMENT, VERB, GENERAL, LABEL, OTHER)
VERDICTS = (GOOD, ACCEPTABLE, FRAGMENT, VERB, DUPLICATE, GENERAL, LABEL, OTHER, UNKNOWN)
WHOLE = (GOOD, ACCEPTABLE, GENERAL, UNKNOWN)  # of which a phrase may be a near-duplicate
GOAL = (FRAGMENT, VERB, DUPLICATE)  # what a model should hardly ever return
TEXTS = 4  # of each kind
# after these a lower-case word is a verb: infinitives, and the forms after pronouns and auxiliaries
_BEFORE_VERBS = {
    "to", "will", "would", "can", "could", "may", "might", "must", "shall", "should", "cannot", "do", "does", "did", "not",
    "i", "you", "he", "she", "we", "they", "who",
}  # fmt: skip
_SPEAKER = re.compile(r"(?:\[[0-9:]+\] )?((?:[A-Z][\w.]*|[0-9]+)(?: (?:[A-Z][\w.]*|[0-9]+)){0,3})(?: \([^()\n]*\))?:")
_SIGNATURE = re.compile(
    r"^(?:--|(?:best|kind|warm) regards|cheers|talk soon|sent from|your .* team)\b.*|^--$", re.IGNORECASE
)


class Verdict(NamedTuple):
    """The verdict on a phrase, and why, if a rule gave it."""

    phrase: str
    verdict: str
    reason: str = ""


class JudgedText:
    """A text with the verdicts on its phrases.

    Args:
        name: such as "news_1": the kind and a number.
        text: as a string.
        phrase_verdicts: phrases and their verdicts.

    Raises:
        ValueError: for a verdict that is not one of LISTED, and for a phrase that has two.
    """

    def __init__(self, name: str, text: str, phrase_verdicts: Sequence[tuple[str, str]]):
        self.name, self.kind, self.text = name, name.rsplit("_", 1)[0], text
        self.words, self.verdicts = [normalise(word) for word, _, _ in split_words(text)], {}
        for phrase, verdict in phrase_verdicts:
            if verdict not in LISTED:
                raise ValueError(f"{name}: the verdict {verdict!r} on {phrase!r} is not one of {', '.join(LISTED)}.")
            if self.verdicts.setdefault(normalise(phrase), verdict) != verdict:
                raise ValueError(f"{name}: {phrase!r} has two verdicts. Keep one.")
        self._continued = continued_words(split_words(text))
        self._labels = _label_spans(text)

    def judge(self, phrases: Sequence[str]) -> list[Verdict]:
        """The verdicts on the phrases of one system, best first."""
        verdicts: list[Verdict] = []
        for phrase in phrases:
            own = self._judge_alone(phrase)
            if own.verdict in WHOLE:  # a phrase with a fragment before it counts once, as the fragment
                before = [one.phrase for one in verdicts if one.verdict in (*WHOLE, DUPLICATE)]
                if other := next((one for one in before if near_duplicates(one, phrase)), None):
                    own = Verdict(phrase, DUPLICATE, f"of {other}")
            verdicts.append(own)
        return verdicts

    def _judge_alone(self, phrase: str) -> Verdict:
        words = split_phrase(phrase)
        if verdict := self.verdicts.get(" ".join(words)):
            return Verdict(phrase, verdict)
        spans = self.find(words)
        if not spans:
            return Verdict(phrase, UNKNOWN, "not in the text")
        if words[0] in FUNCTION_WORDS or words[-1] in FUNCTION_WORDS:
            return Verdict(phrase, FRAGMENT, "a function word at an edge")
        if all(not is_whole(self._continued, *span) for span in spans):
            return Verdict(phrase, FRAGMENT, "part of a term")
        if all(any(a <= start and end <= b for a, b in self._labels) for start, end in spans):
            return Verdict(phrase, LABEL, "a speaker, a header or a signature")
        if len(words) == 1 and all(self.words[start - 1] in _BEFORE_VERBS for start, _ in spans if start):
            return Verdict(phrase, VERB, "after a pronoun or an auxiliary")
        if longer := self._always_inside(words, spans):
            return Verdict(phrase, FRAGMENT, f"always in {longer}")
        return Verdict(phrase, UNKNOWN)

    def find(self, words: Sequence[str]) -> list[tuple[int, int]]:
        """The spans of words where a phrase occurs."""
        n, words = len(words), list(words)
        return [(i, i + n) for i in range(len(self.words) - n + 1) if self.words[i : i + n] == words]

    def _always_inside(self, words: list[str], spans: list[tuple[int, int]]) -> str | None:
        """The noun phrase that contains all occurrences of a phrase, if there is one on the list."""
        for other, verdict in self.verdicts.items():
            longer = other.split()
            if verdict not in (GOOD, ACCEPTABLE) or len(longer) <= len(words):
                continue
            outer = self.find(longer)
            if all(any(a <= start and end <= b for a, b in outer) for start, end in spans):
                return other
        return None


def near_duplicates(one: str, other: str) -> bool:
    """Whether two phrases differ by inflection or a possessive only, or one is the other with a word more in front or at the end.

    >>> near_duplicates("Nafta", "Nafta's"), near_duplicates("trade deals", "new trade deal"), near_duplicates("wheat", "wheat price index")
    (True, True, False)
    """
    short, long = sorted(
        ([stem(word) for word in split_phrase(phrase) if word != "'"] for phrase in (one, other)), key=len
    )
    return short == long or (bool(short) and short in (long[1:], long[:-1]))


def _label_spans(text: str) -> list[tuple[int, int]]:
    """The spans of words of speakers before a colon, of headers and of signatures."""
    places, signed = [], False
    for line in re.finditer(r".+", text):
        signed = signed or bool(_SIGNATURE.match(line[0]))
        if signed and line[0].startswith(">"):
            signed = False
        if signed:
            places.append(line.span())
        elif speaker := _SPEAKER.match(line[0]):
            places.append((line.start(), line.start() + speaker.end()))
    words = split_words(text)
    inside = [[i for i, (_, a, b) in enumerate(words) if start <= a and b <= end] for start, end in places]
    return [(numbers[0], numbers[-1] + 1) for numbers in inside if numbers]


def read_texts(folder: Path = FOLDER) -> list[JudgedText]:
    """The forty texts, in the order of their names.

    Raises:
        ValueError: for a line of verdicts with another number of fields, or of a text that is not there.
    """
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))}
    phrase_verdicts: dict[str, list[tuple[str, str]]] = {name: [] for name in texts}
    for number, line in enumerate((folder / "verdicts.tsv").read_text(encoding="utf-8").splitlines(), start=1):
        fields = line.split("\t")
        if len(fields) != 3 or fields[0] not in phrase_verdicts:
            raise ValueError(
                f"{folder / 'verdicts.tsv'}, line {number}: {line!r} is not a text of the folder, a phrase and a verdict, "
                "separated by tabs."
            )
        phrase_verdicts[fields[0]].append((fields[1], fields[2]))
    return [JudgedText(name, text, phrase_verdicts[name]) for name, text in texts.items()]
