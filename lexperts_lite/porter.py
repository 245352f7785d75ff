# SPDX-License-Identifier: Apache-2.0
"""Porter's stemmer of English (1980) with the extensions of NLTK, by which published scores are computed: equal to NLTK's PorterStemmer.

Letters are consonants (c) or vowels (v); the measure m of a stem is how often a consonant follows a vowel in it. The steps and their
conditions are those of the paper.
"""

IRREGULAR = {
    "skies": "sky", "dying": "die", "lying": "lie", "tying": "tie", "innings": "inning", "outings": "outing", "cannings": "canning",
    **{word: word for word in ("sky", "news", "inning", "outing", "canning", "howe", "proceed", "exceed", "succeed")},
}  # fmt: skip
STEP_1A = {"sses": "ss", "ies": "i", "ss": "ss", "s": ""}
STEP_2 = {
    "ational": "ate", "tional": "tion", "enci": "ence", "anci": "ance", "izer": "ize", "bli": "ble", "alli": "al", "entli": "ent",
    "eli": "e", "ousli": "ous", "ization": "ize", "ation": "ate", "ator": "ate", "alism": "al", "iveness": "ive", "fulness": "ful",
    "ousness": "ous", "aliti": "al", "iviti": "ive", "biliti": "ble", "fulli": "ful",
}  # fmt: skip
STEP_3 = {"icate": "ic", "ative": "", "alize": "al", "iciti": "ic", "ical": "ic", "ful": "", "ness": ""}
STEP_4 = (
    "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou", "ism", "ate", "iti", "ous", "ive",
    "ize",
)  # fmt: skip


def shape(word: str) -> str:
    """The letters of a word as c and v; y is a vowel after a consonant.

    >>> shape("syzygy"), shape("toy")
    ('cvcvcv', 'cvc')
    """
    letters = ""
    for letter in word:
        letters += "v" if letter in "aeiou" or (letter == "y" and letters.endswith("c")) else "c"
    return letters


def measure(stem: str) -> int:
    """m, how often a consonant follows a vowel."""
    return shape(stem).count("vc")


def is_short(stem: str) -> bool:
    """Whether a stem ends like "hop": c v c, the last neither w, x nor y; or is v c."""
    return shape(stem) == "vc" or (shape(stem).endswith("cvc") and stem[-1] not in "wxy")


def replace_suffix(word: str, suffixes: dict[str, str], least: int) -> str:
    """Replaces the suffix of a word, if what is before it has a measure of at least `least`."""
    suffix = next((suffix for suffix in suffixes if word.endswith(suffix)), "")
    stem = word.removesuffix(suffix)
    return stem + suffixes[suffix] if suffix and measure(stem) >= least else word


def without_ed_and_ing(word: str) -> str:
    """Step 1b."""
    if word.endswith("ied"):
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("eed"):
        return word[:-1] if measure(word[:-3]) else word
    stem = word.removesuffix("ed" if word.endswith("ed") else "ing")
    if stem == word or "v" not in shape(stem):
        return word
    if stem.endswith(("at", "bl", "iz")):
        return f"{stem}e"
    if stem[-1:] == stem[-2:-1] and shape(stem).endswith("c"):
        return stem if stem[-1] in "lsz" else stem[:-1]
    return f"{stem}e" if measure(stem) == 1 and is_short(stem) else stem


def step_2(word: str) -> str:
    """Step 2; "alli" first, whose result goes through it again."""
    if word.endswith("alli") and measure(word[:-4]):
        return step_2(word[:-2])
    if word.endswith("logi"):
        return word[:-1] if measure(word[:-3]) else word
    return replace_suffix(word, STEP_2, 1)


def porter_stem(word: str) -> str:
    """The stem of a word in lower case.

    >>> porter_stem("networks"), porter_stem("studies"), porter_stem("computationally")
    ('network', 'studi', 'comput')
    """
    if len(word) <= 2 or word in IRREGULAR:
        return IRREGULAR.get(word, word)
    word = word[:-1] if len(word) == 4 and word.endswith("ies") else replace_suffix(word, STEP_1A, 0)
    word = without_ed_and_ing(word)
    if word.endswith("y") and len(word) > 2 and shape(word[:-1]).endswith("c"):
        word = f"{word[:-1]}i"
    word = replace_suffix(step_2(word), STEP_3, 1)
    suffix = next((suffix for suffix in STEP_4 if word.endswith(suffix)), "")
    stem = word.removesuffix(suffix)
    if measure(stem) > 1 and (suffix != "ion" or stem[-1] in "st"):
        word = stem
    stem = word.removesuffix("e")
    if stem != word and (measure(stem) > 1 or (measure(stem) == 1 and not is_short(stem))):
        word = stem
    return word[:-1] if word.endswith("ll") and measure(word[:-1]) > 1 else word
