# needs: onnx
"""lexperts_lite.browser: places of word pieces, and the extractor whose graph and tokenizer the page runs."""

import json

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from lexperts_lite import KeyphraseExtractor, browser

from .test_lite import OPTIONS, TEXTS, places, scores

HARD = [
    "Σας ΟΔΟΣ İstanbul ẞ", "a\x00b\u200bc \ufffd d", "한국어 text", "\U0001f600 emoji 👩‍👩‍👧 \u1e9b\u0323", "½ ²³ Ⅷ ﬀ", "नमस्ते", "مرحبا بالعالم",
    "cafe\u0301", "a [UNK] and [unk]", "[SEP]x [CLS", "word" * 60 + " end.", "semi-supervised  e.g.\tU.S.\r\nlines", "ไทย \u0e01\u0e33", "x\u00a0y",
    "graph\u2028cuts", "graph\u2029\u2029cuts net", "graph \U0001fae9 cut",
]  # fmt: skip
WORDS = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "semi", "word", "text", "graph", "cut", "##s", "net", "##work", "-", ".", "##istanbul",
]  # fmt: skip


def word_pieces(vocabulary):
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(vocabulary[:5])
    return tokenizer


def letters():
    """A vocabulary that has each small letter of the texts, so that pieces are short."""
    characters = sorted({c for text in [*TEXTS, *HARD] for c in text.lower() if c.isalpha()})
    return [*WORDS, *characters, *(f"##{c}" for c in characters)]


@pytest.mark.parametrize("vocabulary", [WORDS, letters()], ids=["words", "letters"])
def test_the_places_of_pieces_are_those_of_the_tokenizer(vocabulary):
    tokenizer = word_pieces(vocabulary)
    for text in [text.encode("utf-8", "ignore").decode() for text in [*TEXTS, *HARD]]:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        assert browser.piece_spans(text, encoding.tokens) == encoding.offsets, text


def test_pieces_of_another_text_are_an_error():
    with pytest.raises(ValueError, match="'tide' is not at 'graph cuts'"):
        browser.piece_spans("graph cuts", ["tide"])


def page_tokenizer(folder):
    """What a page passes: ids and pieces without places, by the folder's tokenizer."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(text):
        encoding = tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.tokens

    return encode


@pytest.mark.nightly
@pytest.mark.parametrize("graph", ["exported", "exported_int8"])
def test_the_answers_are_those_of_the_package(graph, request):
    folder = request.getfixturevalue(graph)
    plain = KeyphraseExtractor(folder)
    page = browser.BrowserExtractor(str(folder), page_tokenizer(folder), plain._inputs)
    found = 0
    for text in [text for text in TEXTS if text.isprintable() or "\n" in text]:
        for options in OPTIONS[::2]:
            options = {name: value for name, value in options.items() if name != "batch_size"}
            outputs = [plain._run(feeds, True) for feeds in page.prepare(text, **options)]
            phrases = page.keyphrases(outputs)
            expected = plain(text, batch_size=1, **options)
            assert places(phrases) == places(expected)
            assert scores(phrases) == pytest.approx(scores(expected), abs=2e-6)
            found += len(phrases)
    assert found > 100


def test_other_tokenizers_are_an_error(exported, tmp_path):
    settings = json.loads((exported / "tokenizer.json").read_text(encoding="utf-8"))
    settings["normalizer"]["lowercase"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(ValueError, match="BERT's word pieces in lower case"):
        browser.PieceTokenizer(str(tmp_path / "tokenizer.json"), page_tokenizer(exported))
