"""pipeline("keyphrase-extraction"): any kind of input, documents of any length, the same answer every time."""

import copy
import itertools
import re
import time

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import BertConfig, BertForTokenClassification, PreTrainedModel, PreTrainedTokenizer, pipeline
from transformers.modeling_outputs import TokenClassifierOutput

from keyphrase_tools import KeyphraseExtractionPipeline, clean_text
from keyphrase_tools.clean_text import CleanText
from keyphrase_tools.pipeline_keyphrase_extraction import length_limit, read_labels
from keyphrase_tools.words import split_words

TEXT = "Graph cuts solve energy problems, and deep networks learn semi-supervised cuts. No 802.11 graph is cut."
LETTERS = "abcdefghjklmnopqrstuvwxyz"


class Lookup(PreTrainedModel):
    """Logits by a word's first piece: b and p begin a phrase, i and j go on, in each pair the first more surely.

    With `by_place` they also depend on the place in the window, so that it shows where a word was read.
    """

    config_class = BertConfig

    def __init__(self, config, tokenizer, by_place=False):
        super().__init__(config)
        self.by_place = by_place
        self.table = nn.Parameter(torch.tensor([[3.0, 0.0, 0.0]]).repeat(config.vocab_size, 1))
        for letter, label, logit in (("b", 1, 9.0), ("p", 1, 5.0), ("i", 2, 9.0), ("j", 2, 5.0)):
            self.table.data[tokenizer.convert_tokens_to_ids(letter), label] = logit
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, 1)  # so many places it knows
        self.post_init()

    def forward(self, input_ids, **_):
        logits = self.table[input_ids]
        if self.by_place:
            place = torch.arange(input_ids.shape[1])
            logits = logits + torch.stack([torch.sin(place * n) for n in (1.0, 2.0, 3.0)], dim=-1) * 5
        return TokenClassifierOutput(logits=logits)


def names(phrases):
    return [phrase["keyphrase"] for phrase in phrases]


def assert_same(answers, others):
    """The same keyphrases in the same places; scores up to the last shown digit, which floating point may turn."""
    assert len(answers) == len(others)
    for answer, other in zip(answers, others, strict=True):
        one, two = (sorted(phrases, key=lambda phrase: phrase["start"]) for phrases in (answer, other))
        assert [(p["keyphrase"], p["start"], p["end"]) for p in one] == [
            (p["keyphrase"], p["start"], p["end"]) for p in two
        ]
        for p, q in zip(one, two, strict=True):
            assert p["score"] == pytest.approx(q["score"], abs=3e-6)
            assert [(m["start"], m["end"]) for m in p["mentions"]] == [(m["start"], m["end"]) for m in q["mentions"]]


def random_text(words, seed=0):
    rng = np.random.default_rng(seed)
    return " ".join("".join(rng.choice(list(LETTERS), rng.integers(1, 5))) for _ in range(words))


@pytest.fixture(scope="module")
def sharp_seke(tiny_seke):
    """A tiny SEKE with weights large enough that its scores spread."""

    def build(name="bert"):
        model = tiny_seke(name)
        model.classifier.weight.data *= 30
        return model

    return build


@pytest.fixture(scope="module")
def extract(sharp_seke, tiny_tokenizer):
    return pipeline("keyphrase-extraction", model=sharp_seke(), tokenizer=tiny_tokenizer)


@pytest.fixture(scope="module")
def lookup(backbone_config, tiny_tokenizer):
    """lookup(**model) -> a pipeline over a model whose answers are known beforehand."""

    def build(by_place=False, id2label=None, **options):
        config = backbone_config("bert", id2label=id2label or {0: "O", 1: "B", 2: "I"})
        return pipeline(
            "keyphrase-extraction",
            model=Lookup(config, tiny_tokenizer, by_place),
            tokenizer=tiny_tokenizer,
            **options,
        )

    return build


# ---- what goes in and comes out


def test_a_text_gives_a_list_of_phrases_with_places_and_mentions(lookup):
    answer = lookup()("x bx in b ix; bx p")
    assert names(answer) == ["bx", "b ix", "p"]
    assert answer[0]["mentions"] == [
        {"start": 2, "end": 4, "score": answer[0]["score"]},
        {"start": 14, "end": 16, "score": answer[0]["score"]},
    ]
    p_b = np.exp(9) / (np.exp(9) + np.exp(3) + 1)
    assert answer[0]["score"] == pytest.approx(p_b, abs=1e-6)
    assert [set(phrase) for phrase in answer] == [{"keyphrase", "score", "start", "end", "mentions"}] * 3


TEXTS = [TEXT, "", random_text(30), "bx"]


def test_lists_and_tuples_give_lists_in_order(extract):
    expected = [extract(text) for text in TEXTS]
    assert any(expected) and expected[1] == []
    assert_same(extract(TEXTS), expected)
    assert_same(extract(tuple(TEXTS)), expected)
    assert isinstance(extract(tuple(TEXTS)), list)
    assert extract([]) == [] and extract(()) == []


@pytest.mark.parametrize("kind", ["generator", "column", "iterator", "dict values"])
def test_other_iterables_give_an_iterator_in_order(extract, kind):
    documents = {
        "generator": lambda: (text for text in TEXTS),
        "column": lambda: Dataset.from_dict({"text": TEXTS})["text"],
        "iterator": lambda: map(str, TEXTS),
        "dict values": lambda: dict(enumerate(TEXTS)).values(),
    }
    answers = extract(documents[kind]())
    assert iter(answers) is answers
    assert_same(list(answers), [extract(text) for text in TEXTS])


def test_a_generator_is_read_only_as_far_as_results_are_asked_for(lookup):
    read = []

    def documents():
        for number in range(500):
            read.append(number)
            yield f"b{LETTERS[number % 20]} x"

    answers = lookup()(documents(), batch_size=2)
    assert read == []
    first = [names(answer) for answer in itertools.islice(answers, 40)]
    assert first == [[f"b{LETTERS[i % 20]}"] for i in range(40)]
    assert 40 <= len(read) < 100


def test_lists_of_words_give_places_in_the_joined_text(lookup):
    documents = [["x", "bx", "ix", ",", "b"], ["b!", "p"], []]
    answers = lookup()(documents, is_split_into_words=True)
    assert [names(answer) for answer in answers] == [["bx ix", "b"], ["p"], []]
    for words, answer in zip(documents, answers, strict=True):
        for phrase in answer:
            assert " ".join(words)[phrase["start"] : phrase["end"]] == phrase["keyphrase"]
    assert lookup()(documents[0], is_split_into_words=True) == answers[0]
    assert list(lookup()(iter(documents), is_split_into_words=True)) == answers
    assert lookup(is_split_into_words=True)(documents) == answers


def test_a_hyphenated_word_of_a_list_can_be_a_keyphrase(lookup):
    answer = lookup()(["c", "b-i", "ix", "-", "c"], is_split_into_words=True)
    assert names(answer) == ["b-i ix"] == names(lookup()("c b-i ix - c"))


@pytest.mark.parametrize(
    "documents, options, message",
    [
        (["graph", None], {}, "Document 1 is a NoneType, not a text: None"),
        (
            ["graph", "cuts", ["graph", "cuts"]],
            {},
            r"Document 2 is a list.*\['graph', 'cuts'\].*is_split_into_words=True",
        ),
        ([b"graph"], {}, "Document 0 is a bytes"),
        (["graph"] * 700 + [5], {}, "Document 700 is a int, not a text: 5"),
        ([["graph"], "cuts"], {"is_split_into_words": True}, "Document 1 is not a list of words: 'cuts'"),
        ([["graph"], ["cuts", 5]], {"is_split_into_words": True}, r"Document 1 is not a list of words: \['cuts', 5\]"),
    ],
)
def test_a_document_of_the_wrong_type_is_named_by_its_number(lookup, documents, options, message):
    with pytest.raises(TypeError, match=message):
        lookup()(documents, **options)
    with pytest.raises(TypeError, match=message):
        list(lookup()(iter(documents), **options))


@pytest.mark.parametrize("inputs", [None, 5, b"graph", {"title": "graph"}], ids=repr)
def test_inputs_that_are_no_texts_are_refused_at_once(lookup, inputs):
    with pytest.raises(TypeError, match="text"):
        lookup()(inputs)


# ---- any text


unicode_texts = st.text(
    st.one_of(
        st.sampled_from(
            [*"ab12 -/.,'’\n\u0000\ufffd", *"e\u0301\u0327\u00adשלוםאב\u202e日本ไย🙂👩\u200d🔬🇸🇮\ud800\udfffßİ"]
        ),
        st.characters(exclude_categories=()),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@example("שלום עולם, graph cuts")
@example("cafe\u0301 cre\u0300me \ud800 graph\udfff cuts \u0000x")
@example("👩\u200d🔬🇸🇮 深層学習 ไทย \ufffd graph \ufffd")
@given(unicode_texts)
def test_every_mention_is_a_piece_of_the_text_from_a_words_start_to_a_words_end(extract, text):
    clean = CleanText(text)
    words = [clean.source_span(start, end) for _, start, end in split_words(clean.text)]
    starts, ends = {start for start, _ in words}, {end for _, end in words}
    for phrase in extract(text, top_k=None):
        piece = text[phrase["start"] : phrase["end"]].replace("\u00ad", "")
        assert phrase["keyphrase"] and clean_text.clean(" ".join(piece.split())) == phrase["keyphrase"]
        assert 0 <= phrase["score"] <= 1
        for mention in phrase["mentions"]:
            assert mention["start"] in starts and mention["end"] in ends


@pytest.mark.parametrize("text", [TEXT, "שלום עולם \u202eabc", "深層 graph", "cafe\u0301 \ud800 x\udfff \u0000y"])
def test_there_are_phrases_in_texts_of_any_script(lookup, text):
    everything = lookup()
    everything.model.table.data[:] = torch.tensor([0.0, 5.0, 0.0])  # every word begins a phrase
    found = {m["start"] for phrase in everything(text, top_k=None) for m in phrase["mentions"]}
    assert found == {start for word, start, _ in split_words(text) if word not in ",."}


@pytest.mark.parametrize("text", ["", " \n\t", "\u0000", "...", "?! (;) --- / ' 🙂", "\ud800"])
def test_a_text_without_words_has_no_keyphrases(extract, lookup, text):
    everything = lookup()
    everything.model.table.data[:] = torch.tensor([0.0, 5.0, 0.0])
    assert extract(text) == everything(text) == []


def test_a_sign_that_the_tokenizer_drops_takes_no_keyphrase_with_it(lookup):
    assert names(lookup()("x bx ix \ufffd x")) == ["bx ix"]


# ---- texts from PDFs and web pages


@pytest.mark.parametrize(
    "text, expected",
    [
        ("x bx\n\t ix, c", [("bx ix", "bx\n\t ix")]),
        ("x bx i-\nix, c", [("bx i-ix", "bx i-\nix")]),
        ("x bx ii-\nxx, c", [("bx iixx", "bx ii-\nxx")]),
        ("x ba\u00adb\u00ad\n  cc x", [("babcc", "ba\u00adb\u00ad\n  cc")]),
        ("x b&nbsp;i b&ouml;i x", [("b i", "b&nbsp;i"), ("böi", "b&ouml;i")]),
        ("x b &amp; i &lt;p&gt; c", [("b", "b"), ("i", "i"), ("p", "p")]),
    ],
)
def test_keyphrases_are_clean_and_their_places_are_those_in_the_text(lookup, text, expected):
    answer = lookup()(text)
    places = sorted((phrase["start"], phrase["end"], phrase["keyphrase"]) for phrase in answer)
    assert [(keyphrase, text[start:end]) for start, end, keyphrase in places] == expected


def test_the_model_reads_joined_words(lookup):
    hyphenated, whole = "the net-\nworks of learn\u00ading &amp; graph", "the networks of learning & graph"
    extract = lookup()
    (one,), (other,) = (extract.preprocess([text])["windows"] for text in (hyphenated, whole))
    assert one.inputs == other.inputs


@pytest.mark.parametrize("word", ["nbsp", "amp", "lt"])
def test_an_entitys_name_is_no_keyphrase(lookup, word):
    everything = lookup()
    everything.model.table.data[:] = torch.tensor([0.0, 5.0, 0.0])  # every word begins a phrase
    assert names(everything(f"graph&{word};cut")) == ["graph", "cut"]


# ---- the same answer


@pytest.mark.parametrize("name", ["bert", "deberta-v2", "modernbert"])
def test_a_document_has_the_same_answer_alone_and_in_a_mixed_batch(sharp_seke, tiny_tokenizer, name):
    extract = KeyphraseExtractionPipeline(sharp_seke(name), tiny_tokenizer, top_k=None)
    documents = [TEXT, random_text(3), random_text(200, 1), "", random_text(40, 2), "graph"]
    alone = [extract(document) for document in documents]
    assert_same(extract(documents, batch_size=6), alone)
    assert sum(map(bool, alone)) >= 4 and alone[2] != alone[4]


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_the_batch_size_does_not_change_the_answer(extract, batch_size):
    documents = [random_text(1 + 11 * (i % 9), i) for i in range(25)]
    assert_same(extract(documents, batch_size=batch_size, top_k=None), extract(documents, top_k=None))


def test_few_long_documents_are_prepared_at_once(lookup):
    read = []

    def documents():
        for number in range(20):
            read.append(number)
            yield "x " * 8_000 + "b"

    first = next(lookup()(documents(), batch_size=1))
    assert names(first) == ["b"] and len(read) <= 3


def test_short_documents_are_read_together_in_the_room_of_long_ones(extract, monkeypatch):
    shapes, forward = [], extract.forward

    def seen(batch, **kwargs):
        shapes.append(tuple(batch["input_ids"].shape))
        return forward(batch, **kwargs)

    monkeypatch.setattr(extract, "forward", seen)
    documents = [random_text(40, i) for i in range(2)] + [random_text(n, n) for n in (15, 14, 13, 12)]
    documents += [random_text(2, i) for i in range(24)]
    extract(documents, batch_size=2)
    (first, longest), *rest = shapes
    assert first == 2 and all(n * length <= 2 * longest and 2 <= n <= 8 for n, length in rest[:-1])
    assert sum(n for n, _ in shapes) >= len(documents)  # some are read in two windows
    assert max(n for n, _ in rest) == 8  # four times as many, though more would fit


@pytest.mark.parametrize("name", ["bert", "deberta-v2", "modernbert"])
def test_a_tokenizer_that_pads_on_the_left_gives_the_same_answer(sharp_seke, tiny_tokenizer, name):
    left = copy.deepcopy(tiny_tokenizer)
    left.padding_side = "left"
    model, documents = sharp_seke(name), [TEXT, random_text(5), random_text(150)]
    expected = KeyphraseExtractionPipeline(model, tiny_tokenizer)(documents)
    assert all(expected)
    assert_same(KeyphraseExtractionPipeline(model, left)(documents), expected)


def test_a_model_left_in_train_mode_answers_as_in_eval_mode(sharp_seke, tiny_tokenizer):
    model = sharp_seke()
    extract = KeyphraseExtractionPipeline(model, tiny_tokenizer)
    expected = extract(TEXT)
    inputs = tiny_tokenizer(TEXT, return_tensors="pt")
    model.train()
    assert not torch.equal(model(**inputs).logits, model(**inputs).logits)  # dropout and the router's noise are at work
    assert extract(TEXT) == expected
    model.train()
    assert list(extract(iter([TEXT]))) == [expected]


def test_a_saved_model_answers_the_same_from_its_folder(sharp_seke, tiny_tokenizer, extract, tmp_path):
    sharp_seke().save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    assert pipeline("keyphrase-extraction", model=str(tmp_path))(TEXT) == extract(TEXT)


# ---- choosing


def test_the_best_come_first_and_ties_go_to_the_earlier_phrase(lookup):
    answer = lookup()("p px b x bx i")
    assert names(answer) == ["b", "bx i", "p", "px"]
    scores = [phrase["score"] for phrase in answer]
    assert scores[0] == scores[1] > scores[2] == scores[3]


def test_top_k_cuts_the_ranked_list(extract):
    text = random_text(100)
    everything = extract(text, top_k=None)
    assert len(everything) > 10
    assert extract(text) == everything[:10]
    assert extract(text, top_k=3) == everything[:3]
    assert extract(text, top_k=10**6) == everything


@pytest.mark.parametrize("top_k", [0, -1])
def test_a_top_k_below_one_is_refused_with_the_mend(lookup, top_k):
    message = f"top_k={top_k}: ask for at least one phrase, or for all of them with top_k=None"
    with pytest.raises(ValueError, match=message):
        lookup()("b", top_k=top_k)
    with pytest.raises(ValueError, match=message):
        lookup(top_k=top_k)


def test_min_score_leaves_out_what_is_below_it_before_top_k_cuts(extract):
    text = random_text(100)
    everything = extract(text, top_k=None)
    middle = everything[len(everything) // 2]["score"]
    sure = [phrase for phrase in everything if phrase["score"] >= middle]
    assert 1 < len(sure) < len(everything)
    assert extract(text, top_k=None, min_score=middle) == sure
    assert extract(text, top_k=1, min_score=middle) == everything[:1]
    assert extract(text, min_score=1.1) == []


def test_options_of_the_pipeline_are_defaults_that_a_call_overrides(lookup):
    text = "b p"
    one = lookup(top_k=1, min_score=0.5)
    assert names(one(text)) == ["b"]
    assert names(one(text, top_k=None)) == ["b", "p"]
    assert names(one(text, top_k=None, min_score=0.95)) == ["b"]
    assert names(one(text)) == ["b"]


def test_an_unknown_option_is_named_with_those_there_are(lookup):
    message = "got 'aggregation_strategy'. It takes top_k, min_score, threshold, batch_size, on_long, overlap"
    with pytest.raises(TypeError, match=message):
        lookup()("b", aggregation_strategy="simple")
    with pytest.raises(TypeError, match=message):
        lookup(aggregation_strategy="simple")


# ---- long documents


@pytest.mark.parametrize(
    "words, max_length, overlap",
    [(300, None, None), (300, 20, 6), (101, 13, 0), (250, 17, 5), (61, 17, 5), (64, 20, 9)],
)
def test_a_word_is_read_in_the_window_where_it_stands_furthest_from_a_cut(lookup, words, max_length, overlap):
    letters = [LETTERS[(7 * i) % 25] for i in range(words)]  # one piece a word
    extract = lookup(by_place=True)
    room, shared = (max_length or 64) - 2, 16 if overlap is None else overlap
    begins = [0]
    while begins[-1] + room < words:
        begins.append(begins[-1] + room - shared)
    ids = extract.tokenizer.convert_tokens_to_ids(letters)
    said = []
    for word in range(words):
        best = None
        for begin in begins:
            if begin <= word < begin + room:
                to_cut = [word - begin] * (begin > 0) + [begin + room - 1 - word] * (begin + room < words)
                if best is None or min(to_cut, default=words) > best[0]:
                    best = min(to_cut, default=words), word - begin + 1
        waves = torch.stack([torch.sin(torch.tensor(best[1]) * n) for n in (1.0, 2.0, 3.0)]) * 5
        said.append((extract.model.table[ids[word]].detach() + waves).argmax().item())
    text = " ".join(letters)
    answer = extract(text, top_k=None, max_length=max_length, overlap=overlap)
    covered = {place // 2 for p in answer for m in p["mentions"] for place in range(m["start"], m["end"], 2)}
    assert covered == {word for word, label in enumerate(said) if label}
    begun = {m["start"] // 2 for p in answer for m in p["mentions"]}
    assert begun == {w for w, label in enumerate(said) if label == 1 or (label == 2 and (w == 0 or not said[w - 1]))}


def test_where_windows_do_not_matter_a_long_document_reads_as_its_parts(lookup):
    extract = lookup()  # looks at nothing but the word itself
    part = "x bx ix and p in jx, b "
    offsets = [len(part) * i for i in range(60)]
    long = extract(part * 60, top_k=None)
    assert names(long) == names(extract(part, top_k=None))
    for phrase, short in zip(long, extract(part), strict=True):
        places = [m["start"] + offset for offset in offsets for m in short["mentions"]]
        assert [m["start"] for m in phrase["mentions"]] == places
    assert_same([extract(part * 60, max_length=9, overlap=3, top_k=None)], [long])


def test_a_long_document_is_refused_by_number_with_the_mend(lookup):
    documents = ["b"] * 3 + ["b " * 63]
    message = r"Document 3 \(126 characters\) is longer than 64 sub-tokens. Use on_long='window' .*'truncate' to cut it"
    with pytest.raises(ValueError, match=message):
        lookup()(documents, on_long="error")
    assert len(lookup()(documents[:3] + ["b " * 62], on_long="error")) == 4
    with pytest.raises(ValueError, match="on_long='cut' is not known. Use one of 'window', 'error', 'truncate'"):
        lookup()("b", on_long="cut")


def test_a_long_document_far_down_the_input_is_refused_by_its_own_number(lookup):
    with pytest.raises(ValueError, match="Document 200 "):
        lookup()(["b"] * 200 + ["b " * 63], on_long="error")


def test_a_cut_document_has_the_keyphrases_of_its_beginning_only(lookup):
    beginning = "x b i " * 20 + "x x "  # 62 pieces: a window and no more
    text = beginning + "p j " * 50
    assert names(lookup()(text)) == ["b i", "p j"]
    assert lookup()(text, on_long="truncate") == lookup()(beginning)


@pytest.mark.parametrize("last", ["b", "i", "c"])
def test_no_keyphrase_reaches_beyond_the_cut(lookup, last):
    words = ["c"] * 61 + [last] + ["c"] * 10
    extract = lookup()
    extract.model.table.data[:, 0] = 0.3  # O is the likeliest label of a c, but less likely than B and I together
    text, beginning = " ".join(words), " ".join(words[:62])
    assert extract(text, on_long="truncate") == extract(beginning)
    assert bool(extract(beginning)) is (last != "c")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"overlap": 62}, "overlap=62 does not fit into windows of max_length=64.*Use 0 to 61"),
        ({"overlap": -1}, "overlap=-1 does not fit"),
        ({"max_length": 10, "overlap": 8}, "overlap=8 does not fit into windows of max_length=10.*Use 0 to 7"),
        ({"max_length": 2}, "max_length=2 leaves no room"),
    ],
)
def test_windows_that_cannot_work_are_refused_with_the_mend(lookup, options, message):
    with pytest.raises(ValueError, match=message):
        lookup()("b", **options)


def test_two_hundred_thousand_words_are_read_to_the_end(tiny_seke, tiny_tokenizer):
    extract = KeyphraseExtractionPipeline(tiny_seke(use_rnn=False), tiny_tokenizer)
    text = "graph cuts of the network " * 40_000
    start = time.perf_counter()
    answer = extract(text, batch_size=64, top_k=None)
    assert time.perf_counter() - start < 40
    ends = [mention["end"] for phrase in answer for mention in phrase["mentions"]]
    assert len(ends) > 10_000 and max(ends) > len(text) - 50


# ---- models and tokenizers


@pytest.mark.parametrize(
    "id2label, tags",
    [
        ({0: "O", 1: "B", 2: "I"}, [0, 1, 2]),
        ({0: "O", 1: "B-KEY", 2: "I-KEY"}, [0, 1, 2]),
        ({0: "B", 1: "I", 2: "O"}, [1, 2, 0]),
        ({0: "I_KEY", 1: "b_key", 2: "outside"}, [2, 1, 0]),
        ({0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}, [0, 1, 2, 1, 2]),
        ({2: "I", 0: "O", 1: "B"}, [0, 1, 2]),
    ],
)
def test_labels_are_read_with_and_without_types(id2label, tags):
    assert read_labels(id2label) == tags


@pytest.mark.parametrize(
    "names",
    [
        ["LABEL_0", "LABEL_1", "LABEL_2"],
        ["O", "B"],
        ["O", "I-KEY"],
        ["B", "I"],
        ["O", "PERSON", "PLACE"],
        ["O", "B", "I", "S"],
    ],
)
def test_labels_that_are_not_b_i_and_o_are_named_with_the_mend(backbone_config, tiny_tokenizer, names):
    config = backbone_config("bert", id2label=dict(enumerate(names)))
    listed = re.escape(", ".join(map(repr, names)))
    mend = re.escape("model.config.id2label = {0: 'O', 1: 'B-KEY', 2: 'I-KEY'}")
    with pytest.raises(ValueError, match=f"The model's labels are {listed}: keyphrase-extraction needs.*{mend}"):
        pipeline("keyphrase-extraction", model=BertForTokenClassification(config), tokenizer=tiny_tokenizer)


def test_probabilities_of_one_tag_with_several_types_are_added(backbone_config, tiny_tokenizer):
    config = backbone_config("bert", id2label=dict(enumerate(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"])))
    model = Lookup(config, tiny_tokenizer)
    model.table = nn.Parameter(torch.tensor([[2.0, 1.9, 0.0, 1.9, 0.0]]).repeat(config.vocab_size, 1))
    (phrase,) = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)("graph")
    weights = np.exp([2.0, 1.9, 0.0, 1.9, 0.0])
    assert phrase["score"] == pytest.approx((weights[1] + weights[3]) / weights.sum(), abs=1e-6)


def test_a_stock_token_classifier_works_too(backbone_config, tiny_tokenizer, tmp_path):
    torch.manual_seed(0)
    model = BertForTokenClassification(backbone_config("bert", id2label={0: "O", 1: "B-KEY", 2: "I-KEY"})).eval()
    model.classifier.weight.data *= 30
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)
    answer = extract(random_text(40))
    assert len(answer) == 10
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    assert pipeline("keyphrase-extraction", model=str(tmp_path))(random_text(40)) == answer
    # negative control: other weights, other phrases
    model.classifier.weight.data *= -1
    assert names(extract(random_text(40))) != names(answer)


def test_a_slow_tokenizer_is_refused_with_the_mend(sharp_seke):
    class SlowTokenizer(PreTrainedTokenizer):
        vocab_size = 1

        def get_vocab(self):
            return {"a": 0}

    extract = KeyphraseExtractionPipeline(sharp_seke(), SlowTokenizer())
    with pytest.raises(ValueError, match="SlowTokenizer is a slow tokenizer.*Use a fast one: AutoTokenizer"):
        extract("a")


def test_a_window_is_as_long_as_both_tokenizer_and_model_allow(backbone_config, tiny_tokenizer):
    wide = copy.deepcopy(tiny_tokenizer)
    wide.model_max_length = int(1e30)
    short = copy.deepcopy(tiny_tokenizer)
    short.model_max_length = 20
    model = BertForTokenClassification(backbone_config("bert", id2label={0: "O", 1: "B", 2: "I"}))
    assert [length_limit(tokenizer, model) for tokenizer in (tiny_tokenizer, wide, short)] == [64, 64, 20]
    padded = BertForTokenClassification(backbone_config("bert", max_position_embeddings=40))
    padded.bert.embeddings.position_embeddings.padding_idx = 1  # as RoBERTa's, which count from 2
    assert length_limit(wide, padded) == 38
    answer = KeyphraseExtractionPipeline(model, wide)(random_text(200), top_k=None)
    assert max(phrase["end"] for phrase in answer) > 500  # characters, far beyond the first window
    # asking for more than the model has places for reads as many as it has
    assert_same([KeyphraseExtractionPipeline(model, wide)(random_text(200), top_k=None, max_length=512)], [answer])


def test_the_models_own_threshold_is_used_unless_the_call_names_one(tiny_seke, tiny_tokenizer):
    model = tiny_seke()
    text = "the graph cut of the network is the problem of learning in graph networks"
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)
    by_labels, strict, generous = extract(text), extract(text, threshold=0.99), extract(text, threshold=0.01)
    assert strict == [] and generous and generous != by_labels
    model.config.keyphrase_threshold = 0.01
    assert extract(text) == generous and extract(text, threshold=0.99) == strict
    model.config.keyphrase_threshold = None
    assert extract(text) == by_labels
    for wrong in (0, 1, 1.5, -0.1):
        with pytest.raises(ValueError, match=f"threshold={wrong}: it is a probability"):
            extract(text, threshold=wrong)
