"""pipeline("definition-modeling"): of dense Llamas and mixtures, alone and in batches, one answer and the best of several."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForSequenceClassification, TextStreamer, pipeline

from modeling_lexicon import format_prompt, generation_lexicon
from modeling_lexicon.generation_lexicon import DefinitionGenerator, StopInCircles, distinct_definitions
from tests.tools import train_tokenizer

from .conftest import tiny_dense, tiny_lexicon

ROWS = [
    {"term": "bank", "context": "They sat on the bank of the river."},
    {"term": "cut", "context": "a cut"},
    {"term": "graph", "context": "The graph of the network is cut where the flow is least."},
]
LETTERS = 256


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([], LETTERS + 3)  # bytes, and three special tokens


SIZES = {
    "vocab_size": LETTERS + 3, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def dense():
    return tiny_dense(**SIZES)


@pytest.fixture(scope="module")
def define(dense, tokenizer):
    return pipeline("definition-modeling", model=dense, tokenizer=tokenizer, max_new_tokens=8)


def encoded(tokenizer, row):
    ids = tokenizer(format_prompt(row["term"], row["context"]), add_special_tokens=False)["input_ids"]
    return torch.tensor([[0, *ids, 1]])


@pytest.mark.parametrize("policy", [None, "token", "sequence_hard", "sequence_soft"])
def test_the_size_of_batches_and_of_pieces_changes_nothing(policy, tokenizer, monkeypatch):
    model = tiny_dense(**SIZES) if policy is None else tiny_lexicon(policy=policy, **SIZES)
    model.lm_head.weight.data[1] *= 2  # rows end, at different lengths
    define = pipeline("definition-modeling", model=model, tokenizer=tokenizer, max_new_tokens=20)
    together, *others = define(ROWS), define(ROWS, batch_size=2), list(map(define, ROWS))
    monkeypatch.setattr(generation_lexicon, "PIECE", 99)
    for found in (*others, define(ROWS)):
        for one, other in zip(found, together, strict=True):
            assert one.keys() == {"term", "definition", "score"} and one["definition"] == other["definition"]
            assert one["score"] == pytest.approx(other["score"], abs=1e-5)
    assert len({len(one["definition"]) for one in together}) > 1


def test_the_best_are_the_likeliest_samples_in_their_order(define):
    torch.manual_seed(0)
    found = define(ROWS[:2], best_of=6, num_definitions=6, temperature=3.0)
    for own in found:
        scores = [one["score"] for one in own]
        assert len(own) == 6 and scores == sorted(scores, reverse=True) and scores[0] > scores[-1]
    torch.manual_seed(0)
    for own, best in zip(found, define(ROWS[:2], best_of=6, temperature=3.0), strict=True):
        assert best == own[0]


WAYS = {
    "greedy": {},
    "sampling": {"best_of": 4, "temperature": 3.0, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "several beams": {"num_beams": 3, "best_of": 2, "do_sample": False, "length_penalty": 0.2},
    "sampled beams": {"num_beams": 3, "best_of": 3, "temperature": 2.0},
    "looked up": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("way", WAYS)
def test_texts_are_those_of_generate_and_scores_those_of_their_tokens_by_the_models_own_logits(way, tokenizer):
    dense = tiny_dense(**SIZES)
    dense.lm_head.weight.data[1] *= 4  # rows end, at different lengths
    generator = DefinitionGenerator(dense, tokenizer, max_new_tokens=8, **WAYS[way])
    prompts = [generator.build_prompt(row["term"], row["context"]) for row in ROWS[: 1 if way == "looked up" else 3]]
    seen, generate = [], dense.generate
    dense.generate = lambda **options: seen.append(generate(**options)) or seen[-1]
    torch.manual_seed(5)
    found = sum(generator.generate_batch(prompts, None), [])
    n, lengths = generator.best_of, set()
    assert len(found) == n * len(prompts)
    for i, (text, score) in enumerate(found):
        prompt, own = prompts[i // n], seen[0].sequences[i, max(map(len, prompts)) :].tolist()
        own = own[: own.index(1) + 1] if 1 in own else own
        lengths.add(len(own))
        with torch.no_grad():
            logits = dense(torch.tensor([prompt + own])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(own)[:, None]).mean().exp().item()
        assert score == pytest.approx(expected, abs=2e-6)
        assert text == tokenizer.decode(own, skip_special_tokens=True).strip()
    assert n == 1 or len(lengths) > 1


@given(st.lists(st.sampled_from(["a", "tooth", "Tooth;", "of", "of,"]), min_size=1, max_size=40))
@settings(max_examples=40, deadline=None)
def test_no_definition_repeats_four_words(dense, tokenizer, words):
    generator, text = DefinitionGenerator(dense, tokenizer), " ".join(words)
    kept = generator.decode(generator.cut_repeats(tokenizer(text, add_special_tokens=False)["input_ids"])).split()
    same = [word.strip(",;").lower() for word in words]
    runs, size = [tuple(same[i : i + 4]) for i in range(len(words) - 3)], max(len(kept) - 3, 0)
    assert kept == words[: len(kept)] and len(set(runs[:size])) == size
    first = next((i for i, run in enumerate(runs) if run in runs[:i]), len(words))
    assert kept == words or set(same[len(kept) : first]) <= {"a", "of"}
    assert kept == words or len(kept) == 1 or "tooth" in kept[-1].lower()


@pytest.mark.parametrize("period", [1, 5, 12])
def test_a_row_ends_once_it_is_a_circle(period):
    stop, prompt = StopInCircles(3), [7, 8, 9]
    ended = [bool(stop(torch.tensor([prompt + [i % period for i in range(t)]]), None)) for t in range(30)]
    assert ended == [t >= period + 12 for t in range(30)]
    assert not stop(torch.tensor([prompt + list(range(30))]), None)


def test_a_term_does_not_define_itself_and_a_temperature_asks_for_samples(dense, tokenizer, monkeypatch):
    generator = DefinitionGenerator(dense, tokenizer, best_of=2, temperature=0.7)
    paper = {"temperature": 0.6, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.05}
    assert generator.options == {"do_sample": True, **paper, "temperature": 0.7}
    assert DefinitionGenerator(dense, tokenizer, top_p=0.5).options["do_sample"]
    monkeypatch.setattr(generator, "generate_batch", lambda *_: [[("Bank.", 0.9), ("a side", 0.3)]])
    assert generator(ROWS[:1]) == [{"term": "bank", "definition": "a side", "score": 0.3}]
    monkeypatch.setattr(generator, "generate_batch", lambda *_: [[("Bank.", 0.9)]])
    assert generator(ROWS[:1])[0]["definition"] == ""


def test_definitions_differ_and_an_empty_one_is_the_last_resort():
    def samples(*pairs):
        return [{"definition": text, "score": score} for text, score in pairs]

    found = distinct_definitions(samples(("a", 0.1), ("b", 0.3), ("a", 0.4), ("", 0.9), ("b", 0.3)))
    assert found == samples(("a", 0.4), ("b", 0.3))
    assert distinct_definitions(samples(("", 0.2), ("", 0.5))) == samples(("", 0.5))


def test_a_reward_model_chooses_by_prompt_and_definition(define, dense, tokenizer, tmp_path):
    torch.manual_seed(1)
    config = LlamaConfig(**dense.config.to_dict() | {"num_labels": 1, "architectures": None})
    reward = LlamaForSequenceClassification(config).eval()
    reward.save_pretrained(tmp_path)
    torch.manual_seed(0)
    found = define(ROWS[0], best_of=5, num_definitions=5, reward_model=tmp_path, temperature=3.0, max_new_tokens=4)
    assert [one["score"] for one in found] == sorted((one["score"] for one in found), reverse=True)
    torch.manual_seed(0)
    likely = define(ROWS[0], best_of=5, num_definitions=5, temperature=3.0, max_new_tokens=4)
    assert sorted(one["definition"] for one in likely) == sorted(one["definition"] for one in found)
    generator = DefinitionGenerator(dense, tokenizer, reward_model=reward)
    samples = [encoded(tokenizer, row)[0].tolist() + [i + 5, 1] for i, row in enumerate(ROWS)]
    for padding in (2, 1, 100, None, -1):  # the answer does not depend on the batch, whatever the padding
        reward.config.pad_token_id = padding
        with torch.no_grad():
            alone = [float(reward(torch.tensor([own]), torch.ones(1, len(own))).logits) for own in samples]
        assert len(set(alone)) == 3 and generator.compute_rewards(samples, 2) == pytest.approx(alone, abs=1e-5)
    for sizes in ({"num_labels": 2}, {"num_labels": 1, "vocab_size": LETTERS}):
        model = LlamaForSequenceClassification(LlamaConfig(**dense.config.to_dict() | sizes))
        with pytest.raises(ValueError, match=f"num_labels={model.num_labels} and vocab_size={model.config.vocab_size}"):
            define(ROWS[0], best_of=2, reward_model=model)


def embed(texts):
    return torch.tensor([[1.0, 0.0] if "river" in text else [0.0, 2.0] for text in texts])


@pytest.fixture(scope="module")
def routed(tokenizer):
    model = tiny_lexicon(policy="domain", centroid_size=2, **SIZES).eval()
    model.domain_centroids.fill_(-5.0)
    model.domain_centroids[:2] = torch.tensor([[0.0, 0.7], [0.9, 0.0]])
    return model


def test_centroids_choose_the_expert_and_the_answer_says_so(routed, tokenizer):
    define = pipeline("definition-modeling", model=routed, tokenizer=tokenizer, max_new_tokens=8)
    found = define(ROWS, embedder=embed)
    assert [one["domain"] for one in found] == [1, 0, 0]
    assert [one["distance"] for one in found] == pytest.approx([0.1, 0.3, 0.3])
    given = define(ROWS, domain_ids=[1, 0, 0])
    assert [one["definition"] for one in given] == [one["definition"] for one in found] and "domain" not in given[0]
    other = define(ROWS, domain_ids=0)
    assert other[0]["score"] != given[0]["score"] and other[1]["score"] == pytest.approx(given[1]["score"], abs=1e-5)
    batches, generate = [], routed.generate
    routed.generate = lambda *given, **more: batches.append(more["domain_ids"].tolist()) or generate(*given, **more)
    several = define(ROWS * 2, domain_ids=[1, 0, 0] * 2, batch_size=2)
    del routed.generate
    assert batches == [[0, 0], [0, 0], [1, 1]]  # a batch reads one expert where it can
    assert [one["definition"] for one in several] == 2 * [one["definition"] for one in given]
    assert define(ROWS, domain_ids=np.int64(0)) == other and define(ROWS, domain_ids=np.array([1, 0, 0])) == given
    assert list(define(iter(ROWS), domain_ids=[1, 0, 0, 0])) == given  # how many there are is not known in advance
    for rows, count, ids in ((ROWS, 3, [0, 1]), (iter(ROWS), 3, [0, 1]), (ROWS[:2], 2, [1, 0, 0])):
        with pytest.raises(ValueError, match=f"domain_ids has {len(ids)} values for {count} rows"):
            list(define(rows, domain_ids=ids))


@pytest.mark.parametrize(
    "term, context, kept",
    [
        ("U.S.", "far " * 300 + "the U.S. army" + " off" * 300, "the U.S. army"),
        ("銀行", "銀行は河の岸にある。" * 30, "銀行"),
        ("gong", "bell " + "far " * 300, '"bell far'),
    ],
)  # fmt: skip
def test_a_context_without_room_is_cut_around_its_term_and_a_warning_says_so(
    term, context, kept, define, dense, tokenizer, caplog
):
    generator = DefinitionGenerator(dense, tokenizer, max_new_tokens=8)
    with caplog.at_level("WARNING", logger="transformers_modules"):
        ids = generator.build_prompt(term, context)
    prompt = tokenizer.decode(ids, skip_special_tokens=True)
    window = prompt[1 : prompt.index('" What is')]
    assert kept in prompt and 230 < len(ids) <= 248 and window in context
    assert f"{len(window)} of {len(context):,} characters are read" in caplog.text
    assert define({"term": term, "context": context})["definition"] is not None
    with pytest.raises(ValueError, match="max_new_tokens=250"):
        define({"term": term, "context": context}, max_new_tokens=250)


@pytest.mark.parametrize(
    "given, options, kind, message",
    [
        ("bank", {}, TypeError, r"got 'bank' \(str\)"),
        ([ROWS[0], {"term": "a"}], {}, TypeError, "Row 1 is {'term': 'a'}. Pass"),
        ({"term": "", "context": "a"}, {}, TypeError, "Row 0 is"),
        (ROWS, {"best_of": 0}, ValueError, "best_of=0"),
        (ROWS, {"best_of": 1, "num_definitions": 2}, ValueError, "num_definitions=2 .* best_of=1"),
        (ROWS, {"max_new_tokens": 0}, ValueError, "max_new_tokens"),
    ],
)
def test_wrong_inputs_are_reported(given, options, kind, message, define):
    with pytest.raises(kind, match=message):
        define(given, **options)


def test_special_tokens_are_plain_text_in_a_prompt_and_no_part_of_a_stream(dense, tokenizer, capsys):
    ids = DefinitionGenerator(dense, tokenizer).build_prompt("</s>", "a <s> b")
    assert ids.count(0) == 1 and ids.count(1) == 1
    ending = tiny_dense(**SIZES)
    ending.lm_head.weight.data[1] *= 4
    define = pipeline("definition-modeling", model=ending, tokenizer=tokenizer, streamer=TextStreamer(tokenizer, True))
    text, written = define(ROWS[0])["definition"], capsys.readouterr().out
    assert "</s>" not in written and text in written


DOUBTS = [
    ("art", "The party started late.", "does not occur"), ("Hello", "Hello!", "all that its context has"),
    ("🙂", "🙂🙂", "all that its context has"), ("Bank", "Die Bank am Fluss war nass.", "not to be English"),
    ("река", "Река течёт.", "not to be English"), ("GDP", "GDP rose 3.2% in Q4/2023 vs. Q4/2022.", ""), ("pi", "Pi is 3.14159 to five places.", ""),
    ("mouse", "The mice ate the cheese.", ""), ("break the ice", "Her joke broke the ice.", ""),
]  # fmt: skip


@pytest.mark.parametrize("term, context, reason", DOUBTS)
def test_what_is_no_term_in_a_context_of_the_models_language_has_a_warning(
    term, context, reason, dense, tokenizer, caplog
):
    DefinitionGenerator(dense, tokenizer).warn_of_doubtful_rows([(term, context)])
    assert (reason in caplog.text) if reason else not caplog.text


def test_probabilities_that_are_nan_are_an_error(tokenizer):
    model = tiny_dense(**SIZES)
    model.model.norm.weight.data.fill_(torch.nan)
    define = pipeline("definition-modeling", model=model, tokenizer=tokenizer, max_new_tokens=8)
    with pytest.raises(ValueError, match="NaN. Check its weights"):
        define(ROWS[0])
